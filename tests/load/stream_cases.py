"""The stream suite: what a server does, and what every transport must make of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.goldens import golden
from tests.load.scripted_server import LAST_CHUNK, End, Step, chunk, chunked, head, whole

ID = "chatcmpl-1"


def data(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def delta(finish: str | None = None, usage: int | None = None, **fields: Any) -> bytes:
    value: dict[str, Any] = {"id": ID, "choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}
    if usage is not None:
        value["usage"] = {"prompt_tokens": 9, "total_tokens": 9 + usage, "completion_tokens": usage}
    return data(value)


ROLE = delta(role="assistant", content="")
A, B, C = delta(content="a"), delta(content="b"), delta(content="c", finish="stop")
USAGE = data({"id": ID, "choices": [], "usage": {"prompt_tokens": 9, "total_tokens": 12, "completion_tokens": 3}})
DONE = data(b"[DONE]")
ABC = (ROLE, A, B, C, USAGE, DONE)
BUSY = b'data: {"error": {"message": "The engine is busy.", "type": "Service Unavailable", "code": 503}}\n\n'
CHUNKED = head(transfer_encoding=b"chunked")


@dataclass(frozen=True)
class Facts:
    """None in ``error`` is none; otherwise words that it must hold."""

    outcome: str = "ok"
    text: str = "abc"
    chunks: int = 3
    output_tokens: int | None = 3
    finish_reason: str | None = "stop"
    error: str | None = None
    http_status: int | None = 200
    done: bool = True


@dataclass(frozen=True)
class Case:
    script: tuple[Step, ...]
    expected: Facts = field(default_factory=Facts)
    timeouts: dict[str, int] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    streamed: bool = True


def spelled(*events: bytes, end: bytes) -> bytes:
    return b"".join(events).replace(b"\n", end)


def failed(outcome: str, error: str, **facts: Any) -> Facts:
    nothing: dict[str, Any] = {"text": "", "chunks": 0, "output_tokens": None, "finish_reason": None, "done": False}
    return Facts(outcome, error=error, **{**nothing, **facts})


def partly(outcome: str, error: str | None, **facts: Any) -> Facts:
    """After the role and two tokens."""
    return Facts(outcome, "ab", 2, 2, None, error, **{"done": False, **facts})


def _json(value: Any, status: bytes = b"200 OK", **headers: bytes) -> tuple[Step, ...]:
    return (whole(json.dumps(value).encode(), status, **headers),)


def _golden(name: str) -> tuple[bytes, ...]:
    return chunked(*(event + b"\n\n" for event in golden(name).split(b"\n\n")[:-1]))


MILLISECOND = 1_000_000
NO_TOKEN = {"first_token_ns": 300 * MILLISECOND}
IDLE = {"idle_ns": 300 * MILLISECOND}
LONG_EVENT = delta(content="x" * 300_000)
FRAMED_ABC = b"".join(ABC)
COMPLETION = {
    "id": ID,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "abc"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "total_tokens": 12, "completion_tokens": 3},
}

FRAMINGS = {
    "chunked": Case(chunked(*ABC)),
    "length": Case((head(content_length=b"%d" % len(FRAMED_ABC)), *ABC)),
    "until_close": Case((head(connection=b"close"), *ABC, End.CLOSE)),
    "one_send": Case((b"".join(chunked(*ABC)),)),
    "every_byte_its_own_send": Case(tuple(bytes([byte]) for byte in b"".join(chunked(*ABC)))),
    "events_share_a_chunk": Case(chunked(ROLE + A, B + C + USAGE + DONE)),
    "an_event_over_chunks": Case(chunked(ROLE, A[:9], A[9:] + B[:40], B[40:], C, USAGE, DONE)),
    "a_cut_in_the_blank_line": Case(chunked(ROLE, A[:-1], A[-1:] + B[:-1], b"\n", C, USAGE, DONE)),
    "chunk_extension": Case((CHUNKED, b"%x;x=y\r\n%b\r\n" % (len(FRAMED_ABC), FRAMED_ABC), LAST_CHUNK)),
    "trailers": Case((CHUNKED, *(chunk(event) for event in ABC), b"0\r\nx-t: 1\r\n\r\n")),
    "continue_first": Case((b"HTTP/1.1 100 Continue\r\n\r\n", *chunked(*ABC))),
    "headers_in_pieces": Case((CHUNKED[:20], 0.02, CHUNKED[20:], *chunked(*ABC)[1:])),
    "http_1_0": Case((b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n", *ABC, End.CLOSE)),
    "large_event": Case(
        chunked(ROLE, *(LONG_EVENT[i : i + 4000] for i in range(0, len(LONG_EVENT), 4000)), C, DONE),
        Facts(text="x" * 300_000 + "c", chunks=2, output_tokens=2),
    ),
}

SPELLINGS = {
    "crlf": Case(chunked(*(spelled(event, end=b"\r\n") for event in ABC))),
    "cr": Case(chunked(*(spelled(event, end=b"\r") for event in ABC))),
    "no_space": Case(chunked(*(event.replace(b"data: ", b"data:") for event in ABC))),
    "comments": Case(chunked(b": keep-alive\n\n", b": keep-alive\n\n", *ABC)),
    "comment_between": Case(chunked(ROLE, A, b": ping\n\n", B, C, USAGE, DONE)),
    "several_data_lines": Case(
        chunked(ROLE, A, B, C.replace(b', "choices"', b',\ndata: "choices"'), USAGE, DONE),
    ),
    "other_fields": Case(chunked(ROLE, b"retry: 5\nid: 7\n" + A, b"event: message\n" + B, C, USAGE, DONE)),
    "byte_order_mark": Case(chunked(b"\xef\xbb\xbf" + A, B, C, DONE)),
    "utf8_over_chunks": Case(
        chunked(
            ROLE, *(bytes([b]) for b in data('{"choices":[{"index":0,"delta":{"content":"é😀"}}]}'.encode())), C, DONE
        ),
        Facts(text="é😀c", chunks=2, output_tokens=2),
    ),
    "invalid_utf8": Case(
        chunked(ROLE, data(b'{"choices":[{"index":0,"delta":{"content":"\xff"}}]}'), C, DONE),
        Facts(text="\ufffdc", chunks=2, output_tokens=2),
    ),
    "line_separator_in_text": Case(
        chunked(ROLE, data('{"choices":[{"index":0,"delta":{"content":"a\u2028\x85b"}}]}'.encode()), C, DONE),
        Facts(text="a\u2028\x85bc", chunks=2, output_tokens=2),
    ),
    "empty_data": Case(chunked(ROLE, A, b"data:\n\n", B, C, USAGE, DONE)),
    "last_event_unterminated": Case(chunked(ROLE, A, B, DONE[:-2]), partly("truncated", None, done=True)),
}

ENDINGS = {
    "finish_without_done": Case(chunked(ROLE, A, B, C, USAGE)),
    "done_without_finish": Case(
        chunked(ROLE, A, B, DONE), Facts(text="ab", chunks=2, output_tokens=2, finish_reason=None)
    ),
    "done_twice": Case(chunked(*ABC, DONE)),
    "events_after_done": Case(chunked(*ABC, A, BUSY)),
    "reset_after_done": Case((*chunked(*ABC)[:-1], 0.1, End.RESET)),
    "close_after_done": Case((*chunked(*ABC)[:-1], End.CLOSE)),
    "no_end_after_done": Case((*chunked(*ABC)[:-1], 1.0, End.CLOSE), timeouts=IDLE),
    "truncated": Case(chunked(ROLE, A, B), partly("truncated", None, done=True)),
    "truncated_by_close": Case((head(), ROLE, A, B, End.CLOSE), partly("truncated", None, done=True)),
    "truncated_at_once": Case(chunked(), Facts("truncated", "", 0, None, None)),
    "closed_in_the_body": Case(
        (*chunked(ROLE, A, B)[:-1], End.CLOSE), partly("disconnected", "inside the answer's body")
    ),
    "closed_in_a_chunk": Case(
        (*chunked(ROLE, A, B)[:-1], chunk(C)[:30], End.CLOSE), partly("disconnected", "inside the answer's body")
    ),
    "closed_before_the_length": Case(
        (head(content_length=b"9999"), ROLE, A, B, End.CLOSE), partly("disconnected", "inside the answer's body")
    ),
    "reset_in_the_body": Case(
        (*chunked(ROLE, A, B)[:-1], 0.1, End.RESET), partly("disconnected", "Connection reset by peer")
    ),
    "closed_after_the_finish": Case(
        (*chunked(ROLE, A, B, C)[:-1], End.CLOSE), Facts("disconnected", error="inside the answer's body", done=False)
    ),
    "closed_before_the_answer": Case(
        (End.CLOSE,), failed("disconnected", "closed the connection before it answered", http_status=None)
    ),
    "reset_before_the_answer": Case((0.1, End.RESET), failed("disconnected", "before it answered", http_status=None)),
    "closed_in_the_headers": Case(
        (CHUNKED[:30], End.CLOSE), failed("disconnected", "before it answered", http_status=None)
    ),
    "not_http": Case((b"SSH-2.0-OpenSSH\r\n\r\n", End.CLOSE), failed("bad_response", "not HTTP/1.1", http_status=None)),
    "bad_chunk_size": Case((CHUNKED, b"zz\r\n" + A, End.CLOSE), failed("bad_response", "not HTTP/1.1")),
}

ANSWERS = {
    "error_event": Case(chunked(BUSY, DONE), Facts("error_event", "", 0, None, None, "The engine is busy.")),
    "error_event_after_tokens": Case(
        chunked(ROLE, A, B, BUSY, DONE), partly("error_event", "The engine is busy.", done=True)
    ),
    "error_without_done": Case(chunked(ROLE, A, B, BUSY), partly("error_event", "The engine is busy.", done=True)),
    "error_as_text": Case(
        chunked(ROLE, A, B, data({"error": "overloaded", "error_type": "overloaded"})),
        partly("error_event", "overloaded", done=True),
    ),
    "error_as_event_type": Case(
        chunked(ROLE, A, B, b"event: error\n" + data({"message": "boom"}), DONE),
        partly("error_event", "boom", done=True),
    ),
    "error_as_field": Case(
        chunked(ROLE, A, B, b'error: {"code":500,"message":"boom"}\n\n'), partly("error_event", "boom", done=True)
    ),
    "error_object": Case(
        chunked(ROLE, A, B, data({"object": "error", "message": "boom", "code": 400}), DONE),
        partly("error_event", "boom", done=True),
    ),
    "finish_abort": Case(
        chunked(ROLE, A, B, delta(content="c", finish="abort"), USAGE, DONE),
        Facts("error_event", finish_reason="abort", error="finish reason abort"),
    ),
    "empty": Case(chunked(ROLE, delta(finish="stop"), DONE), Facts("empty", "", 0, None)),
    "only_done": Case(chunked(DONE), Facts("empty", "", 0, None, None)),
    "only_a_role": Case(chunked(ROLE), Facts("truncated", "", 0, None, None)),
    "malformed": Case(
        chunked(ROLE, A, B, data(b"oops"), DONE), partly("bad_response", "not a completion: oops", done=True)
    ),
    "not_an_object": Case(
        chunked(ROLE, A, B, data(b"[1, 2]"), DONE), partly("bad_response", "not a completion: [1, 2]", done=True)
    ),
    "unknown_object": Case(chunked(ROLE, A, data({"some": "thing"}), B, C, USAGE, DONE)),
    "reasoning": Case(chunked(ROLE, delta(reasoning="hm"), A, B, C, DONE), Facts(chunks=4, output_tokens=4)),
    "tool_call": Case(
        chunked(
            ROLE, delta(tool_calls=[{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}]), C, DONE
        ),
        Facts(text="c", chunks=2, output_tokens=2),
    ),
    "empty_text_with_usage": Case(
        chunked(
            ROLE,
            delta(content="a", usage=1),
            delta(content="", usage=2),
            delta(content="c", usage=3, finish="stop"),
            DONE,
        ),
        Facts(text="ac"),
    ),
    "json_for_a_stream": Case(_json(COMPLETION), Facts(chunks=0)),
    "json_error_for_a_stream": Case(
        _json({"error": {"message": "boom"}}), Facts("error_event", "", 0, None, None, "boom")
    ),
    "html": Case(
        (whole(b"<html>hello</html>", content_type=b"text/html"),),
        Facts("bad_response", "", 0, None, None, "not a completion: <html>hello</html>"),
    ),
    "html_that_says_it_is_a_stream": Case((*chunked(b"<html>hello</html>"),), Facts("truncated", "", 0, None, None)),
    "no_content_type": Case(
        (head(content_type=None, content_length=b"2"), b"{}"), Facts("bad_response", "", 0, None, None, "{}")
    ),
    "compressed": Case(
        (head(content_encoding=b"gzip", content_length=b"3"), b"abc"),
        failed("bad_response", "the answer is compressed (gzip)"),
    ),
    "json": Case(_json(COMPLETION), Facts(chunks=0), streamed=False),
    "json_in_pieces": Case(
        (
            head(content_type=b"application/json", transfer_encoding=b"chunked"),
            chunk(json.dumps(COMPLETION).encode()[:50]),
            0.05,
            chunk(json.dumps(COMPLETION).encode()[50:]),
            LAST_CHUNK,
        ),
        Facts(chunks=0),
        streamed=False,
    ),
}

STATUSES = {
    "status_400": Case(
        _json({"error": {"message": "too long", "code": 400}}, b"400 Bad Request"),
        failed("http_error", "too long", http_status=400),
    ),
    "status_401": Case(
        _json({"error": "Unauthorized"}, b"401 Unauthorized"), failed("http_error", "Unauthorized", http_status=401)
    ),
    "status_429": Case(
        _json({"error": {"message": "slow"}}, b"429 Too Many Requests", retry_after=b"7"),
        failed("http_error", "slow", http_status=429),
    ),
    "status_500_without_body": Case(
        (whole(b"", b"500 Internal Server Error"),),
        failed("http_error", "status 500 with an empty body", http_status=500),
    ),
    "status_502_html": Case(
        (whole(b"<h1>Bad Gateway</h1>", b"502 Bad Gateway", b"text/html"),),
        failed("http_error", "<h1>Bad Gateway</h1>", http_status=502),
    ),
    "status_503_before_the_body_is_read": Case(
        _json({"error": {"message": "busy"}}, b"503 Service Unavailable"),
        failed("http_error", "busy", http_status=503),
        streamed=False,
    ),
    "redirect": Case(
        (whole(b"", b"307 Temporary Redirect", location=b"/elsewhere"),), failed("http_error", "307", http_status=307)
    ),
    "status_201": Case((whole(b"hm", b"201 Created"),), failed("http_error", "hm", http_status=201)),
}

TIMEOUTS = {
    "no_answer": Case((1.0, End.CLOSE), failed("timeout_first_token", "0.3 s", http_status=None), NO_TOKEN),
    "silent_for_longer_than_idle_before_its_first_token": Case((0.7, *chunked(*ABC)), timeouts=IDLE),
    "headers_and_then_silent_for_longer_than_idle": Case(
        (CHUNKED, chunk(ROLE), 0.7, *(chunk(event) for event in ABC[1:]), LAST_CHUNK), timeouts=IDLE
    ),
    "late_and_then_idle": Case(
        (0.7, CHUNKED, *map(chunk, (ROLE, A, B)), 1.0, End.CLOSE), partly("timeout_idle", "no byte for 0.3 s"), IDLE
    ),
    "no_token": Case((CHUNKED, chunk(ROLE), 1.0, End.CLOSE), failed("timeout_first_token", "0.3 s"), NO_TOKEN),
    "only_comments": Case(
        (CHUNKED, *(step for _ in range(10) for step in (chunk(b": keep-alive\n\n"), 0.1)), End.CLOSE),
        failed("timeout_first_token", "--timeout-first-token"),
        NO_TOKEN,
    ),
    "idle": Case(
        (CHUNKED, *map(chunk, (ROLE, A, B)), 1.0, End.CLOSE), partly("timeout_idle", "no byte for 0.3 s"), IDLE
    ),
    "busy_but_not_idle": Case(
        (CHUNKED, *(step for event in ABC for step in (chunk(event), 0.15)), LAST_CHUNK), timeouts=NO_TOKEN | IDLE
    ),
    "total": Case(
        (
            CHUNKED,
            *map(chunk, (ROLE, A, B)),
            *(step for _ in range(12) for step in (0.1, chunk(b": x\n\n"))),
            End.CLOSE,
        ),
        partly("timeout_total", "no end within 0.5 s"),
        {"total_ns": 500 * MILLISECOND},
    ),
    "abandoned": Case(
        (CHUNKED, *map(chunk, (ROLE, A, B)), 1.0, End.CLOSE),
        partly("abandoned", "its user was stopped"),
        more={"stopped_after_s": 0.3},
    ),
}

GOLDENS = {
    f"vllm_{name}": Case(
        _golden(f"{name}.sse"), Facts(text=text, chunks=chunks, output_tokens=tokens, finish_reason="length")
    )
    for name, text, chunks, tokens in [
        ("completions_stream", " complex squareclient-------------------------------- may", 5, 5),
        ("stream_no_usage", " dedcompathamplIndex", 5, 5),
        ("stream_token_ids", "John sav];Scriptenc", 5, 5),
        ("stream_logprobs", "reoll version", 2, 3),
        ("stream_n2", " capabilities Procurement warmup tick", 7, 8),
    ]
}

CASES: dict[str, Case] = {**FRAMINGS, **SPELLINGS, **ENDINGS, **ANSWERS, **STATUSES, **TIMEOUTS, **GOLDENS}
