"""``--retries``: what is tried again and what never is, how long the wait is, and what ends it."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.load.driving import Facts, call, drive
from tests.load.scripted_server import LAST_CHUNK, End, Request, ScriptedServer, Step, chunk, chunked, serving, whole
from tests.load.stream_cases import ABC, BUSY, CHUNKED, ROLE, A
from vllm_locust.load.retry import BACKOFF_BASE_NS, BACKOFF_CAP_NS, backoff_ns, retry_after_ns

TRANSPORTS = ["kernel", "sse", "openai"]
SECOND = 1_000_000_000
BUSY_MACHINE_NS = 400_000_000
REASONS = {
    429: b"429 Too Many Requests",
    502: b"502 Bad Gateway",
    503: b"503 Service Unavailable",
    504: b"504 Gateway Timeout",
    500: b"500 Internal Server Error",
    400: b"400 Bad Request",
}


def turned_away(status: int, **headers: bytes) -> tuple[Step, ...]:
    return (whole(b'{"error":{"message":"come back"}}', REASONS[status], **headers),)


GOOD = chunked(*ABC)
ONCE_FIRST: dict[str, tuple[Step, ...]] = {
    **{f"status_{status}": turned_away(status, retry_after=b"0") for status in (429, 502, 503, 504)},
    "in_a_second": turned_away(429, retry_after=b"1"),
    "connection_closed": (*turned_away(503, retry_after=b"0", connection=b"close"), End.CLOSE),
}
"""Each turns the first attempt away and answers the second."""
NEVER_AGAIN: dict[str, tuple[tuple[Step, ...], str]] = {
    "status_500": (turned_away(500, retry_after=b"0"), "http_error"),
    "status_400": (turned_away(400), "http_error"),
    "error_event": (chunked(BUSY), "error_event"),
    "truncated": (chunked(ROLE, A), "truncated"),
    "cut_in_the_body": ((CHUNKED, chunk(ROLE), chunk(A), End.CLOSE), "disconnected"),
    "hung_up": ((End.CLOSE,), "disconnected"),
    "empty": (chunked(ROLE, *ABC[-1:]), "empty"),
    "not_http": ((b"SSH-2.0-OpenSSH\r\n\r\n", End.CLOSE), "bad_response"),
    "late": ((CHUNKED, chunk(ROLE), 1.0, LAST_CHUNK), "timeout_first_token"),
}
SCRIPTS: dict[str, tuple[Step, ...]] = {
    **dict.fromkeys(ONCE_FIRST, GOOD),
    **{f"{name}#1": script for name, script in ONCE_FIRST.items()},
    **{f"never_{name}": script for name, (script, _) in NEVER_AGAIN.items()},
    "always": turned_away(503, retry_after=b"0"),
    "much_later": turned_away(429, retry_after=b"30"),
    "no_hint": turned_away(503),
    "silent_next": (End.BY_CLIENT,),
    "silent_next#1": turned_away(503, retry_after=b"0"),
}


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving(dict(SCRIPTS)) as server:
        yield server


def url(server: ScriptedServer) -> str:
    return f"http://127.0.0.1:{server.listener.getsockname()[1]}"


def posts(server: ScriptedServer, name: str) -> list[Request]:
    return [entry for entry in server.requests if entry.name == name]


def one(transport: str, server: ScriptedServer, name: str, **more: object) -> Facts:
    options: Facts = {"retries": 3, **more}
    (facts,) = drive(transport, [[call(name, url(server), **options)]]).values()
    return facts


def test_what_was_turned_away_is_sent_again_as_one_request(transport: str, server: ScriptedServer) -> None:
    facts = drive(transport, [[call(name, url(server), retries=2)] for name in ONCE_FIRST])
    for name, seen in facts.items():
        first, second = posts(server, name)
        assert (seen["outcome"], seen["text"], seen["http_status"], seen["error"]) == ("ok", "abc", 200, None), name
        assert seen["attempts"] == 2
        assert seen["sent_ns"] <= first.received_ns
        assert seen["chunk_ns"][0] >= second.received_ns
        assert first.body == second.body
        assert (first.head.partition(b"\r\n")[0], b"x-request-id" in first.head.lower()) == (
            second.head.partition(b"\r\n")[0],
            True,
        )


def test_retry_after_is_obeyed_and_the_wait_recorded(transport: str, server: ScriptedServer) -> None:
    seen = one(transport, server, "in_a_second")
    first, second = posts(server, "in_a_second")
    assert SECOND <= seen["retry_wait_ns"] < SECOND + BUSY_MACHINE_NS
    assert second.received_ns - first.received_ns >= SECOND
    assert seen["chunk_ns"][0] - seen["sent_ns"] > SECOND
    assert seen["ended_ns"] - seen["sent_ns"] >= seen["retry_wait_ns"]


def test_retry_after_may_be_a_date(transport: str) -> None:
    at_s = int(time.time()) + 2
    scripts = {"dated": GOOD, "dated#1": turned_away(503, retry_after=formatdate(at_s, usegmt=True).encode())}
    with serving(scripts) as dated:
        seen = one(transport, dated, "dated")
        first, second = posts(dated, "dated")
    left_ns = at_s * SECOND - time.time_ns() + time.monotonic_ns() - first.received_ns
    assert seen["outcome"] == "ok"
    assert second.received_ns - first.received_ns >= left_ns - 50_000_000
    assert seen["retry_wait_ns"] <= 2 * SECOND + BUSY_MACHINE_NS


def test_what_may_have_begun_is_never_sent_again(transport: str, server: ScriptedServer) -> None:
    limits: Facts = {"timeouts": {"first_token_ns": 300_000_000}, "retries": 3}
    facts = drive(transport, [[call(f"never_{name}", url(server), **limits)] for name in NEVER_AGAIN])
    for name, (_, outcome) in NEVER_AGAIN.items():
        seen = facts[f"never_{name}"]
        assert (seen["outcome"], seen["attempts"], seen["retry_wait_ns"]) == (outcome, 1, 0), name
        assert len(posts(server, seen["name"])) == 1


@pytest.mark.parametrize("retries", [0, 2])
def test_after_the_last_attempt_its_answer_stands(transport: str, server: ScriptedServer, retries: int) -> None:
    seen = one(transport, server, "always", retries=retries)
    assert (seen["outcome"], seen["http_status"], seen["error"]) == ("http_error", 503, "come back")
    assert seen["attempts"] == len(posts(server, "always")) == retries + 1


def test_without_a_hint_the_wait_is_the_seeded_backoff(transport: str, server: ScriptedServer) -> None:
    seen = one(transport, server, "no_hint", retries=2)
    draw = random.Random("0")
    expected_ns = sum(draw.randrange((BACKOFF_BASE_NS << retry) + 1) for retry in range(2))
    assert expected_ns <= seen["retry_wait_ns"] < expected_ns + BUSY_MACHINE_NS
    assert len(posts(server, "no_hint")) == 3


def test_a_retry_after_of_0_does_not_hurry_the_backoff(transport: str, server: ScriptedServer) -> None:
    seen = one(transport, server, "always", retries=2)
    draw = random.Random("0")
    expected_ns = sum(draw.randrange((BACKOFF_BASE_NS << retry) + 1) for retry in range(2))
    assert expected_ns <= seen["retry_wait_ns"] < expected_ns + BUSY_MACHINE_NS


def test_a_refused_connection_is_tried_again(transport: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    stop = threading.Event()
    names: list[str] = []

    def serve_later() -> None:
        time.sleep(0.2)
        with serving({"good": GOOD}, address=("127.0.0.1", port)) as late:
            stop.wait(20)
            names.extend(entry.name for entry in late.requests)

    thread = threading.Thread(target=serve_later)
    thread.start()
    try:
        seen = drive(transport, [[call("good", f"http://127.0.0.1:{port}", retries=8)]])["good"]
    finally:
        stop.set()
        thread.join()
    assert (seen["outcome"], names) == ("ok", ["good"])
    assert seen["attempts"] > 1
    assert seen["chunk_ns"][0] - seen["sent_ns"] > seen["retry_wait_ns"] > 0


def test_a_server_that_is_never_there(transport: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"http://127.0.0.1:{probe.getsockname()[1]}"
        seen = drive(transport, [[call("a", place, retries=1)]])["a"]
    assert (seen["outcome"], seen["attempts"]) == ("connect_error", 2)
    assert seen["error"] == f"{place}: Connection refused"


def refuse_after_first(server: ScriptedServer) -> None:
    deadline = time.monotonic() + 30
    while not posts(server, "a") and time.monotonic() < deadline:
        time.sleep(0.01)
    server.refuse_from_now_on()


def test_a_server_that_turned_it_away_and_was_gone_then_has_seen_it(transport: str) -> None:
    """The status stays on record: it tells that the request was sent."""
    with serving({"a": turned_away(429, retry_after=b"1", connection=b"close")}) as short_lived:
        place = url(short_lived)
        threading.Thread(target=refuse_after_first, args=(short_lived,)).start()
        seen = drive(transport, [[call("a", place, retries=1)]])["a"]
        assert len(posts(short_lived, "a")) == 1
    assert (seen["outcome"], seen["attempts"], seen["http_status"]) == ("connect_error", 2, 429)
    assert seen["error"] == f"{place}: Connection refused"


# What ends the wait


@pytest.mark.parametrize(
    ("more", "outcome", "words"),
    [
        ({"timeouts": {"total_ns": 300_000_000}}, "timeout_total", "no end within 0.3 s (--timeout-total), waiting"),
        (
            {"timeouts": {"first_token_ns": 300_000_000}},
            "timeout_first_token",
            "no token within 0.3 s (--timeout-first-token), waiting",
        ),
        ({"patience_ns": 300_000_000}, "abandoned", "no token in time after it was sent (--patience), waiting"),
        ({"drained_after_s": 0.3}, "http_error", "not tried again, since the run was ending: come back"),
        ({"stopped_after_s": 0.3}, "abandoned", "its user was stopped"),
        ({"killed_after_s": 0.3}, "abandoned", "its user was killed"),
    ],
    ids=["total", "first_token", "patience", "drain", "stop", "kill"],
)
def test_what_ends_the_wait_at_once(
    transport: str, server: ScriptedServer, more: dict[str, object], outcome: str, words: str
) -> None:
    seen = one(transport, server, "much_later", **more)
    assert seen["outcome"] == outcome
    assert words in seen["error"]
    assert (seen["http_status"], seen["attempts"], len(server.requests)) == (429, 1, 1)
    assert 200_000_000 < seen["retry_wait_ns"] < 300_000_000 + BUSY_MACHINE_NS
    assert seen["ended_ns"] - seen["sent_ns"] < 300_000_000 + BUSY_MACHINE_NS


def test_a_drain_that_has_begun_lets_nothing_be_tried_again(transport: str, server: ScriptedServer) -> None:
    seen = one(transport, server, "always", drained_after_s=0, after_s=0.05)
    assert (seen["outcome"], seen["attempts"]) in {("http_error", 1), ("http_error", 2)}
    assert "the run was ending" in seen["error"]


@pytest.mark.parametrize(
    ("more", "outcome"),
    [
        ({"timeouts": {"total_ns": 400_000_000}}, "timeout_total"),
        ({"timeouts": {"first_token_ns": 400_000_000}}, "timeout_first_token"),
        ({"patience_ns": 400_000_000}, "abandoned"),
    ],
)
def test_limits_count_over_all_attempts(
    transport: str, server: ScriptedServer, more: dict[str, object], outcome: str
) -> None:
    seen = one(transport, server, "silent_next", **more)
    first, second = posts(server, "silent_next")
    assert (seen["outcome"], seen["attempts"]) == (outcome, 2)
    assert seen["sent_ns"] <= first.received_ns < second.received_ns
    assert 400_000_000 < seen["ended_ns"] - seen["sent_ns"] < 400_000_000 + BUSY_MACHINE_NS


# The arithmetic


def test_backoff_is_full_jitter_below_a_doubling_bound() -> None:
    draw = random.Random(5)
    for retry in range(12):
        bound_ns = min(BACKOFF_CAP_NS, BACKOFF_BASE_NS * 2**retry)
        drawn = [backoff_ns(retry, draw) for _ in range(2000)]
        assert 0 <= min(drawn) < bound_ns * 0.01
        assert bound_ns * 0.99 < max(drawn) <= bound_ns
        # Uniform: mean in the middle, within five standard errors.
        assert abs(sum(drawn) / 2000 - bound_ns / 2) < 5 * bound_ns / (12 * 2000) ** 0.5
    assert backoff_ns(10**9, draw) <= BACKOFF_CAP_NS


@pytest.mark.parametrize(
    ("header", "expected_s"),
    [
        ("120", 120),
        (" 0 ", 0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 30),
        ("Wednesday, 21-Oct-15 07:28:00 GMT", 30),
        ("Wed Oct 21 07:28:00 2015", 30),
        ("Wed, 21 Oct 2015 07:27:00 GMT", 0),
        (None, None),
        ("", None),
        ("soon", None),
        ("-5", None),
        ("1.5", 1.5),
        ("1e9", None),
        ("٣", None),
        ("9" * 5000, None),
        ("Wed, 99 Oct 99999999999 07:28:00 GMT", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str | None, expected_s: float | None) -> None:
    now_unix_ns = 1_445_412_450 * SECOND
    assert retry_after_ns(header, now_unix_ns) == (None if expected_s is None else expected_s * SECOND)


_WORDS = ["Wed", ",", "21", "Oct", "-", "2015", "07:28:00", ":", "GMT", "+9999", "99999999999", "-1", "1e9"]


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(_WORDS), max_size=8).map(" ".join)))
def test_no_header_breaks_the_wait(header: str) -> None:
    wait_ns = retry_after_ns(header, 0)
    assert wait_ns is None or wait_ns >= 0
