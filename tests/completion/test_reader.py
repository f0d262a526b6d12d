"""What an answer comes to: real answers against a naive reading, and every outcome that the events can decide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.goldens import STREAMS, golden
from vllm_locust.completion.reader import CompletionReader
from vllm_locust.outcome import Outcome
from vllm_locust.sse import Event, EventDecoder

DONE = b"[DONE]"


def read(*events: bytes | Event | dict[str, Any], end: bool = True) -> CompletionReader:
    """A reader that got these events, one per 10 ns starting at 10."""
    reader = CompletionReader(streamed=True)
    stamp_ns = 0
    for stamp_ns, event in enumerate(events, 1):
        if isinstance(event, dict):
            event = json.dumps(event).encode()
        reader.on_event(event if isinstance(event, Event) else Event(event, b"message"), stamp_ns * 10)
    if end:
        reader.on_end(stamp_ns * 10 + 5)
    return reader


def delta(index: int = 0, finish: str | None = None, usage: int | None = None, **fields: Any) -> dict[str, Any]:
    chunk: dict[str, Any] = {"id": "r", "choices": [{"index": index, "delta": fields, "finish_reason": finish}]}
    if usage is not None:
        chunk["usage"] = {"prompt_tokens": 9, "completion_tokens": usage}
    return chunk


def total(tokens: int, **more: Any) -> dict[str, Any]:
    return {"id": "r", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens, **more}}


ROLE = delta(role="assistant", content="")


# Real answers

FACTS = {
    "completions_stream": (" complex squareclient-------------------------------- may", 4, 5, 5),
    "stream": (None, 9, 20, 18),
    "stream_continuous_usage": (None, 9, 20, 20),
    "stream_interval_4": (None, 9, 14, 5),
    "stream_logprobs": ("reoll version", 9, 3, 2),
    "stream_n2": (" capabilities Procurement warmup tick", 9, 8, 7),
    "stream_no_usage": (" dedcompathamplIndex", None, 5, 5),
    "stream_token_ids": ("John sav];Scriptenc", 9, 5, 5),
}


@pytest.mark.parametrize("name", FACTS)
def test_real_streams(name: str) -> None:
    reader = read(*EventDecoder().feed(golden(f"{name}.sse")))
    text, prompt_tokens, output_tokens, chunks = FACTS[name]
    shown = [
        choice.get("text") or choice.get("delta", {}).get("content", "")
        for line in golden(f"{name}.sse").splitlines()
        if line.startswith(b"data: {")
        for choice in json.loads(line[6:])["choices"]
        if choice["index"] == 0
    ]
    assert reader.text == "".join(shown)
    assert text is None or reader.text == text
    assert reader.prompt_tokens == prompt_tokens
    assert reader.output_tokens == output_tokens
    assert len(reader.chunk_ns) == len(reader.chunk_tokens) == len(reader.chunk_width_ns) == chunks
    assert reader.token_source == ("chunks" if name == "stream_no_usage" else "usage")
    assert reader.finish_reason == "length"
    assert reader.ended
    assert reader.outcome() is Outcome.OK
    assert reader.error is None
    assert reader.malformed == reader.ignored == 0
    assert reader.response_id is not None
    assert reader.response_id.startswith(("cmpl-", "chatcmpl-"))


def test_tokens_of_each_chunk_come_from_usage_or_token_ids_and_add_up() -> None:
    continuous = read(*EventDecoder().feed(golden("stream_continuous_usage.sse")))
    assert continuous.known_chunk_tokens is not None
    assert continuous.known_chunk_tokens == [1] * 20
    by_ids = read(*EventDecoder().feed(golden("stream_interval_4.sse")))
    assert by_ids.known_chunk_tokens == [1, 4, 4, 4, 1]
    assert read(*EventDecoder().feed(golden("stream.sse"))).known_chunk_tokens is None


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.stem)
def test_a_stream_cut_at_any_byte_is_truncated_until_its_finish_and_keeps_the_same_end(path: Path) -> None:
    stream = path.read_bytes()
    events = EventDecoder().feed(stream)
    whole = read(*events)
    finish = next((i for i, event in enumerate(events) if b'"finish_reason":"' in event.data), len(events) - 1)
    if "n2" in path.stem:
        finish += 1
    for cut in range(len(stream)):
        decoder, reader = EventDecoder(), CompletionReader(streamed=True)
        got = decoder.feed(stream[:cut])
        for event in got:
            reader.on_event(event, 1)
        reader.on_end(2)
        if reader.error is not None:
            assert reader.outcome() is Outcome.ERROR_EVENT
        else:
            assert reader.outcome() is (Outcome.OK if len(got) > finish else Outcome.TRUNCATED)
        assert reader.done_ns == 2
        first = len(reader.chunk_ns)
        for event in decoder.feed(stream[cut:]):
            reader.on_event(event, 3)
        assert reader.chunk_ns == [1] * first + [3] * (len(whole.chunk_ns) - first)
        assert (reader.text, reader.chunk_tokens, reader.output_tokens, reader.outcome()) == (
            whole.text,
            whole.chunk_tokens,
            whole.output_tokens,
            whole.outcome(),
        )


def test_two_choices_are_counted_each_and_summed() -> None:
    reader = read(
        delta(0, usage=0, role="assistant", content=""),
        delta(1, usage=0, role="assistant", content=""),
        delta(0, usage=1, content="a"),
        delta(1, usage=2, content="b"),
        delta(0, usage=2, content="c", finish="stop"),
        end=False,
    )
    assert reader.completion_tokens == 4
    assert reader.chunk_tokens == [1, 2, 1]
    open_choices = not reader.complete
    assert open_choices
    reader.on_event(Event(json.dumps(delta(1, usage=5, content="d", finish="length")).encode(), b"message"), 60)
    assert reader.complete
    assert reader.completion_tokens == 7
    assert reader.texts == ["ac", "bd"]
    assert reader.text == "ac"
    assert reader.choices == 2
    assert reader.finish_reason == "stop"
    assert reader.known_chunk_tokens is None


# Which chunks bear tokens


@pytest.mark.parametrize(
    ("chunk", "tokens"),
    [
        (delta(content="x"), [None]),
        (delta(reasoning="x"), [None]),
        (delta(reasoning_content="x"), [None]),
        (delta(content="x", finish="stop"), [None]),
        ({"choices": [{"index": 0, "text": "x"}]}, [None]),
        ({"choices": [{"text": "x"}]}, [None]),
        (delta(tool_calls=[{"index": 0, "id": "c", "function": {"name": "f"}}]), [None]),
        (delta(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]), [None]),
        ({"choices": [{"index": 0, "delta": {"content": ""}, "token_ids": [7, 8]}]}, [2]),
        ({"choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": [7]}]}, [1]),
        (delta(content="", usage=3), [3]),
        (delta(content="x", usage=3), [3]),
        (
            {"choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": [7, 8]}, {"index": 1, "text": "y"}]},
            [None],
        ),
        ({"choices": [{"index": 0, "text": "x", "token_ids": [7]}, {"index": 1, "token_ids": [7, 8]}]}, [3]),
        (ROLE, []),
        (delta(content=None), []),
        (delta(content="", finish="stop"), []),
        (delta(content="", usage=0), []),
        (delta(tool_calls=[{"index": 0, "id": "c", "function": {"name": "", "arguments": ""}}]), []),
        (delta(tool_calls=[]), []),
        ({"choices": [{"index": 0, "delta": None, "finish_reason": "stop"}]}, []),
        ({"choices": [{"index": 0, "delta": {}, "token_ids": []}]}, []),
        (total(5), []),
        ({"choices": []}, []),
        ({"id": "r"}, []),
    ],
)
def test_token_bearing(chunk: dict[str, Any], tokens: list[int | None]) -> None:
    reader = read(ROLE, chunk)
    assert reader.chunk_tokens == tokens
    assert reader.chunk_ns == [20] * len(tokens)
    assert reader.malformed == 0


def test_a_chunk_with_text_and_no_new_token_has_none() -> None:
    assert read(delta(content="a", usage=1), delta(content="b", usage=1)).chunk_tokens == [1, 0]
    assert read(delta(content="a", usage=2), delta(content="", usage=2)).chunk_tokens == [2]


def test_usage_told_once_beside_the_last_choice_is_a_total_and_no_rise() -> None:
    reader = read(ROLE, delta(content="a"), delta(content="b"), delta(content="", finish="stop", usage=7))
    assert reader.chunk_ns == [20, 30]
    assert reader.chunk_tokens == [None, None]
    assert reader.output_tokens == 7


def test_a_count_that_falls_is_no_token() -> None:
    reader = read(delta(content="", usage=3), delta(content="", usage=1), delta(content="", usage=3), total(3), DONE)
    assert reader.chunk_tokens == [3]


def test_the_answer_starts_with_the_first_chunk_that_is_not_reasoning() -> None:
    plain = read(ROLE, delta(content="", usage=1), delta(content="a", usage=2))
    assert plain.first_answer_ns == 20
    thinking = read(
        delta(content="", usage=1),
        delta(reasoning="hm"),
        delta(reasoning_content="m"),
        delta(content="a"),
        delta(content="b"),
    )
    assert thinking.chunk_ns == [10, 20, 30, 40, 50]
    assert thinking.first_answer_ns == 40
    assert thinking.reasoning == "hmm"
    assert thinking.text == "ab"
    assert read(delta(reasoning="hm")).first_answer_ns is None
    assert read(delta(reasoning="hm"), delta(tool_calls=[{"function": {"name": "f"}}])).first_answer_ns == 20
    assert read(ROLE).first_answer_ns is None


def test_tool_calls_are_put_together() -> None:
    reader = read(
        delta(tool_calls=[{"index": 1, "id": "b", "function": {"name": "g", "arguments": ""}}]),
        delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": "f"}}]),
        delta(
            tool_calls=[{"index": 0, "function": {"arguments": '{"x"'}}, {"index": 1, "function": {"arguments": "{}"}}]
        ),
        delta(tool_calls=[{"index": 0, "function": {"arguments": ":1}"}}], finish="tool_calls"),
        DONE,
    )
    assert [(call.id, call.name, call.arguments) for call in reader.tool_calls] == [
        ("a", "f", '{"x":1}'),
        ("b", "g", "{}"),
    ]
    assert reader.outcome() is Outcome.OK
    assert reader.finish_reason == "tool_calls"


def test_usage_details() -> None:
    details = {
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    reader = read(delta(content="a"), total(3, **details), DONE)
    assert (reader.prompt_tokens, reader.cached_tokens, reader.completion_tokens, reader.reasoning_tokens) == (
        9,
        4,
        3,
        2,
    )
    nothing = read(delta(content="a"), total(3, prompt_tokens_details=None), DONE)
    assert (nothing.cached_tokens, nothing.reasoning_tokens) == (None, None)


def test_width_is_kept_beside_the_arrival() -> None:
    reader = CompletionReader(streamed=True)
    for stamp_ns, width_ns in [(10, 3), (10, 0)]:
        reader.on_event(Event(json.dumps(delta(content="a")).encode(), b"message"), stamp_ns, width_ns)
    reader.on_event(Event(json.dumps(total(2)).encode(), b"message"), 20, 9)
    assert reader.chunk_ns == [10, 10]
    assert reader.chunk_width_ns == [3, 0]


# Where output tokens come from


def test_token_source() -> None:
    silent = read(delta(content="a"), delta(content="b", finish="stop"))
    assert (silent.output_tokens, silent.token_source) == (2, "chunks")
    silent.tokenizer_tokens = 5
    assert (silent.output_tokens, silent.token_source) == (5, "tokenizer")
    told = read(delta(content="a"), total(3))
    told.tokenizer_tokens = 5
    assert (told.output_tokens, told.token_source) == (3, "usage")
    ids = read({"choices": [{"text": "ab", "token_ids": [1, 2, 3]}]})
    assert (ids.output_tokens, ids.token_source) == (3, "chunks")
    nothing = read(ROLE)
    assert (nothing.output_tokens, nothing.token_source) == (None, None)


# Outcomes

ERROR = {"error": {"message": "busy", "type": "Service Unavailable", "code": 503}}


@pytest.mark.parametrize(
    ("events", "outcome", "error"),
    [
        ([delta(content="a"), DONE], Outcome.OK, None),
        ([delta(content="a", finish="stop")], Outcome.OK, None),
        ([delta(content="a", finish="stop"), DONE, DONE, delta(content="b")], Outcome.OK, None),
        ([delta(content="a"), b" [DONE] "], Outcome.OK, None),
        ([ROLE, total(1), DONE], Outcome.OK, None),
        ([delta(content="a"), b"", DONE], Outcome.OK, None),
        ([delta(content="a"), Event(b"pong", b"ping"), DONE], Outcome.OK, None),
        ([delta(content="a"), {"some": "thing"}, DONE], Outcome.OK, None),
        ([b'{"choices":[{"delta":{"content":"\\ud83d"},"logprobs":NaN,"finish_reason":"stop"}]}'], Outcome.OK, None),
        ([b'{"choices":[{"delta":{"content":"\xff"},"finish_reason":"stop"}]}'], Outcome.OK, None),
        ([], Outcome.TRUNCATED, None),
        ([ROLE], Outcome.TRUNCATED, None),
        ([delta(content="a"), total(1)], Outcome.TRUNCATED, None),
        ([delta(0, content="a", finish="stop"), delta(1, content="b")], Outcome.TRUNCATED, None),
        ([DONE], Outcome.EMPTY, None),
        ([ROLE, delta(content="", finish="stop"), DONE], Outcome.EMPTY, None),
        ([ROLE, delta(content="", finish="stop"), total(0), DONE], Outcome.EMPTY, None),
        ([ERROR, DONE], Outcome.ERROR_EVENT, "busy"),
        ([delta(content="a"), ERROR, DONE], Outcome.ERROR_EVENT, "busy"),
        ([delta(content="a", finish="stop"), ERROR], Outcome.ERROR_EVENT, "busy"),
        ([{"error": "overloaded", "error_type": "overloaded"}], Outcome.ERROR_EVENT, "overloaded"),
        ([{"error": {"code": 5}}], Outcome.ERROR_EVENT, '{"code": 5}'),
        ([{"object": "error", "message": "old", "code": 400}], Outcome.ERROR_EVENT, "old"),
        ([{"choices": [], "usage": None, "error": {"message": "m"}}], Outcome.ERROR_EVENT, "m"),
        ([{**delta(content="a"), "error": {"message": "m"}}], Outcome.ERROR_EVENT, "m"),
        ([{**delta(content="a"), "error": None}, DONE], Outcome.OK, None),
        ([Event(b'{"message":"m"}', b"error")], Outcome.ERROR_EVENT, "m"),
        ([Event(b"plain words", b"error"), DONE], Outcome.ERROR_EVENT, "plain words"),
        ([Event(b"", b"error")], Outcome.ERROR_EVENT, "the server reported an error without words"),
        ([{"error": "first"}, {"error": "second"}], Outcome.ERROR_EVENT, "first"),
        ([{"error": "x" * 2000}], Outcome.ERROR_EVENT, "x" * 500),
        ([delta(content="a", finish="abort"), DONE], Outcome.ERROR_EVENT, "finish reason abort"),
        ([delta(content="a", finish="error"), DONE], Outcome.ERROR_EVENT, "finish reason error"),
        ([delta(0, content="a", finish="stop"), delta(1, finish="abort")], Outcome.ERROR_EVENT, "finish reason abort"),
        ([b"{", ERROR], Outcome.ERROR_EVENT, "busy"),
        ([delta(content="a"), b"oops", DONE], Outcome.BAD_RESPONSE, "not a completion: oops"),
        ([b"[1,2]", DONE], Outcome.BAD_RESPONSE, "not a completion: [1, 2]"),
        ([b"7"], Outcome.BAD_RESPONSE, "not a completion: 7"),
        ([b'"text"'], Outcome.BAD_RESPONSE, "not a completion: text"),
        ([b"null"], Outcome.BAD_RESPONSE, "not a completion: null"),
        ([b"[" * 5000], Outcome.BAD_RESPONSE, "not a completion: " + "[" * 482),
    ],
)
def test_outcomes(events: list[Any], outcome: Outcome, error: str | None) -> None:
    reader = read(*events)
    assert reader.outcome() is outcome
    assert reader.error == error


def test_what_is_ignored_is_counted() -> None:
    reader = read(
        {"some": "thing"}, b"", Event(b"pong", b"ping"), {"choices": []}, delta(content="a"), DONE, DONE, b"{"
    )
    assert reader.ignored == 6
    assert reader.malformed == 0
    assert reader.events == 3
    assert reader.done_ns == 60


def test_done_is_the_event_or_else_the_end_of_the_body() -> None:
    assert read(delta(content="a"), DONE).done_ns == 20
    assert read(delta(content="a", finish="stop")).done_ns == 15
    assert read(delta(content="a", finish="stop"), end=False).done_ns is None


def test_short_needs_an_exact_count() -> None:
    told = read(delta(content="ab"), total(4), DONE)
    assert told.outcome(4) is Outcome.OK
    assert told.outcome(5) is Outcome.SHORT
    assert read(delta(content="a"), DONE).outcome(5) is Outcome.OK
    assert read({"choices": [{"text": "a", "token_ids": [1]}]}, DONE).outcome(2) is Outcome.SHORT
    two = read(delta(0, content="a"), delta(1, content="b"), total(8), DONE)
    assert two.outcome(4) is Outcome.OK
    assert two.outcome(5) is Outcome.SHORT
    assert read(ERROR).outcome(5) is Outcome.ERROR_EVENT


# Bodies that are no stream


def body(data: bytes) -> CompletionReader:
    reader = CompletionReader(streamed=False)
    reader.on_body(data, 10)
    reader.on_end(11)
    return reader


def test_a_json_completion_has_text_and_tokens_and_no_first_token() -> None:
    reader = body(golden("nonstream.json"))
    assert reader.outcome() is Outcome.OK
    assert reader.text == "EXTangoctoranged understand"
    assert (reader.prompt_tokens, reader.output_tokens, reader.token_source) == (9, 5, "usage")
    assert reader.finish_reason == "length"
    assert reader.response_id == "chatcmpl-be44132a1098abab"
    assert reader.chunk_ns == []
    assert reader.first_answer_ns is None
    assert reader.done_ns == 10


@pytest.mark.parametrize(
    ("data", "outcome", "error"),
    [
        (b'{"choices":[{"text":"a","finish_reason":"stop"}]}', Outcome.OK, None),
        (b'{"choices":[{"message":{"content":"a"}}]}', Outcome.OK, None),
        (
            b'{"choices":[{"message":{"content":"a"},"finish_reason":"abort"}]}',
            Outcome.ERROR_EVENT,
            "finish reason abort",
        ),
        (b'{"choices":[{"message":{"content":null}}],"usage":{"completion_tokens":1}}', Outcome.OK, None),
        (b'{"choices":[{"message":{"content":""}}],"usage":{"completion_tokens":0}}', Outcome.EMPTY, None),
        (b'{"choices":[{"message":{"content":null}}]}', Outcome.EMPTY, None),
        (b'{"error":{"message":"m"}}', Outcome.ERROR_EVENT, "m"),
        (b'{"choices":[]}', Outcome.BAD_RESPONSE, 'not a completion: {"choices": []}'),
        (b'{"detail":"Not Found"}', Outcome.BAD_RESPONSE, "not a completion: Not Found"),
        (b"<html>", Outcome.BAD_RESPONSE, "not a completion: <html>"),
        (b"", Outcome.BAD_RESPONSE, "not a completion: "),
        (b"\xff\xfe", Outcome.BAD_RESPONSE, "not a completion: ��"),
    ],
)
def test_bodies(data: bytes, outcome: Outcome, error: str | None) -> None:
    reader = body(data)
    assert reader.outcome() is outcome
    assert reader.error == error


def test_a_json_completion_with_several_choices() -> None:
    reader = body(b'{"choices":[{"index":0,"text":"a"},{"index":1,"text":"b"}],"usage":{"completion_tokens":2}}')
    assert reader.texts == ["a", "b"]
    assert reader.outcome(1) is Outcome.OK
    assert reader.outcome(2) is Outcome.SHORT


# Hostile answers

_ODD: list[Any] = [None, True, -1, 2**60, 2**200, 1.5, "x", [], [1], {}, {"a": 1}, [[]], [None], ["x"], [{}]]
_FIELDS = [
    ("choices",),
    ("choices", 0),
    ("choices", 0, "index"),
    ("choices", 0, "delta"),
    ("choices", 0, "delta", "content"),
    ("choices", 0, "delta", "reasoning"),
    ("choices", 0, "delta", "tool_calls"),
    ("choices", 0, "delta", "tool_calls", 0),
    ("choices", 0, "delta", "tool_calls", 0, "index"),
    ("choices", 0, "delta", "tool_calls", 0, "function"),
    ("choices", 0, "delta", "tool_calls", 0, "function", "name"),
    ("choices", 0, "token_ids"),
    ("choices", 0, "finish_reason"),
    ("id",),
    ("error",),
    ("usage",),
    ("usage", "prompt_tokens"),
    ("usage", "completion_tokens"),
    ("usage", "prompt_tokens_details"),
    ("usage", "prompt_tokens_details", "cached_tokens"),
]


@pytest.mark.parametrize("path", _FIELDS, ids=lambda path: ".".join(map(str, path)))
@pytest.mark.parametrize("value", _ODD, ids=repr)
def test_odd_values_never_raise_and_never_become_facts(path: tuple[str | int, ...], value: Any) -> None:
    chunk = delta(
        content="a", usage=1, tool_calls=[{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}]
    )
    chunk["choices"][0]["token_ids"] = [1]
    chunk["usage"]["prompt_tokens_details"] = {"cached_tokens": 3}
    place: Any = chunk
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    reader = read(chunk, delta(content="b", usage=2), DONE)
    message = body(json.dumps(chunk).replace('"delta"', '"message"').encode())
    for result in (reader, message):
        for count in (result.prompt_tokens, result.output_tokens, result.cached_tokens):
            assert count is None or (type(count) is int and 0 <= count < 2**41)
        assert isinstance(result.text + result.reasoning, str)
        assert all({call.name, call.arguments} <= {"f", "x", "{}", ""} for call in result.tool_calls)
        assert result.outcome() in (Outcome.OK, Outcome.BAD_RESPONSE, Outcome.ERROR_EVENT)
        assert (result.outcome() is Outcome.BAD_RESPONSE) == (result.malformed > 0 and not result._error_event)
    assert 1 <= len(reader.chunk_ns) <= 2


def test_halves_of_a_surrogate_pair_meet_again_and_a_lone_one_is_replaced() -> None:
    half = [rb'{"choices":[{"delta":{"content":"\ud83d"}}]}', rb'{"choices":[{"delta":{"content":"\ude00"}}]}']
    assert read(*half).text == "😀"
    assert read(half[0]).text == "\ufffd"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "delta", "content", "usage", "error", "index", "message", "completion_tokens"]),
            inner,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200)
@given(st.lists(_JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=20), max_size=5))
def test_any_events_have_one_outcome(events: list[bytes]) -> None:
    reader = read(*events)
    assert reader.outcome() in set(Outcome)
    assert len(reader.chunk_ns) == len(reader.chunk_tokens) == len(reader.chunk_width_ns)
    assert reader.error is None or len(reader.error) <= 500
    body(events[0] if events else b"").outcome()


def test_work_grows_with_the_tokens() -> None:
    """No fact is derived twice from the same event: 100,000 tokens leave 100,000 entries, and nothing is rescanned."""
    reader = CompletionReader(streamed=True)
    for tokens in range(1, 100_001):
        reader.on_event(
            Event(
                b'{"choices":[{"index":0,"delta":{"content":"x"}}],"usage":{"completion_tokens":%d}}' % tokens,
                b"message",
            ),
            tokens,
        )
    assert reader.output_tokens == 100_000
    assert len(reader.text) == 100_000
    assert reader.known_chunk_tokens == [1] * 100_000


def test_a_usage_of_no_tokens_beside_chunks_that_bear_some_does_not_count() -> None:
    reader = CompletionReader(streamed=True)
    for data in (
        b'{"id":"x","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}',
        b'{"id":"x","choices":[],"usage":{"prompt_tokens":0,"completion_tokens":0}}',
        b"[DONE]",
    ):
        reader.on_event(Event(data, b"message"), 5)
    assert (reader.output_tokens, reader.token_source) == (1, "chunks")
