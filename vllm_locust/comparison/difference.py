"""How far NEW is from BASE in one quantity of one stage, with what chance has to say about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from vllm_locust.comparison.quantity import MEAN, Quantity
from vllm_locust.comparison.score import Hypothesis, PercentileHypothesis, RatioHypothesis, together
from vllm_locust.comparison.series import StageSeries
from vllm_locust.statistics import MIN_SAMPLES_BEYOND, PERCENTILES

ALPHA: Final = 0.05
MIN_REQUESTS: Final = 100
"""On each side, for every quantity. From fewer that remember each other (correlated by 0.8 with the one before) the
variance is found too small: 20 give 20 % false alarms, 50 give 8 %, 100 give 6 %. By 0.9, 100 give 10 %, 200 give 6 %.
"""
MIN_LENGTHS: Final = 20
"""So many times the mean E2E a stage must be long for its rates: a batch is a tenth of it, and batches no longer than a
request share what goes on in it (a stage of 6 times gives 9 % false alarms). Repeated runs need no batches.
"""
_SAME: Final = 1e-9
"""Relative: less is rounding."""
_TAIL: Final = 0.025
_WIDEST: Final = 1e4
_STEPS: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Values in the quantity's unit, infinite where a percentile falls on a failed request. ``change`` is relative.

    ``interval`` (95 %) is of the change; of a fraction it is of the difference. A bound is None where the samples give
    none. ``p_higher`` and ``p_lower`` are one-sided; None with ``undecided`` saying why.
    """

    quantity: Quantity
    base: float | None
    new: float | None
    n: int
    interval: tuple[float | None, float | None] = (None, None)
    p_higher: float | None = None
    p_lower: float | None = None
    undecided: str | None = None

    @property
    def difference(self) -> float | None:
        """None where already BASE's percentile falls on a failed request: no number is worse than that."""
        if self.base is None or self.new is None or math.isinf(self.base):
            return None
        return self.new - self.base

    @property
    def change(self) -> float | None:
        if self.base is None or self.new is None or math.isinf(self.base):
            return None
        if self.base == 0:
            return 0.0 if self.new == 0 else math.inf
        return self.new / self.base - 1

    @property
    def p_worse(self) -> float | None:
        """The one-sided p-value of "NEW is worse"."""
        return self.p_lower if self.quantity.higher_is_better else self.p_higher

    @property
    def p_two_sided(self) -> float | None:
        if self.p_higher is None or self.p_lower is None:
            return None
        return min(1.0, 2 * min(self.p_higher, self.p_lower))

    def as_json(self) -> dict[str, Any]:
        return {
            "quantity": self.quantity.text,
            "unit": self.quantity.unit,
            "n": self.n,
            "base": _finite(self.base),
            "new": _finite(self.new),
            "difference": _finite(self.difference),
            "change": _finite(self.change),
            "difference_ci95" if self.quantity.is_fraction else "change_ci95": list(self.interval),
            "beyond": [side for side in ("base", "new") if getattr(self, side) == math.inf],
            "p_worse": self.p_worse,
            "p": self.p_two_sided,
            "undecided": self.undecided,
        }


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def can_pair(base: Sequence[StageSeries], new: Sequence[StageSeries]) -> bool:
    """Whether each request of the one side has one of the other that came at the same place of the same schedule."""
    if len(base) != 1 or len(new) != 1:
        return False
    one, other = base[0].arrivals, new[0].arrivals
    return one is not None and other is not None and len(one) == len(other) and bool((one == other).all())


def compare(
    quantity: Quantity,
    base: Sequence[StageSeries],
    new: Sequence[StageSeries],
    *,
    paired: bool,
    with_interval: bool = True,
) -> Difference | None:
    """``base`` and ``new`` are runs of one setting each. None where a run lacks the quantity.

    ``paired``: see ``can_pair``. The interval costs some forty times as much as the test.
    """
    hypothesis = _hypothesis(quantity, base, new, paired)
    if hypothesis is None:
        return _without_ok(quantity, base, new)
    known = Difference(quantity=quantity, base=hypothesis.base, new=hypothesis.new, n=hypothesis.n)
    if reason := _too_few(quantity, hypothesis, base, new):
        return replace(known, undecided=reason)
    # Two equal percentiles are no difference, however many samples of just that value each side has.
    same = math.isfinite(known.base or 0.0) and math.isclose(known.base or 0.0, known.new or 0.0, rel_tol=_SAME)
    chance = 0.5 if same else hypothesis.score(1.0, 0.0).chance_of_higher
    tested = replace(known, p_higher=chance, p_lower=1 - chance)
    if not with_interval:
        return tested
    interval = _fraction_interval(hypothesis) if quantity.is_fraction else _change_interval(hypothesis)
    return replace(tested, interval=interval)


def _hypothesis(
    quantity: Quantity, base: Sequence[StageSeries], new: Sequence[StageSeries], paired: bool
) -> Hypothesis | None:
    sides = base, new
    name = quantity.metric
    if quantity.is_percentile:
        assert quantity.statistic is not None
        if any(name not in run.samples or not run.samples[name].n for side in sides for run in side):
            return None
        one, other = ([run.samples[name] for run in side] for side in sides)
        return PercentileHypothesis(one, other, PERCENTILES[quantity.statistic], paired=paired)
    if quantity.statistic is not None:
        if any(name not in run.samples or not run.samples[name].totals.known for side in sides for run in side):
            return None
        means = ([run.samples[name].totals for run in side] for side in sides)
        return RatioHypothesis(*means, paired=paired)
    if any(name not in run.totals or not run.totals[name].known for side in sides for run in side):
        return None
    by_request = all(name not in run.over_time for run in (*base, *new))
    return RatioHypothesis(
        *([run.totals[name] for run in side] for side in sides),
        paired=paired and by_request,
        shares=quantity.is_fraction,
    )


def _without_ok(quantity: Quantity, base: Sequence[StageSeries], new: Sequence[StageSeries]) -> Difference | None:
    """A mean, where a side has requests that it would be of, and each of them failed."""
    sides = [[run.samples.get(quantity.metric) for run in side] for side in (base, new)]
    if quantity.statistic != MEAN or any(one is None or not one.n for side in sides for one in side):
        return None
    values = []
    for side in sides:
        known = [one.totals for one in side if one is not None and one.totals.known]
        values.append(together(known) if len(known) == len(side) else None)
    missing = " and ".join(name for name, value in zip(("BASE", "NEW"), values, strict=True) if value is None)
    reason = f"every request of a run of {missing} failed, and {quantity.text} is of ok requests"
    return Difference(quantity=quantity, base=values[0], new=values[1], n=0, undecided=reason)


def _too_few(
    quantity: Quantity, hypothesis: Hypothesis, base: Sequence[StageSeries], new: Sequence[StageSeries]
) -> str | None:
    if any(quantity.metric in run.over_time for run in (*base, *new)):
        return _rate_too_short(quantity, base, new)
    if quantity.is_percentile:
        assert quantity.statistic is not None
        needed = math.ceil(MIN_SAMPLES_BEYOND / (1 - PERCENTILES[quantity.statistic]))
        if hypothesis.n < needed:
            return f"{hypothesis.n:,} samples, and {quantity.text} needs {needed:,} on each side"
    return _needs(quantity, hypothesis.requests)


def _needs(quantity: Quantity, requests: int, kind: str = "") -> str | None:
    if requests >= MIN_REQUESTS:
        return None
    return f"{requests:,} {kind}requests, and {quantity.text} needs {MIN_REQUESTS} on each side"


def _rate_too_short(quantity: Quantity, base: Sequence[StageSeries], new: Sequence[StageSeries]) -> str | None:
    if reason := _needs(quantity, min(sum(run.completed for run in side) for side in (base, new)), "completed "):
        return reason
    for (run,) in (side for side in (base, new) if len(side) == 1):
        e2e = run.samples.get("e2e")
        if e2e is not None and e2e.totals.known and run.length_s < MIN_LENGTHS * e2e.totals.ratio:
            return (
                f"requests take {e2e.totals.ratio:.3g} s in a stage of {run.length_s:.3g} s, and of one run "
                f"{quantity.text} needs a stage {MIN_LENGTHS} times as long as they are"
            )
    return None


def _change_interval(hypothesis: Hypothesis) -> tuple[float | None, float | None]:
    """The factors that the test at 5 % does not reject, less 1."""
    if not (hypothesis.base > 0 and hypothesis.new > 0):
        return None, None

    def chance(log_factor: float) -> float:
        return hypothesis.score(math.exp(log_factor), 0.0).chance_of_higher

    known = math.isfinite(hypothesis.base) and math.isfinite(hypothesis.new)
    centre = math.log(hypothesis.new / hypothesis.base) if known else 0.0
    low, high = (_crossing(chance, level, centre, 0.02, math.log(_WIDEST)) for level in (_TAIL, 1 - _TAIL))
    return (None if low is None else math.expm1(low)), (None if high is None else math.expm1(high))


def _fraction_interval(hypothesis: Hypothesis) -> tuple[float | None, float | None]:
    def chance(shift: float) -> float:
        return hypothesis.score(1.0, shift).chance_of_higher

    centre = hypothesis.new - hypothesis.base
    low, high = (_crossing(chance, level, centre, 0.001, 2.0) for level in (_TAIL, 1 - _TAIL))
    return (None if low is None else max(-1.0, low)), (None if high is None else min(1.0, high))


def _crossing(
    chance: Callable[[float], float], level: float, centre: float, step: float, widest: float
) -> float | None:
    """Where ``chance``, which rises, passes ``level``; None where it does not within ``widest`` of the centre."""
    below, above = centre, centre
    while chance(below) >= level:
        above, below, step = below, below - step, step * 2
        if centre - below > widest:
            return None
    while chance(above) < level:
        below, above, step = max(below, above), above + step, step * 2
        if above - centre > widest:
            return None
    for _ in range(_STEPS):
        middle = (below + above) / 2
        if chance(middle) < level:
            below = middle
        else:
            above = middle
        if above - below <= 1e-4 * max(abs(above - centre), 1e-6):
            break
    return (below + above) / 2


def holm(p_values: Mapping[Any, float], alpha: float = ALPHA) -> set[Any]:
    """The keys that are rejected so that the chance of any false one is at most ``alpha`` (Holm, 1979)."""
    rejected = set()
    ordered = sorted(p_values.items(), key=lambda item: item[1])
    for place, (key, p) in enumerate(ordered):
        if p > alpha / (len(ordered) - place):
            break
        rejected.add(key)
    return rejected
