"""Whatever a peer sends in place of a worker's message is refused by the name of a field, and nothing worse."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_locust.aggregate import RunAggregate, Snapshot
from vllm_locust.worker_message import MAX_TEXT, Ready, read_last_words

READY = {"run_id": "r", "error": None, "schedule_fingerprint": "f" * 64, "host": "h"}
WORDS: dict[str, Any] = {
    "run_id": "r",
    "worker_id": "w",
    "last_seq": 3,
    "durable_seq": 3,
    "requests": 9,
    "unstorable_values": 0,
    "spool_path": None,
    "wall_clock_moved_ns": -5,
}
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 64), 1 << 64)
    | st.floats()
    | st.text(max_size=10)
    | st.binary(max_size=10)
)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner)
)
"""All that msgpack can carry."""


def test_what_a_worker_says_is_understood() -> None:
    ready = Ready.from_message(READY)
    assert ready.to_message() == READY
    assert read_last_words(WORDS) == WORDS
    long = Ready(run_id="r", error="x" * 99_999, host="h").to_message()
    assert Ready.from_message(long).error == "x" * MAX_TEXT


@settings(max_examples=200, deadline=None)
@given(ANYTHING)
def test_noise_is_refused(noise: object) -> None:
    for read in (Ready.from_message, read_last_words, Snapshot.from_message):
        with pytest.raises(ValueError, match=r"."):
            read(noise)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([READY, WORDS]), st.data())
def test_one_wrong_field_is_refused_or_harmless(message: dict[str, Any], data: st.DataObject) -> None:
    """What is believed is of the right type, bounded, and can be written to run.json."""
    broken = message | {data.draw(st.sampled_from(sorted(message))): data.draw(ANYTHING)}
    try:
        read = Ready.from_message(broken).to_message() if message is READY else read_last_words(broken)
    except ValueError:
        return
    assert len(json.dumps(read).encode()) < 10 * MAX_TEXT
    for key, value in read.items():
        assert type(value) in (type(message[key]), str, type(None))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_one_wrong_field_of_a_snapshot_is_refused_or_harmless(data: st.DataObject) -> None:
    message = RunAggregate().to_message("w", 1)
    place = data.draw(st.sampled_from(["", "counters", "finished", "histograms"]))
    part: dict[Any, Any] = message[place] if place else message
    part[data.draw(st.sampled_from(sorted(part) or ["ok"]))] = data.draw(ANYTHING)
    try:
        snapshot = Snapshot.from_message(message)
    except ValueError:
        return
    assert RunAggregate.union([snapshot.aggregate, RunAggregate()]).sent <= 1 << 53


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"last_seq": True}, "last_seq"),
        ({"requests": -1}, "requests"),
        ({"durable_seq": 1 << 54}, "durable_seq"),
        ({"wall_clock_moved_ns": 1 << 64}, "wall_clock_moved_ns"),
        ({"spool_path": "x" * 5000}, "spool_path"),
        ({"spool_path": "\ud800"}, "spool_path"),
        ({"worker_id": b"w"}, "worker_id"),
        ({"more": 1}, "more"),
    ],
)
def test_the_field_is_named(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_last_words(WORDS | changed)
