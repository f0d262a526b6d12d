import math
from fractions import Fraction

import numpy as np
import pytest

from vllm_locust.comparison.difference import Difference, can_pair, compare, holm
from vllm_locust.comparison.quantity import Quantity
from vllm_locust.comparison.score import PercentileHypothesis, RatioHypothesis
from vllm_locust.comparison.series import Samples, StageSeries, Totals
from vllm_locust.comparison.student import upper_tail

P50, P99 = Quantity("ttft", "p50"), Quantity("ttft", "p99")


def series(values: list[float] | np.ndarray[tuple[int], np.dtype[np.float64]], arrivals: bool = False) -> StageSeries:
    array = np.asarray(values, dtype=np.float64)
    return StageSeries({"ttft": Samples.one_each(array)}, {}, np.arange(len(array)) if arrivals else None)


def found(quantity: Quantity, base: StageSeries, new: StageSeries, paired: bool = False) -> Difference:
    difference = compare(quantity, [base], [new], paired=paired)
    assert difference is not None
    return difference


@pytest.mark.parametrize(
    ("t", "degrees", "tail"),
    [
        (1.812, 10, 0.05),
        (2.228, 10, 0.025),
        (6.314, 1, 0.05),
        (2.920, 2, 0.05),
        (1.645, 1e6, 0.05),
        (4.587, 10, 0.0005),
    ],
)
def test_students_t_as_in_every_table(t: float, degrees: float, tail: float) -> None:
    assert upper_tail(t, degrees) == pytest.approx(tail, rel=2e-3)
    assert upper_tail(-t, degrees) == pytest.approx(1 - tail, rel=1e-3)


def test_students_t_in_closed_form() -> None:
    for t in (0.0, 0.3, 1.0, 40.0):
        assert upper_tail(t, 1) == pytest.approx(0.5 - math.atan(t) / math.pi, rel=1e-9)
        assert upper_tail(t, 2) == pytest.approx(0.5 - t / (2 * math.sqrt(2 + t * t)), rel=1e-9)
    assert upper_tail(math.inf, 3) == 0
    assert upper_tail(-math.inf, 3) == 1


def test_a_percentile_is_the_nearest_rank_of_all_runs_together() -> None:
    random = np.random.default_rng(1)
    runs = [random.exponential(1, n) for n in (300, 500)]
    hypothesis = PercentileHypothesis(
        [Samples.one_each(run) for run in runs], [Samples.one_each(runs[0])], Fraction(9, 10)
    )
    assert hypothesis.base == np.sort(np.concatenate(runs))[math.ceil(0.9 * 800) - 1]
    assert hypothesis.new == np.sort(runs[0])[math.ceil(0.9 * 300) - 1]


def test_weights_are_so_many_equal_samples() -> None:
    values, owners = np.array([5.0, 1.0, 3.0]), np.array([0, 0, 1])
    heavy = Samples(values, owners, 2, np.array([1.0, 3.0, 2.0]))
    long = Samples(np.repeat(values, [1, 3, 2]), np.repeat(owners, [1, 3, 2]), 2)
    for q in (Fraction(1, 10), Fraction(1, 2), Fraction(9, 10)):
        assert PercentileHypothesis([heavy], [long], q).base == PercentileHypothesis([heavy], [long], q).new
    assert heavy.n == long.n == 6
    assert heavy.totals.ratio == long.totals.ratio == pytest.approx((5 + 3 + 6) / 6)


def test_the_same_run_twice_is_no_difference() -> None:
    run = series(np.random.default_rng(2).exponential(1, 2_000))
    same = found(P99, run, run)
    assert same.difference == 0
    assert same.p_worse == pytest.approx(0.5)
    assert same.p_two_sided == pytest.approx(1.0)
    assert same.interval[0] is not None
    assert same.interval[1] is not None
    assert same.interval[0] < 0 < same.interval[1]


def test_the_interval_holds_the_true_change_in_19_of_20_cases() -> None:
    random = np.random.default_rng(3)
    for quantity in (P50, Quantity("ttft", "mean")):
        held = 0
        for _ in range(100):
            base, new = random.lognormal(0, 0.4, 600), 1.07 * random.lognormal(0, 0.4, 600)
            low, high = found(quantity, series(base), series(new)).interval
            assert low is not None
            assert high is not None
            held += low <= 0.07 <= high
        assert 88 <= held <= 100, quantity


def test_the_interval_and_the_test_say_the_same() -> None:
    random = np.random.default_rng(4)
    for shift in (1.0, 1.03, 1.06, 1.2):
        one = found(P50, series(random.lognormal(0, 0.4, 800)), series(shift * random.lognormal(0, 0.4, 800)))
        assert one.p_two_sided is not None
        assert one.interval[0] is not None
        assert one.interval[1] is not None
        assert (one.p_two_sided < 0.05) == (not one.interval[0] <= 0 <= one.interval[1])


def test_failed_requests_are_slower_than_everything() -> None:
    random = np.random.default_rng(5)
    base, new = random.lognormal(0, 0.2, 2_000), random.lognormal(0, 0.2, 2_000)
    new[::50] = np.inf
    one = found(P99, series(base), series(new))
    assert one.new == math.inf
    assert one.p_worse is not None
    assert one.p_worse < 0.001
    assert one.as_json()["beyond"] == ["new"]
    mean = found(Quantity("ttft", "mean"), series(base), series(new))
    assert mean.new == pytest.approx(new[np.isfinite(new)].mean())


@pytest.mark.parametrize("runs", [1, 3])
@pytest.mark.parametrize(("share", "slower"), [(0.021, 1.0), (0.05, 1.5), (0.6, 1.5), (1.0, 1.0)])
def test_failures_beyond_the_percentile_of_both_sides_are_seen(share: float, slower: float, runs: int) -> None:
    """More failed than the percentile leaves room for, also of all requests together."""
    random = np.random.default_rng(8)
    base = [random.lognormal(0, 0.2, 2_000) for _ in range(runs)]
    new = [np.where(random.random(2_000) < share, np.inf, slower * random.lognormal(0, 0.2, 2_000)) for _ in base]
    for quantity in (P99, Quantity("ttft", "p90"), P50):
        one = compare(quantity, [series(run) for run in base], [series(run) for run in new], paired=False)
        assert one is not None
        assert one.p_worse is not None
        if share >= {"p99": 0.02, "p90": 0.2, "p50": 0.99}[quantity.statistic or ""]:
            assert one.new == math.inf
            assert one.p_worse < 0.05
            other_way = compare(quantity, [series(run) for run in new], [series(run) for run in base], paired=False)
            assert other_way is not None
            assert other_way.p_worse is not None
            assert other_way.p_worse > 0.95


def test_as_many_failures_on_both_sides_are_no_difference() -> None:
    random = np.random.default_rng(9)
    alarms = 0
    for _ in range(200):
        base, new = (np.where(random.random(1_000) < 0.03, np.inf, random.lognormal(0, 0.2, 1_000)) for _ in range(2))
        one = compare(P99, [series(base)], [series(new)], paired=False, with_interval=False)
        assert one is not None
        assert one.p_worse is not None
        alarms += one.p_worse < 0.05
    assert alarms <= 200 * 0.05 + 2.5 * math.sqrt(200 * 0.05 * 0.95)


def test_a_mean_of_nothing_that_ended_well_is_not_decided() -> None:
    good, bad = series(np.full(200, 2.0)), series(np.full(200, np.inf))
    one = found(Quantity("ttft", "mean"), good, bad)
    assert (one.base, one.new, one.p_worse) == (2.0, None, None)
    assert one.undecided == "every request of a run of NEW failed, and mean(ttft) is of ok requests"


@pytest.mark.parametrize("noise", [0.0, 1e-15])
def test_equal_numbers_are_no_evidence(noise: float) -> None:
    """Most gaps are 0, of one side more than of the other: the percentile is the same."""
    base, new = np.repeat([0.0, 1.0], [600, 400]), np.repeat([0.0, 1.0], [900, 100])
    level = 0.1
    for one in (
        found(P50, series(base), series(new)),
        found(P50, series(level + 0 * base), series(level + noise + 0 * new)),
    ):
        assert one.p_two_sided == 1.0


def test_gaps_of_few_requests_are_few_however_many_they_are() -> None:
    random = np.random.default_rng(10)
    pooled = [Samples(random.exponential(1, 50_000), np.repeat(np.arange(50), 1_000), 50) for _ in range(2)]
    base, new = (StageSeries({"itl": samples}, {}, None) for samples in pooled)
    one = found(Quantity("itl", "p50"), base, new)
    assert one.undecided == "50 requests, and p50(itl) needs 100 on each side"


def test_too_few_samples_are_said_to_be() -> None:
    one = found(P99, series(np.arange(1.0, 1000.0)), series(np.arange(1.0, 5000.0)))
    assert one.p_worse is None
    assert one.undecided == "999 samples, and p99(ttft) needs 1,000 on each side"


def test_none_failed_of_2000_does_not_mean_never() -> None:
    none, some = Totals(np.zeros(2_000), np.ones(2_000)), Totals(np.eye(1, 2_000)[0], np.ones(2_000))
    score = RatioHypothesis([none], [some], shares=True).score(1.0, 0.0)
    assert score.chance_of_higher > 0.1


def test_runs_that_differ_count_as_one_each() -> None:
    """A hundred times the requests in each of three runs says no more, where the runs themselves differ."""
    random = np.random.default_rng(6)
    levels = [[1.0, 1.1, 0.9], [1.12, 1.02, 0.98]]
    chances = []
    for n in (500, 50_000):
        base, new = (
            [Samples.one_each(level * random.lognormal(0, 0.1, n)).totals for level in side] for side in levels
        )
        chances.append(RatioHypothesis(base, new).score(1.0, 0.0).chance_of_higher)
    # Welch's test of (1.0, 1.1, 0.9) and (1.12, 1.02, 0.98): t = 0.558, 3.6 degrees of freedom.
    assert chances == pytest.approx([0.31, 0.31], abs=0.03)


def test_a_request_is_compared_with_its_own_counterpart() -> None:
    random = np.random.default_rng(7)
    prompts = random.lognormal(0, 1.0, 2_000)
    base, new = series(prompts, arrivals=True), series(prompts * 1.02 + random.normal(0, 0.001, 2_000), arrivals=True)
    assert can_pair([base], [new])
    assert not can_pair([base, base], [new, new])
    assert not can_pair([base], [series(prompts)])
    apart, together = (found(P50, base, new, paired).p_worse for paired in (False, True))
    assert apart is not None
    assert together is not None
    assert together < 0.001 < 0.1 < apart


def test_holm_by_hand() -> None:
    # 0.01 <= 0.05/4, 0.015 <= 0.05/3, 0.03 > 0.05/2: the third stops the rest.
    assert holm({"a": 0.03, "b": 0.01, "c": 0.015, "d": 0.04}) == {"b", "c"}
    assert holm({}) == set()
