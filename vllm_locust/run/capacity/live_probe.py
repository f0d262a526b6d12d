"""One probe of the capacity search while it runs, by what the workers tell of it: histograms and counters.

The merge judges it again by every request; until then this decides where the next probe is put.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean
from typing import Final

import numpy as np

from vllm_locust.aggregate import RunAggregate
from vllm_locust.capacity.probe import BATCHES, ProbeResult, SloCount, allowed_share
from vllm_locust.metrics import CATALOGUE, Per
from vllm_locust.outcome import Outcome
from vllm_locust.overload import Overload
from vllm_locust.run.capacity.generator_watch import GeneratorWatch
from vllm_locust.run.capacity.server_watch import ServerWatch
from vllm_locust.slo import Slo, SloKind
from vllm_locust.statistics import PERCENTILES, nearest_rank

SURELY_MISSED: Final = 3
"""So many times as many beyond a limit as are allowed in the whole probe are a miss, whatever is still to come."""
FEW: Final = 5
"""So many samples beyond a limit may be chance."""
FROM_SCHEDULE: Final = ("ttft_from_schedule", "schedule_lag")
"""Metrics that have the wait for a slot in them."""


@dataclass(frozen=True, slots=True)
class _Look:
    at_s: float
    in_flight: int
    """At the server or waiting for a slot."""
    finished: int
    waiting: float | None


class LiveProbe:
    """``look`` is fed about once a second from the window's start until all of its requests have ended."""

    def __init__(self, load: float, slos: Sequence[Slo], *, open_loop: bool) -> None:
        self.load = load
        self.generator = GeneratorWatch()
        self.overload: str | None = None
        self.slots_full = False
        """Whether there was an arrival without a free slot before the server was seen to be overloaded."""
        self.server = ServerWatch()
        self._slos = [slo for slo in slos if slo.kind is SloKind.STAGE]
        self._good_has_waits = any(slo.metric in FROM_SCHEDULE for slo in slos if slo.kind is SloKind.REQUEST)
        self._detector = Overload() if open_loop else None
        self._looks: list[_Look] = []
        self._counts: list[list[tuple[int, int]]] = []

    def look(
        self, at_s: float, stage: RunAggregate, everything: RunAggregate, waiting: float | None, *, in_window: bool
    ) -> None:
        """``stage`` has the probe's requests, ``everything`` all; ``waiting`` are those that wait on the server."""
        self._counts.append([_count(slo, stage) for slo in self._slos])
        self.server.look(at_s, everything)
        if self.overload is None and (everything.waiting_arrivals or stage.dropped_arrivals):
            self.slots_full = True
        if not in_window:
            return
        in_flight = everything.in_flight + everything.waiting_arrivals
        finished = sum(everything.finished.values())
        self._looks.append(_Look(at_s, in_flight, finished, waiting))
        if self._detector is not None and not self.is_over:
            arrived = everything.sent + everything.waiting_arrivals + everything.dropped_arrivals
            queued = None if waiting is None else round(waiting)
            self.overload = self._detector.feed(at_s, in_flight, finished, arrived, queued)

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be learned from it."""
        return self.overload is not None or self.slots_full or self.server.gone is not None

    def surely_missed(self, requests: int) -> bool:
        """Whether so many of the probe's ``requests`` are beyond a limit already that the rest cannot mend it."""
        if not self._counts:
            return False
        return any(
            beyond > SURELY_MISSED * allowed_share(slo) * requests
            for slo, (beyond, _) in zip(self._slos, self._counts[-1], strict=True)
            if _one_each(slo)
        )

    def judge_full_slots(self, stage: RunAggregate) -> None:
        """Full slots keep load from the server. Where those that were sent are too slow all the same, counted from when
        they were sent, the whole load is too much for it.
        """
        if not self.slots_full or self.overload is not None:
            return
        for slo in self._slos:
            beyond, samples = _count(slo, stage)
            if beyond > max(FEW, SURELY_MISSED * allowed_share(slo) * samples) and not self._has_waits(slo):
                self.slots_full = False
                self.overload = (
                    f"every slot was busy, and of the requests that had one {100 * beyond / samples:.3g} % missed "
                    f"{slo.text}"
                )
                return

    def _has_waits(self, slo: Slo) -> bool:
        return slo.metric in FROM_SCHEDULE or (slo.metric == "good_fraction" and self._good_has_waits)

    def fault(self, stage: RunAggregate, due: int | None, unfinished: int, *, worker_gone: bool = True) -> str | None:
        """Why it says nothing of what the server can take. ``unfinished`` arrivals are in flight, or without a slot, at
        workers that are there.
        """
        known = sum(stage.finished.values()) + stage.dropped_arrivals + unfinished
        if due is not None and known < due:
            if worker_gone:
                return f"{due - known} of its arrivals are lost: a worker has gone"
            return (
                f"no worker has told of {due - known} of its arrivals: they have too much to do; add workers, or give "
                "a lower --start-load"
            )
        gone = self.server.fault(stage)
        if gone is not None:
            return gone
        if self.slots_full:
            dropped = f", and {stage.dropped_arrivals} arrivals were dropped" if stage.dropped_arrivals else ""
            return f"every slot was busy{dropped}; raise -u"
        return self.generator.disturbance(stage, self._slos)

    def result(
        self, stage: RunAggregate, *, window_s: float, elapsed_s: float, due: int | None, ended_early: bool
    ) -> ProbeResult:
        """``due`` arrivals were planned for the window; those without an answer by now count as missed."""
        finished = sum(stage.finished.values())
        missing = stage.in_flight if due is None else max(0, due - finished)
        e2e_ns = stage.histograms["e2e"].quantile(Fraction(1, 2))
        waiting = [look.waiting for look in self._looks if look.waiting is not None]
        return ProbeResult(
            load=self.load,
            achieved=self.load if due is None else stage.sent / window_s,
            window_s=window_s,
            elapsed_s=elapsed_s,
            requests=finished + missing,
            completed_rps=self._completed_rps(),
            latency_s=None if e2e_ns is None else e2e_ns / 1e9,
            slos=tuple(self._slo_count(i, slo, stage, missing) for i, slo in enumerate(self._slos)),
            overloaded=self.overload,
            ended_early=self.overload if ended_early else None,
            figures={
                "output_tokens_per_s": stage.output_tokens / window_s,
                "goodput_rps": stage.good / window_s if stage.good + stage.not_good else None,
                "in_flight": fmean(look.in_flight for look in self._looks) if self._looks else None,
                "requests_waiting": fmean(waiting) if waiting else None,
                "gpu_utilization": None,
            },
        )

    def _completed_rps(self) -> float | None:
        if len(self._looks) < 2:
            return None
        first, last = self._looks[0], self._looks[-1]
        return (last.finished - first.finished) / (last.at_s - first.at_s)

    def _slo_count(self, index: int, slo: Slo, stage: RunAggregate, missing: int) -> SloCount:
        steps = np.array([(0, 0), *(counts[index] for counts in self._counts), _count(slo, stage)], dtype=np.int64)
        beyond, samples = steps[:, 0], steps[:, 1]
        edges = np.searchsorted(samples, samples[-1] * np.arange(1, BATCHES + 1) / BATCHES)
        cuts = np.unique(np.concatenate(([0], edges)))
        parts = list(zip(np.diff(beyond[cuts]).tolist(), np.diff(samples[cuts]).tolist(), strict=True))
        if missing:
            each = missing * _samples_per_request(slo, stage)
            parts.append((each, each))
        return SloCount(
            slo=slo.text,
            allowed=allowed_share(slo),
            beyond=tuple(part[0] for part in parts),
            samples=tuple(part[1] for part in parts),
            value=_value(slo, stage, missing),
            limit=slo.limit / 1e9 if slo.is_duration else slo.limit,
        )


def _failed(stage: RunAggregate) -> int:
    return sum(stage.finished.values()) - stage.finished.get(Outcome.OK, 0)


def _one_each(slo: Slo) -> bool:
    """Whether each request is one sample."""
    return slo.percentile is None or CATALOGUE[slo.metric].per is Per.REQUEST


def _samples_per_request(slo: Slo, stage: RunAggregate) -> int:
    """A failed request stands for as many as an ok one has on average."""
    if _one_each(slo):
        return 1
    ok = stage.finished.get(Outcome.OK, 0)
    return round(stage.histograms[slo.metric].n / ok) if ok else 1


def _count(slo: Slo, stage: RunAggregate) -> tuple[int, int]:
    """How many samples of the requests that have ended are beyond the limit, and of how many."""
    if slo.metric == "good_fraction":
        return stage.not_good, stage.good + stage.not_good
    failed = _failed(stage)
    if slo.percentile is None:
        return failed, sum(stage.finished.values())
    histogram = stage.histograms[slo.metric]
    n = histogram.n
    if not n and stage.finished.get(Outcome.OK, 0):
        return 0, 0
    failed *= _samples_per_request(slo, stage)
    return histogram.above(slo.limit) + failed, n + failed


def _value(slo: Slo, stage: RunAggregate, missing: int) -> float | None:
    if slo.percentile is None:
        beyond, samples = _count(slo, stage)
        share = (beyond + missing) / (samples + missing) if samples + missing else None
        return share if share is None or not slo.at_least else 1 - share
    histogram = stage.histograms[slo.metric]
    slower = (_failed(stage) + missing) * _samples_per_request(slo, stage)
    if not histogram.n + slower:
        return None
    rank = nearest_rank(histogram.n + slower, PERCENTILES[slo.percentile])
    value_ns = histogram.quantile(Fraction(rank, histogram.n)) if rank <= histogram.n else None
    return None if value_ns is None else value_ns / 1e9
