"""Bins of time and of length, and the exact percentiles of what falls into them: how a picture stays small whatever
the run's size, and still shows values that were measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Final, Self

import numpy as np

from vllm_locust.report.columns import Flags, Floats, Ints
from vllm_locust.report.run_facts import Interval

MAX_BINS: Final = 400
_SECOND_NS: Final = 1_000_000_000
_STEPS_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600)
"""No finer: servers and workers tell of themselves once a second, and a rate of a tenth of one is noise."""
HELD_NS: Final = 3 * _SECOND_NS
_DIGITS: Final = 4

Column = list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBins:
    """``count`` bins of ``step_ns`` from ``start_unix_ns`` on. The window's start is an edge of theirs."""

    start_unix_ns: int
    step_ns: int
    count: int

    @classmethod
    def over(cls, first_unix_ns: int, last_unix_ns: int, window_start_unix_ns: int) -> Self:
        """At most about ``MAX_BINS``, each of a round length, that hold the first and the last time."""
        needed_ns = (last_unix_ns - first_unix_ns) // MAX_BINS + 1
        hour_ns = 3600 * _SECOND_NS
        hours_ns = -(-needed_ns // hour_ns) * hour_ns
        step_ns = next((s * _SECOND_NS for s in _STEPS_S if s * _SECOND_NS >= needed_ns), hours_ns)
        before = -((first_unix_ns - window_start_unix_ns) // step_ns)
        start = window_start_unix_ns - before * step_ns
        return cls(start_unix_ns=start, step_ns=step_ns, count=(last_unix_ns - start) // step_ns + 1)

    @property
    def edges(self) -> Ints:
        return self.start_unix_ns + self.step_ns * np.arange(self.count + 1, dtype=np.int64)

    @property
    def intervals(self) -> list[Interval]:
        edges = self.edges.tolist()
        return [Interval(start_unix_ns=a, end_unix_ns=b) for a, b in pairwise(edges)]

    def index(self, times_unix_ns: Ints) -> tuple[Ints, Flags]:
        """For each time its bin, and whether there is one for it."""
        index = (times_unix_ns - self.start_unix_ns) // self.step_ns
        return np.asarray(index, dtype=np.int64), np.asarray((index >= 0) & (index < self.count), dtype=np.bool_)

    def counts(self, times_unix_ns: Ints) -> Ints:
        index, inside = self.index(times_unix_ns)
        return np.bincount(index[inside], minlength=self.count)

    def means(self, times_unix_ns: Ints, values: Floats) -> Floats:
        """Of the values that are not null; NaN for a bin without any."""
        index, inside = self.index(times_unix_ns)
        known = inside & ~np.isnan(values)
        counts = np.bincount(index[known], minlength=self.count)
        sums = np.bincount(index[known], weights=values[known], minlength=self.count)
        return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)

    def told(self, times_unix_ns: Ints, values: Floats) -> Floats:
        """``means`` of a gauge that is looked at now and then: what it told stands until the next look, for a bin
        without one too, but for no longer than ``HELD_NS``.
        """
        found = self.means(times_unix_ns, values)
        known = ~np.isnan(values)
        times, values = times_unix_ns[known], values[known]
        starts = self.edges[:-1]
        place = np.searchsorted(times, starts, side="right") - 1
        fresh = np.isnan(found) & (place >= 0)
        fresh[fresh] = starts[fresh] - times[place[fresh]] < HELD_NS
        found[fresh] = values[place[fresh]]
        return found

    def largest(self, times_unix_ns: Ints, values: Floats) -> Floats:
        """NaN for a bin without a value."""
        index, inside = self.index(times_unix_ns)
        known = inside & ~np.isnan(values)
        found = np.full(self.count, np.nan)
        np.fmax.at(found, index[known], values[known])
        return found


def binned_percentiles(index: Ints, values: Floats, count: int, qs: Sequence[Fraction]) -> list[Floats]:
    """For each of ``qs`` the nearest-rank percentile of the values of each of ``count`` bins; NaN where a bin is empty.
    ``values`` has no NaN.
    """
    order = np.lexsort((values, index))
    sorted_values = values[order]
    sizes = np.bincount(index, minlength=count)
    starts = np.cumsum(sizes) - sizes
    some = sizes > 0
    found = []
    for q in qs:
        ranks = np.maximum(1, -(-sizes * q.numerator // q.denominator))
        column = np.full(count, np.nan)
        column[some] = sorted_values[(starts + ranks - 1)[some]]
        found.append(column)
    return found


def crowded_bins(values: Floats, count: int) -> tuple[Ints, int]:
    """For each value its bin, and how many bins there are: at most ``count``, or one, that hold about as many values
    each. Equal values share a bin.
    """
    count = max(count, 1)
    edges = np.unique(np.sort(values)[np.arange(count) * len(values) // count])
    return np.searchsorted(edges, values, side="right") - 1, len(edges)


def thinned(values: Floats, evenly: int, slowest: int) -> Ints:
    """Rows to show of many: evenly over their order, and those with the largest values. All, where they are few."""
    n = len(values)
    if n <= evenly + slowest:
        return np.arange(n)
    spread = np.linspace(0, n - 1, evenly).astype(np.int64)
    return np.union1d(spread, np.argsort(values, kind="stable")[n - slowest :])


def numbers(values: Iterable[float | None]) -> Column:
    """For JSON: four significant digits, null where None or NaN."""
    return [None if value is None or np.isnan(value) else short(float(value)) for value in values]


def short(value: float) -> float:
    rounded = float(f"{value:.{_DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded
