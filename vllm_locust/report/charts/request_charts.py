"""What ``requests.parquet`` gives to the pictures: a pass of its own, once the extent of the run is known."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np

from vllm_locust.outcome import Outcome
from vllm_locust.report.arrivals import ArrivalCounts
from vllm_locust.report.charts.bins import TimeBins, binned_percentiles, crowded_bins, numbers, short, thinned
from vllm_locust.report.charts.gap_map import GapMap
from vllm_locust.report.columns import Floats, Ints, RequestColumns, Source, read_batches
from vllm_locust.report.request_times import RequestTimes

SHOWN: Final = {"p50": Fraction(1, 2), "p90": Fraction(9, 10), "p99": Fraction(99, 100), "max": Fraction(1)}
POINTS: Final = 1500
SLOWEST: Final = 150
LENGTH_BINS: Final = 40
FEWEST: Final = 20
"""Requests in a bin of lengths, on average."""
_LATENCIES: Final = ("ttft", "ttft_from_schedule", "e2e")
_LENGTHS: Final = {"prompt_tokens": "ttft", "output_tokens": "e2e"}
"""What is drawn against each length: the prompt decides the first token, the answer the last."""


class RequestCharts:
    def __init__(self, source: Source, bins: TimeBins, gap_metric: str) -> None:
        self._bins = bins
        self._gap_metric = gap_metric
        self._arrivals = ArrivalCounts(bins.intervals)
        self._gaps = GapMap(bins)
        self._failures: dict[str, Ints] = {}
        self._parts: dict[str, list[Floats]] = {name: [] for name in (*_LATENCIES, *_LENGTHS)}
        self._sent_parts: list[Ints] = []
        for batch in read_batches(source):
            self._add(RequestColumns(batch))
        order = np.argsort(sent := np.concatenate([np.empty(0, np.int64), *self._sent_parts]), kind="stable")
        self._sent = sent[order]
        self._values = {name: np.concatenate([np.empty(0), *parts])[order] for name, parts in self._parts.items()}

    def _add(self, columns: RequestColumns) -> None:
        self._arrivals.add(columns)
        sent, ok = columns.ints("sent_unix_ns"), columns.ok
        gaps = columns.itl_gaps(ok) if self._gap_metric == "itl" else columns.chunk_gaps(ok)
        self._gaps.add(gaps, sent)
        self._sent_parts.append(sent[ok])
        for name in _LATENCIES:
            self._parts[name].append(columns.metric_ns(name)[ok] / 1e9)
        for name in _LENGTHS:
            self._parts[name].append(columns.floats(name)[ok])
        if not ok.all():
            outcomes = np.array(columns.texts("outcome"))
            for outcome in sorted({str(one) for one in outcomes[~ok]} - {Outcome.OK}):
                ended = (sent + columns.ended_ns)[outcomes == outcome]
                self._failures[outcome] = self._failures.get(outcome, 0) + self._bins.counts(ended)

    def load_json(self, times: RequestTimes) -> dict[str, Any]:
        """Per second, in each bin; ``offered_rps`` only where there was a plan."""
        rates = [self._arrivals.rates(position) for position in range(self._bins.count)]
        names = ("achieved_rps", "requests_per_s", "output_tokens_per_s", "input_tokens_per_s")
        planned = times.planned_unix_ns
        offered = self._bins.counts(planned) * (1e9 / self._bins.step_ns)
        return {
            "offered_rps": numbers(offered) if len(planned) else None,
            **{name: numbers([rate[name] for rate in rates]) for name in names},
            "in_flight": numbers(times.in_flight_means(self._bins.edges)),
        }

    def failures_json(self) -> dict[str, list[int]]:
        """By outcome, how many ended in each bin."""
        return {outcome: counts.tolist() for outcome, counts in sorted(self._failures.items())}

    def gap_map_json(self) -> dict[str, Any] | None:
        return self._gaps.as_json(self._gap_metric)

    def latency_json(self) -> dict[str, Any]:
        """Of ok requests, by when they were sent: exact percentiles in each bin, and some requests as they are."""
        return {name: self._over_time(self._values[name]) for name in _LATENCIES}

    def _over_time(self, values: Floats) -> dict[str, Any] | None:
        known = ~np.isnan(values)
        sent, values = self._sent[known], values[known]
        if not len(values):
            return None
        index, inside = self._bins.index(sent)
        percentiles = binned_percentiles(index[inside], values[inside], self._bins.count, tuple(SHOWN.values()))
        return {
            "shown": {name: numbers(column) for name, column in zip(SHOWN, percentiles, strict=True)},
            "points": _points((sent - self._bins.start_unix_ns) / 1e9, values),
        }

    def lengths_json(self) -> dict[str, Any]:
        return {name: self._against(name, metric) for name, metric in _LENGTHS.items()}

    def _against(self, length: str, metric: str) -> dict[str, Any] | None:
        lengths, values = self._values[length], self._values[metric]
        known = ~np.isnan(lengths) & ~np.isnan(values) & (lengths >= 1)
        lengths, values = lengths[known], values[known]
        if not len(values):
            return None
        index, count = crowded_bins(lengths, min(LENGTH_BINS, len(lengths) // FEWEST))
        percentiles = binned_percentiles(index, values, count, tuple(SHOWN.values()))
        (middles,) = binned_percentiles(index, lengths, count, (SHOWN["p50"],))
        return {
            "metric": metric,
            "lengths": numbers(middles),
            "shown": {name: numbers(column) for name, column in zip(SHOWN, percentiles, strict=True)},
            "points": _points(lengths, values),
        }


def _points(places: Floats, values: Floats) -> list[Sequence[float]]:
    rows = thinned(values, POINTS, SLOWEST)
    return [[short(x), short(y)] for x, y in zip(places[rows].tolist(), values[rows].tolist(), strict=True)]
