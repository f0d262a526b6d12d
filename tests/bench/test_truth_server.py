"""The benchmark's truth server against raw sockets: its wire format, its schedule and its log."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.placement import default_placement
from tests.bench.truth import Schedule, TruthServer

USAGE = '"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}'


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TruthServer]:
    with TruthServer(Schedule(tokens=6, gap_us=2000, ttft_us=5000), tmp_path, default_placement(False)) as running:
        yield running


def ask(server: TruthServer, body: str, *headers: str, sock: socket.socket | None = None) -> bytes:
    """One POST over a socket of our own; returns the whole answer, read up to the end of its chunked body."""
    own = sock is None
    connection = sock or socket.create_connection(("127.0.0.1", server.port), timeout=10)
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    connection.sendall(("\r\n".join(lines) + "\r\n\r\n" + body).encode())
    answer = b""
    while not answer.endswith(b"\r\n0\r\n\r\n"):
        piece = connection.recv(1 << 20)
        assert piece, answer[-200:]
        answer += piece
    if own:
        connection.close()
    return answer


def chunks_of(answer: bytes) -> list[bytes]:
    """The HTTP chunks of a body, decoded independently of the server's writing."""
    rest = answer.partition(b"\r\n\r\n")[2]
    found: list[bytes] = []
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        if length == 0:
            return found
        found.append(rest[:length])
        rest = rest[length + 2 :]


def events_of(answer: bytes) -> list[dict[str, object]]:
    chunks = chunks_of(answer)
    assert all(
        chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") and chunk.count(b"\n\n") == 1 for chunk in chunks
    )
    assert chunks[-1] == b"data: [DONE]\n\n"
    return [json.loads(chunk[6:]) for chunk in chunks[:-1]]


def test_events_have_the_keys_of_vllm_in_its_order(server: TruthServer) -> None:
    role, *tokens, usage = events_of(ask(server, "{" + USAGE + "}", "X-Request-Id: abc-1"))
    head = ["id", "object", "created", "model", "choices"]
    assert list(role) == [*head, "usage", "prompt_token_ids", "prompt_text"]
    assert [list(token) for token in tokens] == [[*head, "usage"]] * 6
    assert list(usage) == [*head, "usage", "system_fingerprint"]
    assert {event["id"] for event in (role, *tokens, usage)} == {"chatcmpl-abc-1"}
    counts = [token["usage"]["completion_tokens"] for token in tokens]  # type: ignore[index]
    assert counts == [1, 2, 3, 4, 5, 6]


def test_without_continuous_usage_only_the_last_event_counts(server: TruthServer) -> None:
    events = events_of(ask(server, '{"stream":true,"stream_options":{"include_usage":true}}'))
    assert ["usage" in event for event in events] == [False] * 7 + [True]
    plain = events_of(ask(server, '{"stream":true}'))
    assert not any("usage" in event for event in plain)


@pytest.mark.parametrize(
    ("body", "headers", "tokens"),
    [
        ('{"stream":true}', (), 6),
        ('{"stream":true,"max_tokens":3}', (), 3),
        ('{"max_completion_tokens" : 4 , "stream" : true}', (), 4),
        ('{"stream":true,"max_tokens":3}', ("X-Truth-Tokens: 9",), 9),
        ('{"messages":[{"content":"\\"max_tokens\\": 2, \\\\"}],"stream":true}', (), 6),
        ('{"messages":[{"max_tokens":2}],"stream":true}', (), 6),
    ],
)
def test_the_number_of_tokens_asked_for(server: TruthServer, body: str, headers: tuple[str, ...], tokens: int) -> None:
    assert len(events_of(ask(server, body, *headers))) == tokens + 1


def test_the_log_brackets_what_a_client_saw(tmp_path: Path) -> None:
    with TruthServer(Schedule(tokens=20, gap_us=3000, ttft_us=10_000), tmp_path, default_placement(False)) as server:
        began = time.monotonic_ns()
        answer = ask(server, '{"stream":true}', "X-Request-Id: joined")
        ended = time.monotonic_ns()
    (request,) = server.log().requests
    assert (request.request_id, request.state, request.tokens_planned) == ("joined", "finished", 20)
    assert f" r{request.serial:08d}".encode() in answer
    assert began < request.read_ns < int(request.sent_ns[0])
    assert int(request.after_ns[-1]) < ended
    assert len(request.sent_ns) == 20
    assert (request.after_ns >= request.sent_ns).all()
    deadlines = request.read_ns + 10_000_000 + 3_000_000 * (request.sent_ns * 0 + range(20))
    assert (request.sent_ns >= deadlines).all(), "never early"
    assert (request.late_ns == request.sent_ns - deadlines).all()


def test_several_events_in_one_write_share_one_time(tmp_path: Path) -> None:
    schedule = Schedule(tokens=7, gap_us=1000, events_per_write=3)
    with TruthServer(schedule, tmp_path, default_placement(False)) as server:
        assert len(events_of(ask(server, '{"stream":true}'))) == 8
    (request,) = server.log().requests
    assert len(request.sent_ns) == 7
    assert len(set(request.sent_ns.tolist())) == 3


def test_a_client_that_leaves_is_logged_as_aborted(tmp_path: Path) -> None:
    with TruthServer(Schedule(tokens=1000), tmp_path, default_placement(False)) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            body = b'{"stream":true}'
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            assert connection.recv(100)
        deadline = time.monotonic() + 5
        while server.stats()["active"] and time.monotonic() < deadline:
            time.sleep(0.01)
    (request,) = server.log().requests
    assert request.state == "aborted"


def test_a_large_prompt_in_small_pieces_and_the_next_request_on_the_same_connection(server: TruthServer) -> None:
    prompt = 'x\\"' * 350_000
    body = '{"messages":[{"role":"user","content":"' + prompt + '"}],"max_tokens":2,"stream":true}'
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        assert len(events_of(ask(server, body, sock=connection))) == 3
        assert len(events_of(ask(server, '{"stream":true}', sock=connection))) == 7


def test_a_large_event_arrives_whole(server: TruthServer) -> None:
    events = events_of(ask(server, '{"stream":true,"max_tokens":3}', "X-Truth-Event-Bytes: 300000"))
    texts = [event["choices"][0]["delta"]["content"] for event in events[1:]]  # type: ignore[index]
    assert [len(text) for text in texts] == [300_000] * 3
