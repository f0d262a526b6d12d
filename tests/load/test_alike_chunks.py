"""Chunks that are recognised by their bytes leave behind exactly what parsing each of them does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_locust.completion.reader import CompletionReader
from vllm_locust.completion.state import Completion
from vllm_locust.load.answer import HttpAnswer, whole_chunks
from vllm_locust.load.receiver import Read
from vllm_locust.load.transport import Exchange
from vllm_locust.sse import Event, EventDecoder

GOLDENS = sorted((Path(__file__).parents[1] / "goldens" / "vllm_0_32").glob("*.sse"))
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(text: str, count: int | None, prompt_tokens: int = 9, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": "chatcmpl-1",
        "created": 1796059582,
        "choices": [{"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}],
    }
    if count is not None:
        total = prompt_tokens + count
        found["usage"] = {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": count}
    return found | more


def framed(data: bytes) -> bytes:
    event = b"data: " + data + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


def reads_of(payloads: list[bytes]) -> list[Read]:
    return [(framed(data), 1_000 * number, 0, True, number % 7) for number, data in enumerate(payloads, 1)]


def read_as_alike(payloads: list[bytes], batch: int) -> tuple[CompletionReader, int]:
    """What the kernel transport's loop does; the reader, and how many chunks were recognised."""
    reader = CompletionReader(streamed=True)
    answer = HttpAnswer(Exchange(reader))
    answer.feed((HEAD, 1, 0, True, 0))
    recognised = 0
    original = CompletionReader.on_alike

    def counting(self: CompletionReader, texts: Any, stamps_ns: Any, widths_ns: Any) -> None:
        nonlocal recognised
        recognised += len(stamps_ns)
        original(self, texts, stamps_ns, widths_ns)

    reads = reads_of(payloads)
    with patch.object(CompletionReader, "on_alike", counting):
        for start in range(0, len(reads), batch):
            group = reads[start : start + batch]
            at = 0
            while (at := answer.take_plain(group, at)) < len(group):
                answer.feed(group[at])
                at += 1
    return reader, recognised


def read_one_by_one(payloads: list[bytes]) -> CompletionReader:
    reader = CompletionReader(streamed=True)
    for data, stamp_ns, *_ in reads_of(payloads):
        for event in EventDecoder().feed(data.partition(b"\r\n")[2][:-2]):
            reader.on_event(event, stamp_ns)
    return reader


def known(reader: CompletionReader) -> dict[str, Any]:
    names = [name for name in (*Completion.__slots__, *CompletionReader.__slots__) if not name.startswith("_")]
    names += ["complete", "output_tokens", "token_source", "known_chunk_tokens", "first_answer_ns", "texts", "choices"]
    return {name: getattr(reader, name) for name in names} | {"outcome": reader.outcome(), "text": reader.text}


def written(chunks: list[dict[str, Any]], *, compact: bool = True) -> list[bytes]:
    separators = (",", ":") if compact else (", ", ": ")
    return [json.dumps(one, ensure_ascii=False, separators=separators).encode() for one in chunks]


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
@pytest.mark.parametrize("batch", [1, 32])
def test_real_streams(path: Path, batch: int) -> None:
    body = path.read_bytes().partition(b"\r\n\r\n")[2] or path.read_bytes()
    payloads = [event.data for event in EventDecoder().feed(body.replace(b"\r\n", b"\n"))]
    reader, _ = read_as_alike(payloads, batch)
    assert known(reader) == known(read_one_by_one(payloads))


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("tokens", [90, 5_000])
def test_nearly_all_chunks_of_a_plain_stream_are_recognised(compact: bool, counted: bool, tokens: int) -> None:
    chunks = [chunk(f" w{n}" if n % 9 else ' "a\\b"\n', n if counted else None) for n in range(1, tokens + 1)]
    payloads = written(chunks, compact=compact)
    reader, recognised = read_as_alike(payloads, 32)
    assert recognised >= tokens - 4
    assert known(reader) == known(read_one_by_one(payloads))
    assert reader.text == "".join(one["choices"][0]["delta"]["content"] for one in chunks)


ODD_TEXTS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(['","x":"y', '"', "\\", "\\u0041", "\n", "\x7f", "é", "\u2028", '"content":"', ""]),
)
ODD_PAYLOADS = st.sampled_from(
    [
        b"[DONE]",
        b"not json",
        b'{"choices":[]}',
        b'{"id":"chatcmpl-1","choices":[{"index":1,"delta":{"content":"other choice"}}]}',
        b'{"id":"chatcmpl-1","created":1796059582,"choices":[{"index":0,"delta":{"content":"a"b"},'
        b'"logprobs":null,"finish_reason":null}],"usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3}}',
        b'{"error":{"message":"broken"}}',
    ]
)
STEPS = st.one_of(
    st.tuples(st.just("text"), ODD_TEXTS),
    st.tuples(st.just("plain"), st.integers(1, 5)),
    st.tuples(st.just("jump"), st.integers(-2, 4)),
    st.tuples(st.just("prompt"), st.integers(8, 10)),
    st.tuples(st.just("raw"), ODD_PAYLOADS),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=12), st.sampled_from([1, 3, 32]), st.booleans())
def test_streams_of_every_kind(steps: list[tuple[str, Any]], batch: int, counted: bool) -> None:
    count, prompt_tokens = 0, 9
    payloads: list[bytes] = []
    for kind, value in [("plain", 3), *steps, ("plain", 4)]:
        if kind == "jump":
            count += value
        elif kind == "prompt":
            prompt_tokens = value
        elif kind == "raw":
            payloads.append(value)
        else:
            for _ in range(value if kind == "plain" else 1):
                count += 1
                text = f" word{count}" if kind == "plain" else value
                payloads += written([chunk(text, max(0, count) if counted else None, prompt_tokens)])
    payloads = [data for data in payloads if b"\n" not in data and b"\r" not in data]
    reader, _ = read_as_alike(payloads, batch)
    assert known(reader) == known(read_one_by_one(payloads))


def test_a_character_split_over_two_chunks_is_broken_in_both() -> None:
    whole = written([chunk(f" w{n}", n) for n in range(1, 8)])
    halves = [whole[5].replace(b" w6", b"\xc3"), whole[6].replace(b" w7", b"\xa9")]
    payloads = [*whole[:5], *halves]
    reader, _ = read_as_alike(payloads, 32)
    assert known(reader) == known(read_one_by_one(payloads))


def test_reads_without_a_stamp_are_not_taken_as_alike() -> None:
    reader = CompletionReader(streamed=True)
    answer = HttpAnswer(Exchange(reader))
    answer.feed((HEAD, 1, 0, True, 0))
    reads = reads_of(written([chunk(f" w{n}", n) for n in range(1, 9)]))
    answer.feed(reads[0])
    assert answer.take_plain(reads[:4], 1) == 4
    data, stamp_ns, floor_ns, _, lag_ns = reads[5]
    assert answer._take_alike([reads[4], (data, stamp_ns, floor_ns, False, lag_ns), reads[6]], 0, False) == 1
    assert answer.lag_max_ns == reads[4][4]


def test_an_event_of_another_kind_is_no_chunk() -> None:
    payloads = written([chunk(f" w{n}", n) for n in range(1, 9)])
    reader = CompletionReader(streamed=True)
    for data in payloads[:4]:
        reader.on_data(data, 1)
    assert reader.expected() is not None
    reader.on_event(Event(b"[DONE]", b"message"), 2)
    assert reader.expected() is None


def grouped(payloads: list[bytes], sizes: list[int]) -> list[Read]:
    """Reads of several chunks each, stamped at their ends, empty before at a floor a little earlier."""
    frames = [framed(data) for data in payloads]
    reads: list[Read] = []
    at = 0
    for number, size in enumerate(sizes):
        data = b"".join(frames[at : at + size])
        if data:
            reads.append((data, 1_000 * (number + 1), 1_000 * number + 300, True, number % 7))
        at += size
    return reads


def answer_to(reads: list[Read], *, plain: bool) -> CompletionReader:
    reader = CompletionReader(streamed=True)
    answer = HttpAnswer(Exchange(reader))
    answer.feed((HEAD, 1, 0, True, 0))
    at = 0
    while at < len(reads):
        taken = answer.take_plain(reads, at) if plain else at
        if taken == at:
            answer.feed(reads[at])
            taken = at + 1
        at = taken
    return reader


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.lists(ODD_TEXTS, max_size=3), st.booleans())
def test_several_chunks_in_one_read(sizes: list[int], odd: list[str], counted: bool) -> None:
    texts = [f" w{n}" for n in range(6)] + odd + [f" v{n}" for n in range(sum(sizes))]
    payloads = written([chunk(text, n if counted else None) for n, text in enumerate(texts, 1)])
    reads = grouped(payloads, [1, 1, *sizes])
    one_way, other_way = answer_to(reads, plain=True), answer_to(reads, plain=False)
    assert known(one_way) == known(other_way)
    assert len(one_way.chunk_width_ns) == len(one_way.chunk_ns)
    if max(sizes) > 1 and not odd:
        assert 700 in one_way.chunk_width_ns


def test_a_read_that_ends_inside_a_chunk_is_the_parsers() -> None:
    payloads = written([chunk(f" w{n}", n) for n in range(1, 9)])
    whole = b"".join(map(framed, payloads))
    assert whole_chunks(whole) == [framed(data) for data in payloads]
    assert whole_chunks(whole[:-1]) is None
    assert whole_chunks(b"+5\r\n" + whole) is None
    assert whole_chunks(b"") is None
