"""Probes of the capacity search against the server in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.simulation.offline_server import (
    Lengths,
    Load,
    OfflineServer,
    PoissonLoad,
    RecordedLengths,
    Served,
    UsersLoad,
)
from vllm_locust.capacity.probe import Probe, ProbeResult, SloCount, count_slo
from vllm_locust.capacity.search import CapacitySearch, CapacitySettings
from vllm_locust.load_profile import Quantity
from vllm_locust.overload import Overload
from vllm_locust.simserver.engine import EngineConfig
from vllm_locust.slo import Slo, SloKind, judge_requests, parse_slos

NS = 1_000_000_000
TAIL_NS = 60 * NS
"""The load goes on after a window until all its requests have ended, at most so long."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    config: EngineConfig
    lengths: Lengths | RecordedLengths
    slos: tuple[str, ...]
    capacity: float
    """From the study; see RESULTS.md."""
    quantity: Quantity = Quantity.RATE


class OfflineTarget:
    def __init__(self, case: Case, seed: int, *, detect: bool = True) -> None:
        self.case = case
        self._server = OfflineServer(case.config)
        self._rng = np.random.default_rng(seed)
        self._slos = parse_slos(case.slos)
        self._detect = detect

    def probe(self, probe: Probe) -> ProbeResult:
        server, start_ns = self._server, self._server.now_ns
        if probe.empty_first:
            server.run(Silence(), lambda _: False)
        settle_start_ns = server.now_ns
        load = self._load(probe.load)
        window_start_ns = settle_start_ns + round(probe.settle_s * NS)
        served = server.run(load, lambda now_ns: now_ns >= window_start_ns)
        completed = server.completed
        watch = _Watch(server, window_start_ns, window_start_ns + round(probe.window_s * NS), self._detects)
        served += server.run(load, watch)
        window_end_ns = server.now_ns
        window_s = (window_end_ns - window_start_ns) / NS
        completed = server.completed - completed
        judged = [one for one in served if window_start_ns <= one.arrived_ns < window_end_ns]
        if watch.overload is None:
            server.run(load, _AllEnded(judged, window_end_ns + TAIL_NS))
        else:
            server.run(Silence(), lambda _: False)
        e2e_ns = [one.last_ns - one.arrived_ns for one in judged if one.last_ns is not None]
        return ProbeResult(
            load=probe.load,
            achieved=probe.load if self.case.quantity is Quantity.USERS else len(judged) / window_s,
            window_s=window_s,
            elapsed_s=(server.now_ns - start_ns) / NS,
            requests=len(judged),
            completed_rps=completed / window_s,
            latency_s=float(np.median(e2e_ns)) / NS if e2e_ns else None,
            slos=tuple(count(slo, self._slos, judged) for slo in self._slos if slo.kind is SloKind.STAGE),
            overloaded=watch.overload,
            ended_early=watch.overload,
        )

    @property
    def _detects(self) -> bool:
        return self._detect and self.case.quantity is Quantity.RATE

    def _load(self, load: float) -> Load:
        lengths, server = self.case.lengths, self._server
        if self.case.quantity is Quantity.RATE:
            return PoissonLoad(self._rng, lengths, load, server.now_ns)
        return UsersLoad(self._rng, lengths, round(load), server.in_flight, server.now_ns)


class Silence(Load):
    next_ns = None


class _Watch:
    """Until the end of a window, or until the load is found to be too much."""

    def __init__(self, server: OfflineServer, start_ns: int, end_ns: int, detect: bool) -> None:
        self._server, self._start_ns, self._end_ns = server, start_ns, end_ns
        self._next_ns = start_ns if detect else end_ns
        self._detector = Overload()
        self.overload: str | None = None

    def __call__(self, now_ns: int) -> bool:
        while self._next_ns <= now_ns and self._next_ns < self._end_ns:
            server, elapsed_s = self._server, (self._next_ns - self._start_ns) / NS
            waiting = len(server.engine.waiting)
            self.overload = self._detector.feed(elapsed_s, server.in_flight, server.completed, server.arrived, waiting)
            self._next_ns += NS
            if self.overload is not None:
                return True
        return now_ns >= self._end_ns


class _AllEnded:
    def __init__(self, judged: Sequence[Served], limit_ns: int) -> None:
        self._open, self._limit_ns = list(judged), limit_ns

    def __call__(self, now_ns: int) -> bool:
        while self._open and self._open[-1].last_ns is not None:
            self._open.pop()
        return not self._open or now_ns >= self._limit_ns


def count(slo: Slo, slos: Sequence[Slo], served: Sequence[Served]) -> SloCount:
    ok = np.array([one.last_ns is not None for one in served], dtype=np.bool_)
    values = {name: _values(name, served) for name in ("ttft", "e2e", "tpot")}
    if slo.percentile is None:
        good, decided = judge_requests(slos, ok, values)
        return count_slo(slo, ~good[decided])
    adjusted = np.where(ok, values[slo.metric], np.inf)
    return count_slo(slo, adjusted[~np.isnan(adjusted)] > slo.limit)


def _values(metric: str, served: Sequence[Served]) -> npt.NDArray[np.float64]:
    return np.array([_value(metric, one) for one in served], dtype=np.float64)


def _value(metric: str, one: Served) -> float:
    if one.first_ns is None or one.last_ns is None:
        return np.nan
    if metric == "ttft":
        return one.first_ns - one.arrived_ns
    if metric == "e2e":
        return one.last_ns - one.arrived_ns
    return (one.last_ns - one.first_ns) / (one.output_tokens - 1) if one.output_tokens > 1 else np.nan


def run_search(case: Case, settings: CapacitySettings, seed: int) -> CapacitySearch:
    target, search = OfflineTarget(case, seed), CapacitySearch(settings)
    while (probe := search.next_probe()) is not None:
        search.add(target.probe(probe))
    return search
