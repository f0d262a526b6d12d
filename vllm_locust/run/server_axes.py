"""The clocks of the Redis servers that a run has used, one after the other, put on the first one's.

A Redis that was restarted elsewhere, or failed over, may have another clock than the one before. The run's axis is the
first one's, by which its schedule and its window were made. How far the next one is ahead is what the workers that
measured both saw: their distance from it less their distance from the one before, drawn on along each one's own drift.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from statistics import median_low
from typing import Final, Self

from vllm_locust.store.clock_offset import ClockOffset

_DRIFT_NS: Final = 10_000_000_000
"""Measurements that lie closer together say nothing of a drift."""
_UNKNOWN_DRIFT: Final = 100e-6


@dataclass(frozen=True, slots=True)
class ServerAxes:
    ahead_ns: Mapping[str, int]
    """By the server's ``run_id``. One that no worker could compare with another is taken to have the same clock."""

    @classmethod
    def of(cls, sources: Iterable[Sequence[ClockOffset]]) -> Self:
        """From each worker's measurements, in the order in which they were made."""
        spells = [_spells(source) for source in sources if source]
        steps: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        for one in spells:
            for before, after in pairwise(one):
                steps[before[0].redis_run_id, after[0].redis_run_id].append(_step(before, after[0]))
        ahead = {_first(spells): 0} if spells else {}
        while new := {
            after: ahead[before] + _believed(seen)
            for (before, after), seen in steps.items()
            if before in ahead and after not in ahead
        }:
            ahead |= new
        return cls(ahead)

    def moved(self, measured: ClockOffset) -> ClockOffset:
        """The measurement as the first server would have given it."""
        return replace(measured, offset_ns=measured.offset_ns - self.ahead_ns.get(measured.redis_run_id, 0))


def _spells(source: Sequence[ClockOffset]) -> list[list[ClockOffset]]:
    return [list(spell) for _, spell in groupby(source, key=lambda one: one.redis_run_id)]


def _first(spells: Sequence[Sequence[Sequence[ClockOffset]]]) -> str:
    later = {spell[0].redis_run_id for one in spells for spell in one[1:]}
    firsts = Counter(one[0][0].redis_run_id for one in spells)
    return max(firsts, key=lambda run_id: (run_id not in later, firsts[run_id]))


def _step(before: Sequence[ClockOffset], after: ClockOffset) -> tuple[int, int]:
    """How far the next server is ahead of the one before, and how sure that is."""
    first, last = before[0], before[-1]
    span_ns = last.measured_monotonic_ns - first.measured_monotonic_ns
    since_ns = after.measured_monotonic_ns - last.measured_monotonic_ns
    doubt_ns = last.uncertainty_ns + after.uncertainty_ns
    if span_ns < _DRIFT_NS:
        return after.offset_ns - last.offset_ns, doubt_ns + round(since_ns * _UNKNOWN_DRIFT)
    drawn_on_ns = last.offset_ns + round((last.offset_ns - first.offset_ns) / span_ns * since_ns)
    return after.offset_ns - drawn_on_ns, doubt_ns + round(doubt_ns / span_ns * since_ns)


def _believed(seen: Sequence[tuple[int, int]]) -> int:
    """A step within its own doubt is none."""
    step_ns = median_low([step for step, _ in seen])
    return step_ns if abs(step_ns) > median_low([doubt for _, doubt in seen]) else 0
