"""The sequences of one run that a comparison looks at, from ``requests.parquet``.

Durations in seconds. A failed request is slower than everything: in a percentile it is infinite, and among the gaps it
stands for as many as an ok request has on average. Means are of ok requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from vllm_locust.comparison.quantity import DISTRIBUTIONS, POOLED
from vllm_locust.comparison.series import Samples, StageSeries, Totals
from vllm_locust.phases import Phase
from vllm_locust.report.arrivals import ArrivalCounts
from vllm_locust.report.columns import Flags, Floats, Gaps, Ints, RequestColumns, Source, read_batches
from vllm_locust.report.run_facts import Interval, RunFacts
from vllm_locust.slo import Slo, SloKind, judge_requests

PIECES: Final = 1000
"""Of equal length, of each stage: what a rate is the mean over."""
_PER_REQUEST: Final = tuple(name for name in DISTRIBUTIONS if name not in POOLED)


class _Gathered:
    """The window's requests of one stage, in the order of the file."""

    def __init__(self) -> None:
        self.requests = 0
        self._columns: dict[str, list[Any]] = {}
        self._gaps: dict[str, list[_PooledPart]] = {name: [] for name in POOLED}

    def add(self, columns: RequestColumns, mine: Flags, slos: tuple[Slo, ...]) -> None:
        if not mine.any():
            return
        good, decided = judge_requests(slos, columns.ok, columns.slo_values_ns())
        found: dict[str, Any] = {name: columns.metric_ns(name) for name in _PER_REQUEST}
        sent = columns.ints("sent_unix_ns")
        scheduled = columns.known("scheduled_unix_ns")
        found |= {"ok": columns.ok, "streamed": columns.flags("streamed"), "good": good, "decided": decided}
        found["scheduled"] = scheduled
        found |= {"sent": sent, "due": np.where(scheduled, columns.ints("scheduled_unix_ns"), sent)}
        found["arrival"] = columns.ints("arrival", missing=-1) if columns.has("arrival") else np.full(columns.rows, -1)
        for name, column in found.items():
            self._columns.setdefault(name, []).append(column[mine])
        place = self.requests + np.cumsum(mine) - 1
        itl, chunk_gap = (
            _PooledPart.of(gaps(mine & columns.ok), place) for gaps in (columns.itl_gaps, columns.chunk_gaps)
        )
        self._gaps["itl"].append(itl)
        self._gaps["chunk_gap"].append(itl if chunk_gap.same_as(itl) else chunk_gap)
        self.requests += int(mine.sum())

    def series(
        self, interval: Interval, completed: Floats, output_tokens: Floats, slos: tuple[Slo, ...]
    ) -> StageSeries:
        columns: dict[str, Any] = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        arrivals = columns["arrival"]
        scheduled = bool((arrivals >= 0).all())
        order = np.argsort(arrivals if scheduled else columns["sent"], kind="stable")
        columns = {name: column[order] for name, column in columns.items()}
        samples = {name: one for name in _PER_REQUEST if (one := _per_request(name, columns)) is not None}
        same = all(one is other for one, other in zip(self._gaps["itl"], self._gaps["chunk_gap"], strict=True))
        if same:
            self._gaps["chunk_gap"] = []
        for name in POOLED:
            parts = self._gaps.pop(name)
            if same and samples.keys() & set(POOLED):
                samples[name] = next(samples[other] for other in POOLED if other in samples)
            elif (pooled := _pooled(parts, order, columns)) is not None:
                samples[name] = pooled
        length_s = np.full(PIECES, interval.length_s / PIECES)
        rates = {"requests_per_s": Totals(completed, length_s), "output_tokens_per_s": Totals(output_tokens, length_s)}
        shares = {"failed_fraction": Totals((~columns["ok"]).astype(np.float64), np.ones(self.requests))}
        if any(slo.kind is SloKind.REQUEST for slo in slos):
            good = columns["good"].astype(np.float64)
            shares["good_fraction"] = Totals(good, columns["decided"].astype(np.float64))
            rates["goodput_rps"] = Totals(_in_pieces(columns["due"], good, interval), length_s)
        return StageSeries(
            samples,
            rates | shares,
            columns["arrival"] if scheduled else None,
            frozenset(rates),
            completed=round(float(completed.sum())),
            length_s=interval.length_s,
        )


@dataclass(frozen=True, slots=True)
class _PooledPart:
    """Of one batch: each gap's request, seconds per token (or per gap), and its tokens where they are not all one."""

    owners: npt.NDArray[np.int32]
    values: Floats
    weights: Floats | None

    @classmethod
    def of(cls, gaps: Gaps, place: Ints) -> Self:
        owners = place[gaps.request].astype(np.int32)
        if gaps.tokens is None or bool((gaps.tokens == 1).all()):
            return cls(owners, gaps.gap_ns / 1e9, None)
        tokens = gaps.tokens.astype(np.float64)
        return cls(owners, gaps.gap_ns / tokens / 1e9, tokens)

    def same_as(self, other: Self) -> bool:
        return (
            self.weights is None
            and other.weights is None
            and np.array_equal(self.values, other.values)
            and np.array_equal(self.owners, other.owners)
        )


def _pooled(parts: list[_PooledPart], order: Ints, columns: Mapping[str, Any]) -> Samples | None:
    """``parts`` are emptied: they are most of what a run takes in memory."""
    failed = np.flatnonzero(~columns["ok"] & columns["streamed"])
    gaps = sum(len(part.values) for part in parts)
    if not gaps and (columns["ok"].any() or not len(failed)):
        return None
    position = np.empty(len(order), dtype=np.int32)
    position[order] = np.arange(len(order), dtype=np.int32)
    owners, values = np.empty(gaps + len(failed), np.int32), np.empty(gaps + len(failed))
    owners[gaps:], values[gaps:] = failed, np.inf
    whole = not len(failed) and all(part.weights is None for part in parts)
    weights = None if whole else np.ones(gaps + len(failed))
    filled = 0
    while parts:
        part = parts.pop(0)
        mine = slice(filled, filled := filled + len(part.values))
        owners[mine], values[mine] = position[part.owners], part.values
        if weights is not None and part.weights is not None:
            weights[mine] = part.weights
    if weights is not None:
        owning = int(np.count_nonzero(np.bincount(owners[:gaps], minlength=len(order))))
        weights[gaps:] = max(1, round(float(weights[:gaps].sum()) / max(1, owning)))
    return Samples(values, owners, len(order), weights)


def _per_request(name: str, columns: Mapping[str, Any]) -> Samples | None:
    """None where the metric does not apply to the stage: ok requests, and none of them has it; or no request at all."""
    ok, values = columns["ok"], columns[name] / 1e9
    if ok.any() and not (ok & ~np.isnan(values)).any():
        return None
    applies = np.ones(len(ok), dtype=np.bool_) if name == "e2e" else columns["streamed"]
    if name == "ttft_from_schedule":
        applies = applies & columns["scheduled"]
    if not (ok | applies).any():
        return None
    return Samples.one_each(np.where(ok, values, np.where(applies, np.inf, np.nan)))


def _in_pieces(due: Ints, good: Floats, interval: Interval) -> Floats:
    length_ns = interval.end_unix_ns - interval.start_unix_ns
    piece = np.minimum((due - interval.start_unix_ns) * PIECES // length_ns, PIECES - 1)
    return np.bincount(piece, weights=good, minlength=PIECES).astype(np.float64)


def _pieces(interval: Interval) -> list[Interval]:
    start, length = interval.start_unix_ns, interval.end_unix_ns - interval.start_unix_ns
    edges = [start + length * k // PIECES for k in range(PIECES + 1)]
    return [Interval(start_unix_ns=a, end_unix_ns=b) for a, b in pairwise(edges)]


def read_stage_series(run: Mapping[str, Any], requests: Source) -> dict[int, StageSeries]:
    """By the number of the stage; a stage without requests is missing. ``run`` is ``run.json``."""
    facts = RunFacts.from_run(run)
    intervals = {stage.index: stage.interval for stage in facts.stages if stage.interval is not None}
    counts = ArrivalCounts([piece for interval in intervals.values() for piece in _pieces(interval)])
    gathered = {index: _Gathered() for index in intervals}
    for batch in read_batches(requests):
        columns = RequestColumns(batch)
        counts.add(columns)
        in_window = columns.is_equal("phase", Phase.WINDOW) & columns.known("stage")
        stage = columns.ints("stage", missing=-1)
        for index, one in gathered.items():
            one.add(columns, in_window & (stage == index), facts.slos)
    found = {}
    for position, (index, interval) in enumerate(intervals.items()):
        pieces = slice(position * PIECES, (position + 1) * PIECES)
        if gathered[index].requests:
            found[index] = gathered[index].series(
                interval, counts.completed[pieces], counts.output_tokens[pieces], facts.slos
            )
    return found
