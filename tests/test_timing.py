from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_locust.timing import (
    chunk_gaps_ns,
    e2e_ns,
    itl_samples,
    mean_tokens_per_chunk,
    tpot_ns,
    tpot_reads_low,
    ttft_ns,
)

CHUNKS = [1_100, 1_130, 1_130, 1_190]


def test_the_definitions() -> None:
    assert ttft_ns(1_000, CHUNKS) == 100
    assert ttft_ns(900, CHUNKS) == 200
    assert e2e_ns(1_000, CHUNKS) == 190
    assert chunk_gaps_ns(CHUNKS) == [30, 0, 60]
    assert tpot_ns(CHUNKS, 7) == 15
    assert itl_samples(CHUNKS, [1, 2, 1, 3]) == ([15, 0, 20], [2, 1, 3])
    assert mean_tokens_per_chunk(CHUNKS, 7) == 1.75


def test_unknown_is_none() -> None:
    assert ttft_ns(1_000, []) is None
    assert e2e_ns(1_000, []) is None
    assert e2e_ns(1_000, [], body_ns=1_400) == 400
    assert e2e_ns(1_000, CHUNKS, body_ns=1_400) == 190
    assert tpot_ns(CHUNKS, None) is None
    assert itl_samples(CHUNKS, None) is None
    assert mean_tokens_per_chunk([], 3) is None
    assert mean_tokens_per_chunk(CHUNKS, None) is None
    assert chunk_gaps_ns([]) == chunk_gaps_ns([5]) == []
    assert itl_samples([], []) == itl_samples([5], [4]) == ([], [])


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


def test_tpot_reads_low_when_the_first_chunk_holds_several_tokens() -> None:
    assert tpot_reads_low([2, 1]) is True
    assert tpot_reads_low([1, 2]) is False
    assert tpot_reads_low(None) is None
    assert tpot_reads_low([]) is None


def test_the_gap_before_a_chunk_without_tokens_counts_to_the_next() -> None:
    assert itl_samples([0, 10, 30, 70], [1, 0, 1, 2]) == ([30, 20], [1, 2])
    assert itl_samples([0, 10], [1, 0]) == ([], [])


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 60)), min_size=1, max_size=30),
    st.integers(-(10**15), 10**15),
)
def test_laws(steps: list[tuple[int, int]], shift: int) -> None:
    chunks: list[int] = []
    for gap, _ in steps:
        chunks.append((chunks[-1] if chunks else 0) + gap)
    tokens = [count for _, count in steps]
    shifted = [arrival + shift for arrival in chunks]
    total = sum(tokens)

    assert sum(chunk_gaps_ns(chunks)) == chunks[-1] - chunks[0]
    assert chunk_gaps_ns(shifted) == chunk_gaps_ns(chunks)
    assert tpot_ns(shifted, total) == tpot_ns(chunks, total)
    assert itl_samples(shifted, tokens) == itl_samples(chunks, tokens)
    assert ttft_ns(shift, shifted) == ttft_ns(0, chunks)
    assert e2e_ns(shift, shifted) == e2e_ns(0, chunks)

    samples = itl_samples(chunks, tokens)
    assert samples is not None
    assert sum(samples.weights) == sum(tokens[1:])
    counted = [arrival for arrival, count in zip(chunks[1:], tokens[1:], strict=True) if count]
    passed = (counted[-1] if counted else chunks[0]) - chunks[0]
    summed = sum(value * weight for value, weight in zip(samples.values_ns, samples.weights, strict=True))
    assert abs(summed - passed) <= Fraction(sum(samples.weights), 2)
    if total >= 2 and len(chunks) >= 2:
        tpot = tpot_ns(chunks, total)
        assert tpot is not None
        assert abs(tpot - Fraction(chunks[-1] - chunks[0], total - 1)) <= Fraction(1, 2)
