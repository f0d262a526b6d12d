"""HTTP framing on the kernel transport: however the bytes are cut into reads, the answer is the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from vllm_locust.completion.reader import CompletionReader
from vllm_locust.load.answer import HttpAnswer
from vllm_locust.load.receiver import Read
from vllm_locust.load.transport import Exchange
from vllm_locust.outcome import Outcome
from vllm_locust.sse import EventDecoder

GOLDENS = sorted((Path(__file__).parents[1] / "goldens" / "vllm_0_32").glob("*.sse"))
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"


def read_of(data: bytes, stamp_ns: int) -> Read:
    return data, stamp_ns, stamp_ns - 10, True, 1


def answered(pieces: Iterable[bytes]) -> tuple[HttpAnswer, CompletionReader]:
    exchange = Exchange(CompletionReader(streamed=True))
    answer = HttpAnswer(exchange)
    for number, piece in enumerate(pieces):
        answer.feed(read_of(piece, 1000 * (number + 1)))
    return answer, exchange.completion


def facts(answer: HttpAnswer, completion: CompletionReader) -> dict[str, Any]:
    return {
        "outcome": answer.exchange.outcome,
        "complete": answer.complete,
        "reusable": answer.reusable,
        "text": completion.texts,
        "tokens": completion.output_tokens,
        "per chunk": completion.chunk_tokens,
        "finish": completion.finish_reason,
        "error": answer.exchange.error,
    }


def chunked(body: bytes) -> list[bytes]:
    """One HTTP chunk an event, as uvicorn writes them, then the last chunk."""
    events = [event + b"\n\n" for event in body.split(b"\n\n") if event]
    return [b"%x\r\n%s\r\n" % (len(event), event) for event in events] + [b"0\r\n\r\n"]


def body_of(path: Path) -> bytes:
    raw = path.read_bytes()
    body = raw.partition(b"\r\n\r\n")[2] or raw
    assert EventDecoder().feed(body)
    return body


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_any_cut_gives_the_same_answer(path: Path) -> None:
    frames = [HEAD + b"transfer-encoding: chunked\r\n\r\n", *chunked(body_of(path))]
    expected = facts(*answered(frames))
    assert expected["complete"]
    assert expected["reusable"]
    whole = b"".join(frames)
    assert facts(*answered([whole])) == expected
    assert facts(*answered(whole[i : i + 1] for i in range(len(whole)))) == expected
    for cut in range(1, len(whole)):
        assert facts(*answered([whole[:cut], whole[cut:]])) == expected, cut


@pytest.mark.parametrize("framing", ["length", "close"])
@pytest.mark.parametrize("path", GOLDENS[:3], ids=lambda path: path.stem)
def test_other_framings(path: Path, framing: str) -> None:
    body = body_of(path)
    expected = facts(*answered([HEAD + b"transfer-encoding: chunked\r\n\r\n", *chunked(body)]))
    head = HEAD + (b"content-length: %d\r\n\r\n" % len(body) if framing == "length" else b"\r\n")
    answer, completion = answered([head, *(body[i : i + 100] for i in range(0, len(body), 100))])
    if framing == "close":
        assert not answer.complete
        answer.end_of_stream(10**9, None)
        expected["reusable"] = False
    assert facts(answer, completion) == expected


def events_read(pieces: list[bytes]) -> CompletionReader:
    return answered([HEAD + b"transfer-encoding: chunked\r\n\r\n", *pieces])[1]


def event(text: str) -> bytes:
    return b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}\n\n' % text.encode()


def frame(*events: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in events)


def test_stamps_and_widths() -> None:
    reader = events_read([frame(event("a")), frame(event("b"), event("c")), frame(event("d"))])
    assert reader.chunk_ns == [2000, 3000, 3000, 4000]
    assert reader.chunk_width_ns == [0, 10, 0, 0], "only the last event of a read has the stamp of the read"


def test_a_read_that_ends_inside_the_next_event_stamps_none_before_it() -> None:
    both = frame(event("a"), event("b"))
    reader = events_read([both[:-30], both[-30:]])
    assert reader.chunk_ns == [2000, 3000]
    assert reader.chunk_width_ns == [10, 0]


def test_an_event_over_several_reads_takes_the_stamp_of_its_last_byte() -> None:
    whole = frame(event("a"))
    reader = events_read([whole[:20], whole[20:40], whole[40:]])
    assert reader.chunk_ns == [4000]
    assert reader.chunk_width_ns == [0]


@pytest.mark.parametrize("size", [b"0x5f", b"+5f", b"5_f", b" 5f", b"-1", b"g"])
def test_sizes_that_are_no_hexadecimal_number_are_refused(size: bytes) -> None:
    payload = event("a")
    answer, _ = answered(
        [HEAD + b"transfer-encoding: chunked\r\n\r\n", frame(event("b")), size + b"\r\n" + payload + b"\r\n"]
    )
    assert answer.exchange.outcome is Outcome.BAD_RESPONSE


def test_informational_answers_come_before_the_real_one() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    answer, completion = answered([early + HEAD + b"transfer-encoding: chunked\r\n\r\n", frame(event("a"))])
    assert answer.exchange.http_status == 200
    assert completion.text == "a"


def test_bytes_after_the_end_make_the_connection_unusable() -> None:
    body = b"data: [DONE]\n\n"
    head = HEAD + b"content-length: %d\r\n\r\n" % len(body)
    answer, _ = answered([head + body + b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"])
    assert answer.complete
    assert not answer.reusable


@pytest.mark.parametrize("kind", [b"text/event-stream", b"application/json"])
def test_an_answer_without_an_end_is_no_answer(kind: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_locust.load.answer.MAX_EVENT_BYTES", 1000)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n" % kind
    pieces = [head, *(frame(b"data: " + b"x" * 94) for _ in range(10))]
    answer, completion = answered(pieces)
    assert not facts(answer, completion)["complete"]
    answer.feed(read_of(frame(b"x"), 99_000))
    told = facts(answer, completion)
    assert (told["complete"], told["reusable"], told["outcome"]) == (True, False, Outcome.BAD_RESPONSE)
    assert told["error"] == "an event or a body of more than 64 MiB"


@pytest.mark.parametrize("transport", ["sse", "openai"])
def test_other_transports_bound_an_event_too(transport: str) -> None:
    """They share ``Attempt``: how many bytes have come since the last event."""
    script = f"""
from gevent import monkey
monkey.patch_all()
import socket, gevent
from vllm_locust.load import attempt, transport
attempt.MAX_EVENT_BYTES = 100_000
from tests.load import drive
server = socket.create_server(("127.0.0.1", 0))

def serve():
    sock, _ = server.accept()
    sock.recv(65536)
    sock.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-type: text/event-stream\\r\\n\\r\\ndata: ")
    try:
        while True:
            sock.sendall(b"x" * 10_000)
            gevent.sleep(0.001)
    except OSError:
        pass

gevent.spawn(serve)
url = f"http://127.0.0.1:{{server.getsockname()[1]}}"
call = {{"name": "a", "url": url, "streamed": True}}
plan = {{"transport": {transport!r}, "tls": {{}}, "proxy": None, "rounds": [[[call]]]}}
for facts in drive._carry_out(plan):
    print(facts["outcome"], "|", facts["error"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "bad_response | an event or a body of more than 64 MiB\n", done.stderr


def test_bytes_after_the_end_in_one_go_with_it_do_not_leave_the_user_waiting() -> None:
    script = """
from gevent import monkey
monkey.patch_all()
import socket
from types import SimpleNamespace
from vllm_locust.load.kernel import _Stream

near, _ = socket.socketpair()
stream = _Stream(SimpleNamespace(streamed=True), SimpleNamespace(sock=near, stamps=True, tls=None))
whole = b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\n{}"
stream.consume([(whole, 5, 1, True, 0), (b"more", 6, 5, True, 0)])
print(stream.finished.is_set(), stream.answer.reusable)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True False\n", done.stderr
