import math
from fractions import Fraction
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.queueing import visits
from vllm_locust.confidence import long_run_variance, proportion_ci95, rank_interval, variance_inflation
from vllm_locust.statistics import PERCENTILES, nearest_rank


def binomial_cdf(n: int, q: float) -> list[float]:
    """P(X <= k) for k = 0…n."""
    return list(accumulate(math.comb(n, k) * q**k * (1 - q) ** (n - k) for k in range(n + 1)))


@given(st.integers(1, 300), st.sampled_from(["p50", "p90", "p99"]))
@settings(max_examples=40, deadline=None)
def test_ranks_are_the_tightest_with_at_most_2_5_percent_on_each_side(n: int, name: str) -> None:
    q = float(PERCENTILES[name])
    low, high = rank_interval(n, PERCENTILES[name])
    at_most = binomial_cdf(n, q)
    # P(fewer than `low` samples are below the percentile) <= 2.5 %, and no larger rank has that.
    expected_low = max((r for r in range(1, n + 1) if at_most[r - 1] <= 0.025), default=None)
    expected_high = min((r for r in range(1, n + 1) if 1 - at_most[r - 1] <= 0.025), default=None)
    assert (low, high) == (expected_low, expected_high)


def test_the_textbook_interval_of_a_median() -> None:
    # n = 20: the 6th and the 15th order statistic (95.9 %), as in every table.
    assert rank_interval(20, Fraction(1, 2)) == (6, 15)


def test_a_hundred_samples_do_not_bound_p99_from_above() -> None:
    low, high = rank_interval(100, PERCENTILES["p99"])
    assert low == 97
    assert high is None


def test_large_samples_need_no_large_tables() -> None:
    low, high = rank_interval(100_000_000, PERCENTILES["p99_9"])
    assert low is not None
    assert high is not None
    # 1.96 standard deviations of the count beyond: sqrt(1e8 * 0.999 * 0.001) = 316.
    assert 99_900_000 - low == pytest.approx(1.96 * 316.07, abs=3)
    assert high - 99_900_000 == pytest.approx(1.96 * 316.07, abs=3)


def test_independent_samples_count_in_full() -> None:
    beyond = (np.random.default_rng(0).random(40_000) > 0.9).astype(np.float64)
    assert variance_inflation(beyond, np.ones(len(beyond))) == pytest.approx(1, abs=0.25)


def mean_inflation(copies: int, samples: float) -> float:
    """Over many sequences of independent draws, each repeated so often and worth so many samples."""
    draws = (np.random.default_rng(0).random((40, 4_000)) > 0.9).astype(np.float64) * samples
    sequences = np.repeat(draws, copies, axis=1)
    return float(np.mean([variance_inflation(one, np.full(len(one), samples)) for one in sequences]))


def test_blocks_of_equal_samples_count_once() -> None:
    # Each draw is repeated 10 times: 10 samples say as much as 1. Student's t adds a little.
    assert mean_inflation(10, 1.0) == pytest.approx(10.5, rel=0.1)


def test_alike_gaps_within_a_request_count_once() -> None:
    assert mean_inflation(1, 50.0) == pytest.approx(50 * 1.1, rel=0.1)


def test_inflation_widens_the_interval() -> None:
    narrow, wide = rank_interval(10_000, Fraction(1, 2)), rank_interval(10_000, Fraction(1, 2), 25)
    assert narrow[0] is not None and narrow[1] is not None and wide[0] is not None and wide[1] is not None  # noqa: PT018
    assert (wide[1] - wide[0]) / (narrow[1] - narrow[0]) == pytest.approx(5, rel=0.1)


def test_coverage_under_autocorrelation() -> None:
    """The true p90 of an AR(1) sequence lies in about 95 % of the intervals; without the correction in far fewer."""
    rng = np.random.default_rng(7)
    runs, n, rho = 300, 4_000, 0.8
    true_p90 = 1.2815515655446004 / math.sqrt(1 - rho**2)
    noise = rng.standard_normal((runs, n + 200))
    series = np.zeros_like(noise)
    for i in range(1, noise.shape[1]):
        series[:, i] = rho * series[:, i - 1] + noise[:, i]
    covered = {True: 0, False: 0}
    q = PERCENTILES["p90"]
    for row in series[:, 200:]:
        ordered = np.sort(row)
        inflation = variance_inflation((row > ordered[nearest_rank(n, q) - 1]).astype(np.float64), np.ones(n))
        for corrected in covered:
            low, high = rank_interval(n, q, inflation if corrected else 1.0)
            assert low is not None
            assert high is not None
            covered[corrected] += bool(ordered[low - 1] <= true_p90 <= ordered[high - 1])
    assert covered[True] / runs >= 0.90
    assert covered[False] / runs <= 0.75


def test_coverage_of_a_percentile_and_of_goodput_behind_a_queue() -> None:
    """Requests that wait for each other, at 80 % load: the true values lie in about 95 % of the intervals."""
    truth = np.sort(np.concatenate([latencies(1_000 + seed, 40_000) for seed in range(10)]))
    q = PERCENTILES["p90"]
    limit = truth[nearest_rank(len(truth), q) - 1]
    covered = {"p90": 0, "good fraction": 0}
    runs = 200
    for seed in range(runs):
        values = latencies(seed, 4_000)
        n, ordered = len(values), np.sort(values)
        inflation = variance_inflation((values > ordered[nearest_rank(n, q) - 1]).astype(np.float64), np.ones(n))
        low, high = rank_interval(n, q, inflation)
        fractions = proportion_ci95(values <= limit)
        assert low is not None
        assert high is not None
        assert fractions is not None
        covered["p90"] += bool(ordered[low - 1] <= limit <= ordered[high - 1])
        covered["good fraction"] += bool(fractions[0] <= 0.9 <= fractions[1])
    assert min(covered.values()) / runs >= 0.90, covered


def latencies(seed: int, requests: int) -> npt.NDArray[np.float64]:
    """Of about so many requests, in the order in which they were sent."""
    seen = visits(seed, load=0.8, places=20, service_s=0.5, length_s=requests / 32, warmup_s=30)
    return (seen.ended - seen.arrived)[seen.arrived >= 0]


def test_long_run_variance_without_correlation_is_the_sample_variance() -> None:
    assert long_run_variance(np.array([1.0, 2.0, 3.0])) == pytest.approx(1.0)
    assert long_run_variance(np.array([5.0])) == 0


def test_proportion_interval_is_wilsons_for_independent_samples() -> None:
    yes = np.zeros(100, dtype=np.bool_)
    yes[::10] = True  # evenly spread: less than independent variance, so n counts in full
    interval = proportion_ci95(yes)
    assert interval is not None
    # Wilson, 10 of 100: (0.0552, 0.1744), as published.
    assert interval == pytest.approx((0.05523, 0.17437), abs=1e-4)
    assert proportion_ci95(np.zeros(0, dtype=np.bool_)) is None
    all_good = proportion_ci95(np.ones(50, dtype=np.bool_))
    assert all_good is not None
    assert all_good[1] == pytest.approx(1)
    assert all_good[0] == pytest.approx(1 / (1 + 1.96**2 / 50), abs=1e-3)
