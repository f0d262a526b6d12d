"""Load and goodput over the time of the window, in slices that never reach over the border of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from vllm_locust.phases import belonging_time, interval_index
from vllm_locust.report.arrivals import ArrivalCounts
from vllm_locust.report.columns import Floats, RequestColumns
from vllm_locust.report.request_times import RequestTimes
from vllm_locust.report.run_facts import Interval, RunFacts
from vllm_locust.slo import SloKind, judge_requests

SLICES: Final = 20
"""Of the window as a whole; a stage has at least one."""
_RATES: Final = ("achieved_rps", "requests_per_s", "output_tokens_per_s")


class OverTime:
    """Columns of equal length, one value for each slice."""

    def __init__(self, facts: RunFacts) -> None:
        self._slices = _slices([stage.interval for stage in facts.stages if stage.interval is not None])
        self._starts = [one.start_unix_ns for one in self._slices]
        self._ends = [one.end_unix_ns for one in self._slices]
        self._slos = [slo for slo in facts.slos if slo.kind is SloKind.REQUEST]
        self._arrivals = ArrivalCounts(self._slices)
        self._good, self._decided = np.zeros((2, len(self._slices)))

    def add(self, columns: RequestColumns) -> None:
        self._arrivals.add(columns)
        if not self._slos or not self._slices:
            return
        good, decided = judge_requests(self._slos, columns.ok, columns.slo_values_ns())
        due = belonging_time(
            columns.ints("scheduled_unix_ns"), columns.known("scheduled_unix_ns"), columns.ints("sent_unix_ns")
        )
        index, inside = interval_index(due, self._starts, self._ends)
        for counts, which in ((self._good, good), (self._decided, decided)):
            counts += np.bincount(index[inside & which], minlength=len(self._slices))

    def as_json(self, times: RequestTimes) -> dict[str, list[float | None]] | None:
        """``start_s`` counts from the start of the window. None where there was no window."""
        if not self._slices:
            return None
        lengths = [one.length_s for one in self._slices]
        rates = [self._arrivals.rates(position) for position in range(len(self._slices))]
        in_flight = [
            float(times.in_flight_means(np.array([start, end]))[0])
            for start, end in zip(self._starts, self._ends, strict=True)
        ]
        return {
            "start_s": [(start - self._starts[0]) / 1e9 for start in self._starts],
            "length_s": list(lengths),
            **{name: [rate[name] for rate in rates] for name in _RATES},
            "goodput_rps": self._known([good / s for good, s in zip(self._good.tolist(), lengths, strict=True)]),
            "good_fraction": self._known(_fractions(self._good, self._decided)),
            "in_flight": list(in_flight),
        }

    def _known(self, values: Sequence[float | None]) -> list[float | None]:
        return list(values) if self._slos else [None] * len(values)


def _slices(stages: Sequence[Interval]) -> list[Interval]:
    whole_ns = sum(stage.end_unix_ns - stage.start_unix_ns for stage in stages)
    slices = []
    for stage in stages:
        length_ns = stage.end_unix_ns - stage.start_unix_ns
        count = max(1, round(SLICES * length_ns / whole_ns)) if length_ns else 0
        edges = [stage.start_unix_ns + length_ns * edge // count for edge in range(count + 1)] if count else []
        slices += [Interval(start_unix_ns=a, end_unix_ns=b) for a, b in pairwise(edges) if a < b]
    return slices


def _fractions(good: Floats, decided: Floats) -> list[float | None]:
    return [g / d if d else None for g, d in zip(good.tolist(), decided.tolist(), strict=True)]
