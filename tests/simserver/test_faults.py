"""Every fault does what it says, and the truth log says that it did."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.simserver.conftest import FAST
from tests.simserver.raw_client import Answer, Server, chat, running, stream
from vllm_locust.errors import UsageError
from vllm_locust.simserver.faults import PARAMETERS, Fault, FaultPlan, parse_fault, parse_fault_share

CHAT = "/v1/chat/completions"
_numbers = iter(range(1_000_000))


def ask(server: Server, fault: str, outcome: str, body: dict[str, object] | None = None) -> Answer:
    """The answer to a request with this fault, whose truth must have happened with this outcome."""
    name = f"fault-{next(_numbers)}"
    answer = server.ask(CHAT, stream() if body is None else body, {"X-Sim-Fault": fault, "X-Request-Id": name})
    truth = server.truth(name)
    assert (truth["outcome"], truth["fault_happened"]) == (outcome, True)
    assert str(truth["fault"]).startswith(fault.partition(":")[0])
    return answer


def tokens(answer: Answer) -> int:
    return answer.body.count(b'"content":" w')


def test_http_statuses(fast: Server) -> None:
    limited = ask(fast, "status:code=429,retry_after=2", "http_error")
    assert (limited.status, limited.header("retry-after")) == (429, "2")
    assert limited.json()["error"]["code"] == 429
    assert ask(fast, "status:code=503", "http_error", chat()).status == 503
    assert ask(fast, "status", "http_error").status == 500


def test_refused_stream_options(fast: Server) -> None:
    refused = ask(fast, "refuse_stream_options", "http_error")
    assert (refused.status, refused.json()["error"]["param"]) == (400, "stream_options")
    plain = fast.ask(CHAT, chat(stream=True), {"X-Sim-Fault": "refuse_stream_options"})
    assert (plain.status, plain.events()[-1]) == (200, "[DONE]")


def test_other_content(fast: Server) -> None:
    page = ask(fast, "html", "bad_response")
    assert (page.status, page.header("content-type")) == (200, "text/html; charset=utf-8")
    whole = ask(fast, "json", "ok")
    assert (whole.header("content-type"), whole.json()["usage"]["completion_tokens"]) == ("application/json", 5)


@pytest.mark.parametrize("after", [0, 3])
def test_an_error_event(fast: Server, after: int) -> None:
    answer = ask(fast, f"error_event:after={after}", "error_event")
    assert (answer.status, tokens(answer), answer.ended) == (200, after, "complete")
    assert answer.events()[-2]["error"]["code"] == 500
    assert answer.events()[-1] == "[DONE]"


def test_ends_inside_the_stream(fast: Server) -> None:
    truncated = ask(fast, "truncated:after=3", "truncated")
    assert (truncated.ended, tokens(truncated)) == ("complete", 3)
    assert b"[DONE]" not in truncated.body
    assert b'"finish_reason":"' not in truncated.body
    closed = ask(fast, "disconnect:after=2", "disconnected")
    assert (closed.ended, tokens(closed)) == ("eof", 2)
    reset = ask(fast, "reset:after=2", "disconnected")
    assert reset.ended == "reset"
    aborted = ask(fast, "abort:after=2", "error_event")
    assert (aborted.ended, tokens(aborted), aborted.events()[-1]) == ("complete", 2, "[DONE]")
    assert aborted.events()[-3]["choices"][0]["finish_reason"] == "abort"


def test_ends_of_an_answer_that_is_not_streamed(fast: Server) -> None:
    for fault in ("truncated", "disconnect"):
        assert ask(fast, fault, "disconnected", chat()).ended == "eof"
    assert ask(fast, "reset", "disconnected", chat()).ended == "reset"
    assert ask(fast, "error_event", "http_error", chat()).status == 500
    aborted = ask(fast, "abort", "error_event", chat())
    assert aborted.json()["choices"][0]["finish_reason"] == "abort"
    empty = ask(fast, "empty", "empty", chat())
    assert (empty.json()["choices"][0]["message"]["content"], empty.json()["usage"]["completion_tokens"]) == ("", 0)


def test_pauses(fast: Server) -> None:
    stalled = ask(fast, "stall:after=2,s=0.1", "ok")
    gaps = [later - earlier for earlier, later in zip(stalled.chunk_ns, stalled.chunk_ns[1:], strict=False)]
    assert gaps[2] > 90_000_000
    assert tokens(stalled) == 3
    assert stalled.text().count(" w") == 5
    started = time.monotonic()
    late = ask(fast, "slow_headers:s=0.1", "ok")
    assert time.monotonic() - started > 0.1
    assert (late.text().count(" w"), late.events()[-1]) == (5, "[DONE]")


def test_a_stall_without_end_lasts_until_the_client_goes(fast: Server) -> None:
    client = fast.connect()
    client.socket.settimeout(0.15)
    headers = {"X-Sim-Fault": "stall:after=0", "X-Request-Id": "stalled"}
    with pytest.raises(TimeoutError):
        client.ask(CHAT, stream(), headers)
    client.close()
    truth = fast.truth("stalled")
    assert (truth["outcome"], truth["output_tokens"], truth["fault_happened"]) == ("client_closed", 0, True)
    assert truth["headers_after_ns"] is not None


def test_nothing_in_the_answer(fast: Server) -> None:
    empty = ask(fast, "empty", "empty")
    assert (tokens(empty), empty.events()[-2]["usage"]["completion_tokens"], empty.events()[-1]) == (0, 0, "[DONE]")
    assert empty.events()[1]["choices"][0]["finish_reason"] == "stop"
    nothing = ask(fast, "empty_body", "truncated")
    assert (nothing.status, nothing.body, nothing.ended) == (200, b"", "complete")
    role = ask(fast, "role_only", "truncated")
    assert len(role.events()) == 1
    assert role.events()[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_fewer_tokens_than_forced(fast: Server) -> None:
    answer = ask(fast, "short:tokens=2", "short", stream(min_tokens=5))
    assert answer.events()[-2]["usage"]["completion_tokens"] == 2
    assert answer.events()[-3]["choices"][0]["finish_reason"] == "stop"
    assert ask(fast, "short:tokens=2", "ok").events()[-1] == "[DONE]"


def test_missing_and_doubled_ends(fast: Server) -> None:
    assert not any("usage" in event for event in ask(fast, "no_usage", "ok").events()[:-1])
    undone = ask(fast, "no_done", "ok")
    assert b"[DONE]" not in undone.body
    assert b'"finish_reason":"length"' in undone.body
    assert ask(fast, "double_done", "ok").body.count(b"data: [DONE]\n\n") == 2


def plain(fast: Server) -> list[object]:
    return [_without_identity(event) for event in fast.ask(CHAT, stream()).events()]


def _without_identity(event: object) -> object:
    return {**event, "id": "", "created": 0} if isinstance(event, dict) else event


def parse_sse(body: bytes) -> list[object]:
    """A reader by the letter of the standard, for whole bodies."""
    text = body.decode().removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    events: list[object] = []
    data: list[str] = []
    for line in text.split("\n"):
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            joined = "\n".join(data)
            events.append(joined if joined == "[DONE]" else _without_identity(json.loads(joined)))
            data = []
    return events


@pytest.mark.parametrize(
    ("fault", "mark"),
    [
        ("line_end:style=crlf", b"\r\n\r\n"),
        ("line_end:style=cr", b"\r\r"),
        ("no_space", b"data:{"),
        ("comments", b": a comment\n"),
        ("bom", b"\xef\xbb\xbfdata: "),
        ("multi_data", b',\ndata: "object"'),
        ("merge:events=3", b"\n\ndata: "),
        ("split:bytes=5", b"data: "),
    ],
)
def test_spellings_mean_the_same(fast: Server, fault: str, mark: bytes) -> None:
    answer = ask(fast, fault, "ok")
    assert parse_sse(answer.body) == plain(fast)
    assert mark in answer.body
    if fault == "line_end:style=cr":
        assert b"\n" not in answer.body
    if fault == "bom":
        assert answer.body.count(b"\xef\xbb\xbf") == 1


def test_writes_hold_as_many_events_or_bytes_as_asked(fast: Server) -> None:
    merged = fast.ask(CHAT, stream(), {"X-Sim-Fault": "merge:events=3", "X-Request-Id": "merged"})
    assert [chunk.count(b"\n\n") for chunk in merged.chunks] == [3, 3, 2]
    truth = fast.truth("merged")
    before = truth["chunk_before_ns"]
    assert (before[0], before[2], before[3]) == (before[1], before[3], before[4])
    assert before[1] < before[2]
    split = fast.ask(CHAT, stream(), {"X-Sim-Fault": "split:bytes=7", "X-Request-Id": "split"})
    assert max(len(chunk) for chunk in split.chunks) == 7
    truth = fast.truth("split")
    assert truth["output_tokens"] == 5
    assert all(a > b for b, a in zip(truth["chunk_before_ns"], truth["chunk_after_ns"], strict=True))


def test_a_body_that_ends_with_the_connection(fast: Server) -> None:
    answer = ask(fast, "close_framing", "ok")
    assert (answer.ended, answer.header("transfer-encoding"), answer.header("connection")) == ("closed", None, "close")
    assert answer.events()[-1] == "[DONE]"


def test_shares_are_seeded_and_kept(tmp_path: Path) -> None:
    flags = ("--fault", "status:share=0.3,code=503", "--fault", "no_done:share=0.2", "--seed", "5")
    seen: list[list[int]] = []
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        with running(tmp_path / run, *FAST, *flags) as server:
            client = server.connect()
            answers = [client.ask(CHAT, stream(max_tokens=1)) for _ in range(60)]
            client.close()
            seen.append([0 if b"[DONE]" in answer.body else answer.status for answer in answers])
    assert seen[0] == seen[1]
    assert Counter(seen[0])[503] in range(10, 27)
    assert Counter(seen[0])[200] in range(5, 21)


def test_a_draw_follows_the_shares() -> None:
    plan = FaultPlan([(Fault("html"), 0.25), (Fault("json"), 0.5)], seed=1)
    drawn = Counter(str(plan.draw()) for _ in range(8_000))
    assert {name: round(count / 400) for name, count in drawn.items()} == {"html": 5, "json": 10, "None": 5}


def test_unknown_faults_are_refused(fast: Server) -> None:
    refused = fast.ask(CHAT, chat(), {"X-Sim-Fault": "nope"})
    assert refused.status == 400
    assert "choose one of status" in refused.json()["error"]["message"]
    for wrong in (
        "status:code=200",
        "stall:bytes=3",
        "split:bytes=0",
        "status:code=x",
        "line_end:style=lf",
        "html:share=1",
    ):
        with pytest.raises(UsageError):
            parse_fault(wrong)
    with pytest.raises(UsageError, match="share"):
        parse_fault_share("html")
    with pytest.raises(UsageError, match="must not exceed 1"):
        FaultPlan([(Fault("html"), 0.6), (Fault("json"), 0.5)], 0)
    assert {parse_fault(name).name for name in PARAMETERS} == set(PARAMETERS)
