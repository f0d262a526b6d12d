import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_locust.histogram import RATIO, LogHistogram
from vllm_locust.statistics import PERCENTILES, percentile

durations = st.lists(st.integers(-20, 20) | st.integers(1, 10**13), max_size=30)


def of(values: list[int]) -> LogHistogram:
    histogram = LogHistogram()
    for value in values:
        histogram.record(value)
    return histogram


def union(*parts: LogHistogram) -> LogHistogram:
    return LogHistogram.union(parts)


@given(durations)
@settings(max_examples=60, deadline=None)
def test_the_empty_one_is_the_identity(values: list[int]) -> None:
    assert union(of(values), LogHistogram()) == of(values)
    assert union(LogHistogram(), of(values)) == of(values)


@given(durations, durations, durations)
@settings(max_examples=40, deadline=None)
def test_order_and_grouping_do_not_matter(a: list[int], b: list[int], c: list[int]) -> None:
    assert union(of(a), of(b)) == union(of(b), of(a)) == of(a + b)
    assert union(union(of(a), of(b)), of(c)) == union(of(a), union(of(b), of(c)))


@given(durations, durations)
@settings(max_examples=60, deadline=None)
def test_since_is_what_was_recorded_after(before: list[int], after: list[int]) -> None:
    earlier = of(before)
    since, alone = of([*before, *after]).since(earlier), of(after)
    assert (since.n, since.sum_ns) == (alone.n, alone.sum_ns)
    for q in (Fraction(1, 2), Fraction(99, 100)):
        exact = alone.quantile(q)
        if exact is None or exact > 0:
            assert since.quantile(q) == (None if exact is None else pytest.approx(exact, rel=RATIO - 1, abs=1))
    if after:
        with pytest.raises(ValueError, match="no former state"):
            earlier.since(of([*before, *after]))


@given(durations)
@settings(max_examples=60, deadline=None)
def test_a_round_trip_changes_nothing(values: list[int]) -> None:
    histogram = LogHistogram.from_bytes(of(values).to_bytes())
    assert histogram == of(values)
    assert (histogram.n, histogram.sum_ns) == (len(values), sum(values))
    assert histogram.min_ns == min(values, default=None)
    assert histogram.max_ns == max(values, default=None)


@given(durations)
@settings(max_examples=60, deadline=None)
def test_one_by_one_and_together_are_the_same(values: list[int]) -> None:
    together = LogHistogram()
    together.record_many(np.array(values, dtype=np.int64))
    assert together == of(values)


@given(
    st.lists(st.integers(1, 10**13), min_size=1, max_size=60),
    st.sampled_from(sorted(PERCENTILES)),
)
@settings(max_examples=80, deadline=None)
def test_a_quantile_is_within_half_a_percent_of_the_exact_nearest_rank(values: list[int], name: str) -> None:
    exact = percentile(np.sort(np.array(values)), PERCENTILES[name])
    assert of(values).quantile(PERCENTILES[name]) == pytest.approx(exact, rel=0.005)


def test_what_lies_outside_is_counted_by_name_and_keeps_its_rank() -> None:
    histogram = of([-7, 0, 0, 100, 1 << 63])
    assert (histogram.negative, histogram.zero, histogram.too_large, histogram.n) == (1, 2, 1, 5)
    assert [histogram.quantile(Fraction(rank, 5)) for rank in (1, 2, 3)] == [-7, 0, 0]
    assert histogram.quantile(Fraction(4, 5)) == pytest.approx(100, rel=0.005)
    assert histogram.quantile(Fraction(1)) == 1 << 63


def test_nothing_recorded_has_no_quantile_and_no_mean() -> None:
    assert LogHistogram().quantile(Fraction(1, 2)) is None
    assert LogHistogram().mean_ns is None


def test_weights_stand_for_repetition_and_fractions_of_a_nanosecond_for_zero() -> None:
    histogram = LogHistogram()
    histogram.record_many(np.array([0.25, 40.0, 2000.5]), np.array([4, 1, 2]))
    assert (histogram.n, histogram.zero) == (7, 4)
    assert histogram.sum_ns == 1 + 40 + 4001
    assert (histogram.min_ns, histogram.max_ns) == (0, 2001)


def test_a_million_samples() -> None:
    values = np.random.default_rng(0).lognormal(17, 1, 1_000_000)
    histogram = LogHistogram()
    histogram.record_many(values)
    ordered = np.sort(values)
    for q in PERCENTILES.values():
        assert histogram.quantile(q) == pytest.approx(percentile(ordered, q), rel=0.005)
    assert len(histogram.to_bytes()) < 12_000


def test_values_that_are_no_durations_are_refused() -> None:
    for bad in (np.nan, np.inf, 2.0**63):
        with pytest.raises(ValueError, match="not all finite"):
            LogHistogram().record_many(np.array([1.0, bad]))


HEADER = struct.Struct("<4sHQQQ?qq16s")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "shorter than its header"),
        (b"XXXX" + of([5]).to_bytes()[4:], "starts with"),
        (of([5]).to_bytes() + b"\0", "bytes, not"),
        (HEADER.pack(b"VLH1", 1, 0, 0, 0, True, 1, 1, bytes(16)) + struct.pack("<HQ", 4400, 1), "bucket numbers"),
        (HEADER.pack(b"VLH1", 2, 0, 0, 0, True, 1, 1, bytes(16)) + struct.pack("<HHQQ", 7, 7, 1, 1), "bucket numbers"),
        (HEADER.pack(b"VLH1", 1, 0, 0, 0, True, 1, 1, bytes(16)) + struct.pack("<HQ", 7, 0), "count outside"),
        (HEADER.pack(b"VLH1", 1, 0, 0, 0, True, 1, 1, bytes(16)) + struct.pack("<HQ", 7, 1 << 63), "count outside"),
        (HEADER.pack(b"VLH1", 0, 0, 0, 0, True, 1, 1, bytes(16)), "range"),
        (HEADER.pack(b"VLH1", 0, 1, 0, 0, True, 2, 1, bytes(16)), "range"),
    ],
)
def test_hostile_bytes_are_refused_by_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        LogHistogram.from_bytes(data)


@given(st.binary(max_size=120))
@settings(max_examples=100)
def test_any_bytes_are_a_histogram_or_a_value_error(data: bytes) -> None:
    for attempt in (data, b"VLH1" + data):
        try:
            histogram = LogHistogram.from_bytes(attempt)
        except ValueError:
            continue
        assert histogram.to_bytes() == attempt


@given(st.lists(st.integers(0, 10**10), max_size=200), st.integers(0, 10**10))
@settings(max_examples=60, deadline=None)
def test_above_is_right_but_for_the_limits_own_bucket(values: list[int], limit: int) -> None:
    histogram = LogHistogram()
    for value in values:
        histogram.record(value)
    lowest = sum(value > limit * RATIO + 1 for value in values)
    highest = sum(value > limit / RATIO - 1 for value in values)
    assert lowest <= histogram.above(limit) <= highest


def test_above_at_the_ends() -> None:
    histogram = LogHistogram()
    for value in (-5, 0, 100, 1 << 63):
        histogram.record(value)
    assert [histogram.above(limit) for limit in (-1, 0, 50, 200, 1 << 64)] == [3, 2, 2, 1, 1]


def test_what_is_read_from_bytes_is_the_same_before_and_after_it_grows() -> None:
    recorded = of([0, -3, 7, 7, 1_000_000, 12_345_678_901])
    read = LogHistogram.from_bytes(recorded.to_bytes())
    quantiles = [read.quantile(share / 20) for share in range(1, 21)]
    assert quantiles == [recorded.quantile(share / 20) for share in range(1, 21)]
    assert [read.above(limit) for limit in (-1, 0, 6, 8, 10**9)] == [5, 4, 4, 2, 1]
    assert (read.n, read) == (6, recorded)
    for grown in (read, recorded):
        grown.record(7, weight=5)
    assert read == recorded == of([0, -3, *[7] * 7, 1_000_000, 12_345_678_901])
    assert union(read, LogHistogram(), recorded) == union(read, recorded)
    assert LogHistogram.union([]) == LogHistogram()
