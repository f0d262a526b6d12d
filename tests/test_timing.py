from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_locust.timing import e2e_ns, tpot_ns, ttft_ns

CHUNKS = [1_100, 1_130, 1_130, 1_190]


def test_the_definitions() -> None:
    assert ttft_ns(1_000, CHUNKS) == 100
    assert ttft_ns(900, CHUNKS) == 200
    assert e2e_ns(1_000, CHUNKS) == 190
    assert tpot_ns(CHUNKS, 7) == 15


def test_unknown_is_none() -> None:
    assert ttft_ns(1_000, []) is None
    assert e2e_ns(1_000, []) is None
    assert e2e_ns(1_000, [], body_ns=1_400) == 400
    assert e2e_ns(1_000, CHUNKS, body_ns=1_400) == 190
    assert tpot_ns(CHUNKS, None) is None


@pytest.mark.parametrize(
    ("chunks", "tokens", "expected"),
    [
        ([5], 9, None),
        ([5, 9], 1, None),
        ([5, 9], 0, None),
        ([], 3, None),
        ([5, 5], 2, 0),
        ([0, 5], 3, 3),
        ([0, 7], 4, 2),
        ([0, 8], 4, 3),
    ],
)
def test_tpot(chunks: list[int], tokens: int, expected: int | None) -> None:
    assert tpot_ns(chunks, tokens) == expected


@settings(max_examples=100)
@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=30), st.integers(0, 1000), st.integers(-(10**15), 10**15))
def test_only_differences_count(steps: list[int], tokens: int, shift: int) -> None:
    chunks = list(accumulate(steps))
    shifted = [arrival + shift for arrival in chunks]
    assert tpot_ns(shifted, tokens) == tpot_ns(chunks, tokens)
    assert ttft_ns(shift, shifted) == ttft_ns(0, chunks)
    assert e2e_ns(shift, shifted) == e2e_ns(0, chunks)
