"""The short cut for plain chunks takes exactly what the long way takes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_locust.completion.reader import CompletionReader
from vllm_locust.completion.state import Completion
from vllm_locust.sse import Event, EventDecoder

GOLDENS = sorted((Path(__file__).parents[1] / "goldens" / "vllm_0_32").glob("*.sse"))

PLAIN: dict[str, Any] = {
    "id": "chatcmpl-1",
    "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None, "token_ids": None}],
    "usage": {"prompt_tokens": 9, "total_tokens": 10, "completion_tokens": 1, "completion_tokens_details": None},
}
ODD = st.sampled_from(
    [None, True, False, 0, 1, 2, -1, 10_000_000, 1 << 41, 1.5, "", "x", [], [1], {}, {"content": "y"}, "stop"]
)
PLACES: list[tuple[str | int, ...]] = [
    ("id",),
    ("choices",),
    ("choices", 0),
    ("choices", 0, "index"),
    ("choices", 0, "delta"),
    ("choices", 0, "delta", "content"),
    ("choices", 0, "delta", "reasoning"),
    ("choices", 0, "finish_reason"),
    ("choices", 0, "token_ids"),
    ("choices", 1),
    ("usage",),
    ("usage", "prompt_tokens"),
    ("usage", "completion_tokens"),
    ("usage", "prompt_tokens_details"),
    ("usage", "completion_tokens_details"),
    ("error",),
]


def state(reader: CompletionReader) -> dict[str, Any]:
    """Everything in the reader but the short cut's own memory, choices opened up."""
    found: dict[str, Any] = {}
    for name in (*Completion.__slots__, *CompletionReader.__slots__):
        value = getattr(reader, name)
        if name == "_choices":
            value = {
                index: {slot: str(getattr(choice, slot)) for slot in type(choice).__slots__}
                for index, choice in value.items()
            }
        if name not in ("_sole", "_template", "_lessons"):
            found[name] = value
    return found


def both_ways(payloads: list[bytes]) -> None:
    short, long = CompletionReader(streamed=True), CompletionReader(streamed=True)
    for number, payload in enumerate(payloads):
        short.on_data(payload, 100 + number)
        long.on_event(Event(payload, b"message"), 100 + number)
        assert state(short) == state(long), payload


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_real_streams(path: Path) -> None:
    body = path.read_bytes().partition(b"\r\n\r\n")[2] or path.read_bytes()
    events = EventDecoder().feed(body.replace(b"\r\n", b"\n"))
    assert events
    both_ways([event.data for event in events])


def test_most_chunks_of_a_stream_take_the_short_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would compare the long way with itself."""
    taken: list[bool] = []
    original = CompletionReader._take_plain

    def spy(self: CompletionReader, chunk: Any, stamp_ns: int, width_ns: int) -> bool:
        taken.append(original(self, chunk, stamp_ns, width_ns))
        return taken[-1]

    monkeypatch.setattr(CompletionReader, "_take_plain", spy)
    both_ways([changed(completion_tokens=count) for count in range(1, 20)])
    assert taken == [False] + [True] * 18


def changed(**usage: Any) -> bytes:
    return json.dumps(PLAIN | {"usage": PLAIN["usage"] | usage}).encode()


def put(chunk: dict[str, Any], place: tuple[str | int, ...], value: Any) -> None:
    target: Any = chunk
    try:
        for step in place[:-1]:
            target = target[step]
        if isinstance(target, list) and place[-1] == len(target):
            target.append(value)
        else:
            target[place[-1]] = value
    except (KeyError, IndexError, TypeError):
        return


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.sampled_from(PLACES), ODD), max_size=3), min_size=1, max_size=6),
    st.integers(min_value=0, max_value=3),
)
def test_chunks_of_every_kind(changes: list[list[tuple[tuple[str | int, ...], Any]]], plain_before: int) -> None:
    payloads = [changed(completion_tokens=count + 1) for count in range(plain_before)]
    for number, places in enumerate(changes):
        chunk = copy.deepcopy(PLAIN)
        chunk["usage"]["completion_tokens"] = plain_before + number + 1
        for place, value in places:
            put(chunk, place, copy.deepcopy(value))
        payloads.append(json.dumps(chunk).encode())
    both_ways([*payloads, b"[DONE]", changed(completion_tokens=50)])
