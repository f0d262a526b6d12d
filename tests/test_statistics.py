import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_locust.statistics import (
    PERCENTILES,
    few_samples,
    ks_distance,
    linear_percentile,
    nearest_rank,
    percentile,
    weighted_percentile,
)


def test_nearest_rank_in_whole_numbers() -> None:
    # The smallest rank r with r/n >= q.
    assert [nearest_rank(4, PERCENTILES[name]) for name in ("p50", "p90", "p95", "p99", "p99_9")] == [2, 4, 4, 4, 4]
    assert nearest_rank(1000, PERCENTILES["p99_9"]) == 999
    assert nearest_rank(1001, PERCENTILES["p99_9"]) == 1000
    assert nearest_rank(100, PERCENTILES["p99"]) == 99
    assert nearest_rank(1, PERCENTILES["p99"]) == 1


def test_no_samples_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="no samples"):
        nearest_rank(0, Fraction(1, 2))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.sampled_from(sorted(PERCENTILES)))
@settings(max_examples=60)
def test_percentile_is_the_smallest_value_that_enough_samples_do_not_exceed(values: list[int], name: str) -> None:
    q = PERCENTILES[name]
    expected = min(v for v in values if Fraction(sum(x <= v for x in values), len(values)) >= q)
    assert percentile(np.sort(np.array(values)), q) == expected


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), min_size=1, max_size=30),
    st.sampled_from(sorted(PERCENTILES)),
)
@settings(max_examples=60)
def test_weights_stand_for_repetition(pairs: list[tuple[int, int]], name: str) -> None:
    repeated = np.sort(np.repeat([v for v, _ in pairs], [w for _, w in pairs]))
    values, weights = np.array([v for v, _ in pairs]), np.array([w for _, w in pairs])
    assert weighted_percentile(values, weights, PERCENTILES[name]) == percentile(repeated, PERCENTILES[name])


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.sampled_from(sorted(PERCENTILES)))
@settings(max_examples=60)
def test_linear_percentile_is_numpys(values: list[int], name: str) -> None:
    ordered = sorted(values)
    q = PERCENTILES[name]
    ours = linear_percentile(len(ordered), lambda rank: float(ordered[rank - 1]), q)
    assert math.isclose(ours, float(np.percentile(values, float(q) * 100)), rel_tol=1e-12, abs_tol=1e-9)


def test_ten_samples_must_lie_beyond() -> None:
    assert few_samples(0) == ["p50", "p90", "p95", "p99", "p99_9"]
    assert few_samples(19) == ["p50", "p90", "p95", "p99", "p99_9"]
    assert few_samples(20) == ["p90", "p95", "p99", "p99_9"]
    assert few_samples(999) == ["p99", "p99_9"]
    assert few_samples(1000) == ["p99_9"]
    assert few_samples(10_000) == []


def test_ks_distance_of_small_samples() -> None:
    assert ks_distance([1, 2, 3], [3, 1, 2]) == 0
    assert ks_distance([1, 2], [3, 4, 5]) == 1
    # At 2: 2/4 against 1/2. At 3: 3/4 against 1/2, the largest.
    assert ks_distance([1, 2, 3, 4], [2, 4]) == 0.25
    with pytest.raises(ValueError, match="without samples"):
        ks_distance([], [1])
