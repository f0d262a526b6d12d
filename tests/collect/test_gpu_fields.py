from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_locust.collect.gpu_fields import Rate, fraction, throttle_reasons, utilization_between


def test_throttle_reasons_are_words() -> None:
    assert throttle_reasons(0) == []
    assert throttle_reasons(0x1 | 0x4 | 0x40) == ["gpu_idle", "sw_power_cap", "hw_thermal_slowdown"]
    assert throttle_reasons(0x8000) == ["0x8000"]


def test_fractions() -> None:
    assert [fraction(percent) for percent in (0, 50, 100)] == [0.0, 0.5, 1.0]
    assert [fraction(percent) for percent in (None, math.nan, math.inf)] == [None, None, None]


def test_a_rate_needs_two_readings_and_a_counter_that_rises() -> None:
    rate = Rate()
    readings = [(100, 0), (300, 2_000_000_000), (50, 3_000_000_000), (150, 3_500_000_000), (200, 3_500_000_000)]
    assert [rate.of(*reading) for reading in readings] == [None, 100.0, None, 200.0, None]


TIMES = st.lists(st.integers(1, 60), unique=True, min_size=1, max_size=8).map(sorted)


@settings(max_examples=60)
@given(rows=TIMES, at=TIMES, previous=st.integers(-10, 0))
def test_utilization_of_a_row_is_the_mean_of_the_samples_since_the_row_before(
    rows: list[int], at: list[int], previous: int
) -> None:
    samples = [(time, time / 7) for time in at]
    expected: list[float | None] = []
    for begin, end in zip([previous, *rows], rows, strict=False):
        between = [value for time, value in samples if begin < time <= end]
        before = [value for time, value in samples if time <= begin]
        expected.append(sum(between) / len(between) if between else before[-1] if before else None)
    assert utilization_between(rows, samples, previous) == pytest.approx(expected)
