"""Tests of "the two sides are the same but for this factor", whose inversion gives the confidence interval.

A percentile is compared by its score: under the hypothesis both sides share one percentile, that of all samples
together, and the shares of requests beyond it differ by chance alone. (The median test of Mood, Introduction to the
Theory of Statistics, 1950, for any percentile.) This needs no estimate of a density in the tail, and a failed request
is simply beyond. Where so many failed on both sides together that the shared percentile is a failed request, "beyond"
is to have failed: the shares of failures are compared. A mean, a share or a rate is compared by the difference of the
ratios.

How large a difference chance makes comes from the sequences themselves:

- within a run, the long-run variance by overlapping batch means of the ratio's linearised residuals (Cochran, Sampling
  Techniques, 6.4), never less than independent samples would have. Where batches a third as long find less, there is
  more to find in longer ones: what is missing is then extrapolated (lugsail window; Vats & Flegal, Biometrika 2022);
- with several runs on a side, a run is the unit: the variance between them, as of clusters (Cochran, 9A), or the one
  within them where that is larger, with runs - 1 degrees of freedom;
- with one run a side and the same schedule, requests of the same arrival are compared with each other: the variance
  is that of the differences, so what the same bursts and prompts do to both falls out (common random numbers; Law,
  Simulation Modeling and Analysis, 11.2).

The two sides' degrees of freedom are put together after Welch and Satterthwaite.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, Protocol

import numpy as np

from vllm_locust.comparison.series import Floats, Samples, Totals
from vllm_locust.comparison.student import upper_tail
from vllm_locust.confidence import batch_size, long_run_variance
from vllm_locust.statistics import nearest_rank


@dataclass(frozen=True, slots=True)
class Score:
    """NEW less BASE, after NEW was moved."""

    difference: float
    variance: float
    degrees: float

    @property
    def chance_of_higher(self) -> float:
        """That NEW is seen at least so much higher where the hypothesis holds: a one-sided p-value."""
        if self.variance > 0:
            return upper_tail(self.difference / math.sqrt(self.variance), self.degrees)
        return 0.5 if self.difference == 0 else upper_tail(math.copysign(math.inf, self.difference), 1.0)


class Hypothesis(Protocol):
    """NEW's values were BASE's if they were divided by ``factor`` and ``shift`` were taken off."""

    def score(self, factor: float, shift: float) -> Score: ...

    @property
    def base(self) -> float: ...

    @property
    def new(self) -> float: ...

    @property
    def n(self) -> int:
        """Of the smaller side."""
        ...

    @property
    def requests(self) -> int:
        """Of the smaller side: those that the ``n`` samples come from, or the places of a ratio."""
        ...


@dataclass(frozen=True, slots=True)
class _Part:
    """One run of one side: its ratio, and the residuals whose mean is the ratio's error."""

    ratio: float
    weight: float
    residuals: Floats
    least_variance: float

    @classmethod
    def of(cls, totals: Totals, least_variance: float | None = None) -> _Part:
        weight = float(totals.weights.sum())
        ratio = float(totals.sums.sum()) / weight
        residuals = (totals.sums - ratio * totals.weights) * (len(totals.weights) / weight)
        return cls(ratio, weight, residuals, _independent(residuals) if least_variance is None else least_variance)

    @property
    def variance(self) -> float:
        return max(_variance_of_mean(self.residuals), self.least_variance)

    @property
    def degrees(self) -> float:
        """Of the variance: of batches that do not overlap."""
        n = len(self.residuals)
        return max(1.0, n / batch_size(n) - 1)


def _variance_of_mean(residuals: Floats) -> float:
    n = len(residuals)
    long = long_run_variance(residuals)
    short = long_run_variance(residuals, max(1, batch_size(n) // 3))
    return max(long, 2 * long - short) / n


def _independent(residuals: Floats) -> float:
    """The variance of their mean, were they independent."""
    return float(np.mean(residuals**2)) / len(residuals)


def _side(parts: Sequence[_Part]) -> tuple[float, float, float]:
    """Ratio, variance and degrees of freedom."""
    shares = np.array([part.weight for part in parts]) / sum(part.weight for part in parts)
    ratios = np.array([part.ratio for part in parts])
    ratio, k = float(shares @ ratios), len(parts)
    within = float(shares**2 @ np.array([part.variance for part in parts]))
    if k == 1:
        return ratio, within, parts[0].degrees
    between = float(shares**2 @ (ratios - ratio) ** 2) * k / (k - 1)
    return ratio, max(within, between), k - 1.0


def _paired_score(
    base: _Part, new: _Part, variance_of_mean: Callable[[Floats], float], least_variance: float = 0.0
) -> Score:
    residuals = new.residuals - base.residuals
    variance = max(variance_of_mean(residuals), _independent(residuals), least_variance)
    return Score(new.ratio - base.ratio, variance, base.degrees)


def _score(base: Sequence[_Part], new: Sequence[_Part]) -> Score:
    base_ratio, base_variance, base_degrees = _side(base)
    new_ratio, new_variance, new_degrees = _side(new)
    variance = base_variance + new_variance
    spread = base_variance**2 / base_degrees + new_variance**2 / new_degrees
    return Score(new_ratio - base_ratio, variance, variance**2 / spread if spread > 0 else base_degrees)


class RatioHypothesis:
    """Of means, shares and rates.

    ``shares``: each place is yes or no. That none of n was yes does not mean that there never is one: the variance is
    at least that of one yes and one no more.
    """

    def __init__(
        self, base: Sequence[Totals], new: Sequence[Totals], *, paired: bool = False, shares: bool = False
    ) -> None:
        self._base, self._new, self._paired = base, new, paired
        self._least = [_least_of_share(one) if shares else None for one in (*base, *new)]
        self._least_paired = 1 / len(base[0].sums) ** 2 if shares else 0.0
        self._base_parts = [_Part.of(one, least) for one, least in zip(base, self._least, strict=False)]

    def score(self, factor: float, shift: float) -> Score:
        moved = [Totals(one.sums / factor - shift * one.weights, one.weights) for one in self._new]
        parts = [_Part.of(one, least) for one, least in zip(moved, self._least[len(self._base) :], strict=True)]
        if self._paired:
            return _paired_score(self._base_parts[0], parts[0], _variance_of_mean, self._least_paired)
        return _score(self._base_parts, parts)

    @property
    def base(self) -> float:
        return together(self._base)

    @property
    def new(self) -> float:
        return together(self._new)

    @property
    def n(self) -> int:
        return min(sum(one.known for one in side) for side in (self._base, self._new))

    @property
    def requests(self) -> int:
        return self.n


def together(side: Sequence[Totals]) -> float:
    return float(sum(one.sums.sum() for one in side) / sum(one.weights.sum() for one in side))


def _least_of_share(share: Totals) -> float:
    n = float(share.weights.sum())
    part = (float(share.sums.sum()) + 1) / (n + 2)
    return part * (1 - part) / n


class PercentileHypothesis:
    def __init__(self, base: Sequence[Samples], new: Sequence[Samples], q: Fraction, *, paired: bool = False) -> None:
        self._base, self._new, self._q, self._paired = base, new, q, paired

    def score(self, factor: float, shift: float) -> Score:
        runs = (*self._base, *self._new)
        values = [*(one.values for one in self._base), *(one.values / factor - shift for one in self._new)]
        limit = _percentile(runs, values, self._q)
        # Nothing lies beyond infinity: there the last finite value is what separates.
        side: Literal["left", "right"] = "left" if math.isinf(limit) else "right"
        places = [int(np.searchsorted(one, limit, side=side)) for one in values]
        n = sum(run.n for run in runs)
        share = 1 - sum(run.up_to(place) for run, place in zip(runs, places, strict=True)) / n
        parts = [
            _Part.of(Totals(run.beyond(place), run.per_request), share * (1 - share) / run.n)
            for run, place in zip(runs, places, strict=True)
        ]
        if self._paired:
            # Few requests lie beyond in one run only: what is left has too little memory to extrapolate.
            base, new = parts
            return _paired_score(base, new, lambda residuals: long_run_variance(residuals) / len(residuals))
        return _score(parts[: len(self._base)], parts[len(self._base) :])

    @property
    def base(self) -> float:
        return _percentile(self._base, [one.values for one in self._base], self._q)

    @property
    def new(self) -> float:
        return _percentile(self._new, [one.values for one in self._new], self._q)

    @property
    def n(self) -> int:
        return min(sum(one.n for one in side) for side in (self._base, self._new))

    @property
    def requests(self) -> int:
        return min(sum(one.owning for one in side) for side in (self._base, self._new))


def _percentile(runs: Sequence[Samples], values: Sequence[Floats], q: Fraction) -> float:
    """Nearest rank of the samples of all runs together; ``values`` are theirs, perhaps moved, and sorted."""
    rank = nearest_rank(sum(run.n for run in runs), q)

    def up_to(value: float) -> float:
        places = (int(np.searchsorted(one, value, side="right")) for one in values)
        return sum(run.up_to(place) for run, place in zip(runs, places, strict=True))

    return min(_first_at_rank(one, rank, up_to) for one in values)


def _first_at_rank(values: Floats, rank: int, up_to: Callable[[float], float]) -> float:
    """The smallest of the values that so many samples do not exceed; infinite where none is."""
    place = bisect_left(range(len(values)), True, key=lambda index: up_to(float(values[index])) >= rank)
    return float(values[place]) if place < len(values) else math.inf
