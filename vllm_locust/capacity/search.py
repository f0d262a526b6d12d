"""Search for the capacity: the highest load (rate or users) at which every SLO is met.

At first the load doubles or halves until one probe held and one missed. Then each probe is put at the median of what
is known of the capacity (``capacity.model``), where its outcome is least certain, and is given as much time as is left
for it, or as it takes to become as precise as was asked for. Every probe counts to the end: those near the capacity
are worth as much as one long one.

The capacity is the lowest root among the SLOs; its interval holds 95 % of the probability. The search knows no clock
and sends nothing: it is asked for the next probe and told what came of it, so it goes on from any probes done before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import median
from typing import Final

from vllm_locust.capacity.knee import CurvePoint, Knee, find_knee
from vllm_locust.capacity.model import CapacityPosterior, capacity_posterior
from vllm_locust.capacity.probe import Probe, ProbeResult
from vllm_locust.load_profile import Quantity

TAIL: Final = 0.025
SURE: Final = 0.95
HEAD_ROOM: Final = 0.2
"""At 80 % of the capacity a load that is a quarter higher than planned still meets the SLOs."""
STEP: Final = 2.0
MIN_WINDOW_S: Final = 5.0
NEAR: Final = 0.15
"""Probes whose log load is so near to the capacity's tell of its place."""
ROUGH: Final = 5
"""While the interval is so many times wider than asked for, the first half of the probes are short: the time is worth
more at a better place.
"""
SAME_LOAD: Final = 1e-6
CLEAR: Final = 0.5
"""A hold with so much at most of what may lie beyond a limit is clear."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacitySettings:
    quantity: Quantity
    start_load: float
    min_load: float
    max_load: float | None = None
    precision: float = 0.05
    """Width of the interval, relative to the capacity, that is narrow enough."""
    max_probes: int = 10
    budget_s: float = 1200.0
    probe_s: float | None = None
    """Shortest window; by default a thirtieth of the budget."""
    min_requests: int = 200
    """A window is long enough for so many, if the budget allows it."""
    settle_s: float = 10.0

    def __post_init__(self) -> None:
        faults = [
            f"{name} is {value:g}; it must be above 0"
            for name in ("start_load", "min_load", "precision", "max_probes", "budget_s", "settle_s")
            if not (value := getattr(self, name)) > 0
        ]
        highest = math.inf if self.max_load is None else self.max_load
        if not faults and not self.min_load <= self.start_load <= highest:
            faults.append(
                f"start_load {self.start_load:g} is outside of {self.min_load:g} to {highest:g}; start in between"
            )
        if faults:
            raise ValueError("\n".join(faults))

    @property
    def shortest_window_s(self) -> float:
        return max(MIN_WINDOW_S, self.budget_s / 30 if self.probe_s is None else self.probe_s)


class Status(StrEnum):
    FOUND = "found"
    """The interval is as narrow as was asked for."""
    IMPRECISE = "imprecise"
    """Probes or time were used up before."""
    BELOW_MINIMUM = "below_minimum"
    ABOVE_MAXIMUM = "above_maximum"
    UNKNOWN = "unknown"
    """No probe held, none missed, or nothing could be judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What is not known is None. ``why`` is one sentence; ``notes`` are what does not fit together."""

    status: Status
    why: str
    load: float | None
    low: float | None
    high: float | None
    limiting_slo: str | None
    held_load: float | None
    """The highest load at which a probe met every SLO."""
    missed_load: float | None
    """The lowest at which one did not."""
    knee: Knee | None
    operating_load: float | None
    operating_why: str | None
    notes: tuple[str, ...]


class CapacitySearch:
    """``next_probe`` and ``add`` in turn, until there is no next probe."""

    def __init__(
        self, settings: CapacitySettings, probes: Sequence[ProbeResult] = (), *, lost_s: Sequence[float] = ()
    ) -> None:
        """``lost_s`` are the times that probes took which do not count."""
        self.settings = settings
        self.probes = list(probes)
        self._lost_s = list(lost_s)
        self._posterior: CapacityPosterior | None = None

    def add(self, result: ProbeResult) -> None:
        self.probes.append(result)
        self._posterior = None

    def next_probe(self) -> Probe | None:
        """None when the search is over; ``result`` says why."""
        if self._ending() is not None:
            return None
        load, why = self._next_load()
        return Probe(
            load=load,
            settle_s=self.settings.settle_s,
            window_s=self._window_s(load),
            empty_first=bool(self.probes) and self.probes[-1].held is False and load < self.probes[-1].load,
            why=why,
        )

    def result(self, given_up: str | None = None) -> Capacity:
        """Also in the midst of a search: what is known so far. ``given_up`` says why it does not go on there."""
        status, why = self._ending() or (Status.IMPRECISE, given_up or "The search was stopped before its end.")
        if status is Status.IMPRECISE and not (self._held and self._missed):
            status, why = Status.UNKNOWN, f"{why} {self._unbracketed()}"
        load, low, high = self._interval(status)
        knee = find_knee(_curve(self.probes))
        operating = _operating_point(low, knee, self.settings.quantity)
        return Capacity(
            status=status,
            why=why,
            load=load,
            low=low,
            high=high,
            limiting_slo=self._known.limiting_slo if load is not None else None,
            held_load=max(self._held, default=None),
            missed_load=min(self._missed, default=None),
            knee=knee,
            operating_load=None if operating is None else operating[0],
            operating_why=None if operating is None else operating[1],
            notes=self._notes(),
        )

    @property
    def _held(self) -> list[float]:
        return [probe.load for probe in self.probes if probe.held is True]

    @property
    def _missed(self) -> list[float]:
        return [probe.load for probe in self.probes if probe.held is False]

    @property
    def _known(self) -> CapacityPosterior:
        if self._posterior is None:
            self._posterior = capacity_posterior(self.probes)
        return self._posterior

    def _ending(self) -> tuple[Status, str] | None:
        if self.probes and self.probes[-1].held is None:
            return Status.UNKNOWN, f"Nothing was measured at {self.probes[-1].load:g} that decides an SLO."
        used_up = self._used_up()
        found = self._outside(at_the_end=used_up is not None)
        if found is None and self._held and self._missed:
            found = self._narrow_enough()
        if found is None and used_up is not None:
            found = Status.IMPRECISE, used_up
        return found

    @property
    def _made(self) -> int:
        return len(self.probes) + len(self._lost_s)

    def _used_up(self) -> str | None:
        if self._made >= self.settings.max_probes:
            return f"All {self.settings.max_probes} probes were used up."
        if self._made and self._time_left_s() < self._overhead_s() + MIN_WINDOW_S:
            return f"The budget of {self.settings.budget_s:g} s was used up."
        return None

    def _outside(self, *, at_the_end: bool) -> tuple[Status, str] | None:
        lowest, highest = self.settings.min_load, self.settings.max_load
        if self._is_at(self._missed, lowest) and self._known.probability_above(lowest) < 1 - SURE:
            return Status.BELOW_MINIMUM, f"Already at the lowest load, {lowest:g}, an SLO is missed."
        if highest is not None and self._is_above(highest, at_the_end=at_the_end):
            return Status.ABOVE_MAXIMUM, f"Also at the highest load allowed, {highest:g}, every SLO is met."
        return None

    def _is_above(self, highest: float, *, at_the_end: bool) -> bool:
        """Where no probe missed one clear hold is enough: a short probe of a low load has few requests, and as many
        such probes say no more than the first.
        """
        there = [probe for probe in self.probes if probe.held and self._is_at([probe.load], highest)]
        if not there:
            return False
        if not self._missed and (at_the_end or any(_is_clear(probe) for probe in there)):
            return True
        return self._known.probability_above(highest) > SURE

    @staticmethod
    def _is_at(loads: Sequence[float], load: float) -> bool:
        return any(abs(one / load - 1) < SAME_LOAD for one in loads)

    def _narrow_enough(self) -> tuple[Status, str] | None:
        low, load, high = (self._known.quantile(q) for q in (TAIL, 0.5, 1 - TAIL))
        asked = self.settings.precision * load
        if self.settings.quantity is Quantity.USERS:
            asked = max(asked, 1.0)
        if high - low > asked:
            return None
        return Status.FOUND, f"The interval is {(high - low) / load * 100:.1f} % wide."

    def _next_load(self) -> tuple[float, str]:
        held, missed = self._held, self._missed
        if not self.probes:
            return self.settings.start_load, "the load to start with"
        if not held:
            return self._allowed(self._lower(min(missed))), "none has held yet"
        if not missed:
            return self._allowed(max(held) * STEP), "none has missed yet"
        contradiction = self._contradiction()
        if contradiction is not None:
            return self._allowed(
                math.sqrt(math.prod(contradiction))
            ), "between a probe that missed and one above it that held"
        return self._allowed(self._between(max(held))), "the median of what is known of the capacity"

    def _lower(self, missed: float) -> float:
        """What a flooded server still completes is close above what it can take."""
        completed = self._flooded_rps(missed)
        return missed / STEP if completed is None else min(max(0.75 * completed, missed / STEP**3), missed / 1.25)

    def _between(self, held: float) -> float:
        middle = self._known.quantile(0.5)
        completed = self._flooded_rps(min(self._missed))
        if completed is not None and held * 1.02 < 0.9 * completed < middle:
            return 0.9 * completed
        return middle

    def _flooded_rps(self, load: float) -> float | None:
        if self.settings.quantity is not Quantity.RATE:
            return None
        completed = [p.completed_rps for p in self.probes if p.load == load and p.completed_rps is not None]
        return max((rps for rps in completed if rps < 0.95 * load), default=None)

    def _contradiction(self) -> tuple[float, float] | None:
        """The widest gap between a probe that missed and the next one above, which held."""
        tried = sorted((probe.load, probe.held) for probe in self.probes if probe.held is not None)
        gaps = [(m, h) for (m, low), (h, high) in pairwise(tried) if not low and high]
        widest = max(gaps, key=lambda gap: gap[1] / gap[0], default=None)
        return widest if widest is not None and widest[1] > widest[0] * (1 + self.settings.precision) else None

    def _allowed(self, load: float) -> float:
        """Within the limits, and a number that is easy to read: four digits, or whole users."""
        load = float(f"{load:.4g}") if self.settings.quantity is Quantity.RATE else max(1.0, round(load))
        return min(max(load, self.settings.min_load), self.settings.max_load or math.inf)

    def _window_s(self, load: float) -> float:
        shortest = max(self.settings.shortest_window_s, self._requests_take_s(self.settings.min_requests, load))
        probes_left = self.settings.max_probes - self._made
        share_s = self._time_left_s() / probes_left - self._overhead_s()
        if not (self._held and self._missed):
            window_s = min(shortest, max(share_s, MIN_WINDOW_S))
        elif probes_left > self.settings.max_probes / 2 and self._is_rough():
            window_s = min(2 * shortest, max(share_s, MIN_WINDOW_S))
        else:
            window_s = min(max(share_s, shortest), max(shortest, self._needed_s(load)))
        return max(MIN_WINDOW_S, min(window_s, self._time_left_s() - self._overhead_s()))

    def _is_rough(self) -> bool:
        return self._known.quantile(1 - TAIL) > self._known.quantile(TAIL) * (1 + ROUGH * self.settings.precision)

    def _requests_take_s(self, requests: float, load: float) -> float:
        per_load = 1.0
        if self.settings.quantity is Quantity.USERS:
            rates = [p.completed_rps / p.load for p in self.probes if p.completed_rps]
            if not rates:
                return 0.0
            per_load = median(rates)
        return requests / (load * per_load)

    def _needed_s(self, load: float) -> float:
        """For the precision asked for, if the interval shrinks with the root of the requests near the capacity."""
        near = sum(p.requests for p in self.probes if abs(math.log(p.load / load)) < NEAR)
        low, high = self._known.quantile(TAIL), self._known.quantile(1 - TAIL)
        if not near:
            return math.inf
        missing = ((high - low) / (self.settings.precision * load)) ** 2 - 1
        return self._requests_take_s(1.2 * near * max(missing, 0.1), load)

    def _time_left_s(self) -> float:
        return self.settings.budget_s - sum(self._lost_s) - sum(probe.elapsed_s for probe in self.probes)

    def _overhead_s(self) -> float:
        """Of a probe, beside its window."""
        return median([self.settings.settle_s, *(probe.elapsed_s - probe.window_s for probe in self.probes)])

    def _unbracketed(self) -> str:
        if self._held:
            return f"Every probe up to {max(self._held):g} met the SLOs."
        if self._missed:
            return f"Every probe down to {min(self._missed):g} missed an SLO."
        if self._lost_s:
            made = len(self._lost_s)
            return "The one probe does not count." if made == 1 else f"None of the {made} probes counts."
        return "No probe was finished."

    def _interval(self, status: Status) -> tuple[float | None, float | None, float | None]:
        if status is Status.BELOW_MINIMUM:
            return None, None, self.settings.min_load
        if status is Status.ABOVE_MAXIMUM:
            return None, self.settings.max_load, None
        if status is Status.UNKNOWN:
            return None, None, None
        return self._known.quantile(0.5), self._known.quantile(TAIL), self._known.quantile(1 - TAIL)

    def _notes(self) -> tuple[str, ...]:
        contradiction = self._contradiction()
        if contradiction is None:
            return ()
        missed, held = contradiction
        return (f"The probe at {held:g} met the SLOs although the one at {missed:g} had not; both count.",)


def _is_clear(probe: ProbeResult) -> bool:
    return all(slo.share <= CLEAR * slo.allowed for slo in probe.slos if sum(slo.samples))


def _curve(probes: Sequence[ProbeResult]) -> list[CurvePoint]:
    return [
        CurvePoint(probe.load, probe.completed_rps, probe.latency_s)
        for probe in probes
        if probe.completed_rps is not None and probe.latency_s is not None
    ]


def _operating_point(low: float | None, knee: Knee | None, quantity: Quantity) -> tuple[float, str] | None:
    """From the lower end of the interval: that much has been shown."""
    if low is None:
        return None
    load, why = low * (1 - HEAD_ROOM), f"{100 * (1 - HEAD_ROOM):.0f} % of what the server takes for sure"
    if knee is not None and knee.load < load:
        load, why = knee.load, "the knee, above which latency grows faster than throughput"
    return (float(math.floor(load)) if quantity is Quantity.USERS else load), why
