from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vllm_locust.pooled
from vllm_locust.pooled import PooledSample

Chunks = list[tuple[int, int]]
chunks = st.lists(st.tuples(st.integers(-5, 40) | st.integers(2**32 - 2, 2**32 + 9), st.integers(1, 4)), max_size=15)


def oracle(parts: Chunks) -> list[Fraction]:
    return sorted(Fraction(gap, k) for gap, k in parts for _ in range(k))


def sample_of(parts: Chunks) -> PooledSample:
    sample = PooledSample()
    for start in range(0, len(parts), 3):
        some = parts[start : start + 3]
        sample.add(np.array([g for g, _ in some]), np.array([k for _, k in some]))
    return sample


@given(chunks)
@settings(max_examples=40, deadline=None)
def test_every_rank_is_that_of_the_sorted_list(parts: Chunks) -> None:
    expected, sample = oracle(parts), sample_of(parts)
    assert sample.n == len(expected)
    assert [sample.at_rank(rank) for rank in range(1, len(expected) + 1)] == [float(value) for value in expected]


@given(chunks, chunks)
@settings(max_examples=25, deadline=None)
def test_a_union_is_the_sample_of_both(first: Chunks, second: Chunks) -> None:
    union = PooledSample.union([sample_of(first), PooledSample(), sample_of(second)])
    expected = oracle(first + second)
    assert [union.at_rank(rank) for rank in range(1, union.n + 1)] == [float(value) for value in expected]
    if expected:
        assert union.mean_ns == pytest.approx(float(sum(expected) / len(expected)))


def test_a_chunk_of_four_tokens_after_eight_is_four_samples_of_two() -> None:
    sample = PooledSample()
    sample.add(np.array([8, 3]), np.array([4, 1]))
    # 2 2 2 2 3
    assert sample.n == 5
    assert sample.mean_ns == 11 / 5
    assert (sample.at_rank(4), sample.at_rank(5)) == (2, 3)
    assert sample.count_up_to(2) == 4


def test_without_tokens_each_gap_is_one_sample() -> None:
    sample = PooledSample()
    sample.add(np.array([5, 1, 9]))
    assert [sample.at_rank(rank) for rank in (1, 2, 3)] == [1, 5, 9]


def test_nothing_has_no_rank_and_no_tokens_no_gap() -> None:
    with pytest.raises(ValueError, match="outside"):
        PooledSample().at_rank(1)
    with pytest.raises(ValueError, match="0 tokens"):
        PooledSample().add(np.array([5]), np.array([0]))


def test_many_runs_and_many_ties_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_locust.pooled, "RUN_LENGTH", 50_000)
    rng = np.random.default_rng(3)
    gaps = np.concatenate((rng.integers(19_000_000, 21_000_000, 700_000), np.full(300_000, 20_000_000)))
    tokens = rng.choice([1, 2, 3], len(gaps), p=[0.8, 0.15, 0.05])
    sample = PooledSample()
    for start in range(0, len(gaps), 30_000):
        sample.add(gaps[start : start + 30_000], tokens[start : start + 30_000])
    expected = np.sort(np.repeat(gaps / tokens, tokens))
    for rank in (1, len(expected) // 2, len(expected) * 99 // 100, len(expected)):
        assert sample.at_rank(rank) == pytest.approx(expected[rank - 1], rel=1e-15)
