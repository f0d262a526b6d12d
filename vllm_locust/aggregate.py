"""What one worker has seen so far, for live views: histograms and counters that merge exactly.

A worker sends the whole of it again and again, each time with a higher sequence number; ``Snapshots`` keeps the
newest of each worker and merges when read. So a message that is lost, late or repeated costs nothing.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt

from vllm_locust.core_time import CoreTime
from vllm_locust.histogram import LogHistogram, Tally
from vllm_locust.outcome import Outcome
from vllm_locust.timing import tpot_ns

SCHEMA: Final = 3
HISTOGRAMS: Final = (
    *("ttft", "ttft_from_schedule", "chunk_gap", "itl", "tpot", "e2e"),
    *("schedule_lag", "generator_lag", "receive_lag"),
)
COUNTERS: Final = (
    "sent",
    "in_flight",
    "chunks",
    "coalesced_chunks",
    "doubtful",
    "prompt_tokens",
    "output_tokens",
    "good",
    "not_good",
    "dropped_arrivals",
    "waiting_arrivals",
)
"""All of them add over workers, the gauges ``in_flight`` and ``waiting_arrivals`` too: each worker's newest snapshot
has its own.
"""
GAUGES: Final = ("in_flight", "waiting_arrivals")
HEALTH: Final = (
    *("cpu_fraction", "run_delay_ns", "loop_lag_ns", "receive_lag_p99_ns"),
    *("gc_pause_ns", "open_fds", "rss_bytes", "spooled_batches"),
)
"""Of a worker's own condition in its last second: names and units of ``HealthSample``."""
MAX_WORKER_ID: Final = 256
KEPT_STAGES: Final = 3
"""A worker keeps the aggregates of the last stages only: a test may have any number of them."""
_MAX_COUNT: Final = 1 << 53
_OUTCOMES: Final = {outcome.value: outcome for outcome in Outcome}
DOUBT_NS: Final = 1_000_000
DOUBT_SHARE: Final = 0.05
"""A first or last token that may have come earlier by more than both of these makes a request doubtful."""


class ObservedRequest(Protocol):
    """The facts of a ``RequestRecord`` that live views need."""

    @property
    def outcome(self) -> Outcome: ...
    @property
    def ttft_ns(self) -> int | None: ...
    @property
    def e2e_ns(self) -> int | None: ...
    @property
    def schedule_lag_ns(self) -> int | None: ...
    @property
    def slot_wait_ns(self) -> int | None: ...
    @property
    def receive_lag_max_ns(self) -> int | None: ...
    @property
    def chunk_ns(self) -> Sequence[int]: ...
    @property
    def chunk_tokens(self) -> Sequence[int] | None: ...
    @property
    def prompt_tokens(self) -> int | None: ...
    @property
    def output_tokens(self) -> int | None: ...
    @property
    def chunk_width_ns(self) -> Sequence[int] | None: ...
    @property
    def coalesced(self) -> int: ...


def _array(values: Sequence[int]) -> npt.NDArray[np.int64]:
    """``array`` reads a list of ints three times as fast as numpy does."""
    return np.frombuffer(array("q", values), dtype=np.int64)


def _no_histograms() -> dict[str, LogHistogram]:
    return {name: LogHistogram() for name in HISTOGRAMS}


@dataclass(slots=True)
class RunAggregate:
    """``finished`` counts requests by outcome. Latencies are those of ok requests, lags those of all."""

    histograms: dict[str, LogHistogram] = field(default_factory=_no_histograms)
    finished: dict[Outcome, int] = field(default_factory=dict)
    sent: int = 0
    in_flight: int = 0
    chunks: int = 0
    coalesced_chunks: int = 0
    doubtful: int = 0
    """Ok requests whose first or last token is not known well enough to judge them."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    good: int = 0
    not_good: int = 0
    dropped_arrivals: int = 0
    waiting_arrivals: int = 0
    """Due, and without a free slot."""

    def request_sent(self) -> None:
        self.sent += 1
        self.in_flight += 1

    def observe(self, request: ObservedRequest, good: bool | None = None) -> None:
        """Take in a request that has ended, and was announced by ``request_sent``; ``good`` as the SLOs judge it."""
        self.in_flight -= 1
        self.finished[request.outcome] = self.finished.get(request.outcome, 0) + 1
        self.prompt_tokens += request.prompt_tokens or 0
        self.output_tokens += request.output_tokens or 0
        self.chunks += len(request.chunk_ns)
        self.coalesced_chunks += request.coalesced
        self.good += good is True
        self.not_good += good is False
        self._record("schedule_lag", request.schedule_lag_ns)
        if request.schedule_lag_ns is not None and request.slot_wait_ns is not None:
            self._record("generator_lag", request.schedule_lag_ns - request.slot_wait_ns)
        self._record("receive_lag", request.receive_lag_max_ns)
        if request.outcome == Outcome.OK:
            self._observe_latency(request)

    def _observe_latency(self, request: ObservedRequest) -> None:
        self._record("ttft", request.ttft_ns)
        self._record("e2e", request.e2e_ns)
        if request.ttft_ns is not None and request.schedule_lag_ns is not None:
            self._record("ttft_from_schedule", request.ttft_ns + request.schedule_lag_ns)
        self.doubtful += _is_doubtful(request)
        if len(request.chunk_ns) < 2:
            return
        times = _array(request.chunk_ns)
        self._record("tpot", tpot_ns(request.chunk_ns, request.output_tokens))
        gaps = Tally.of(np.diff(times))
        self.histograms["chunk_gap"].add(gaps)
        tokens = request.chunk_tokens
        if tokens is None or len(tokens) != len(times):
            return
        if tokens.count(1) == len(tokens):
            self.histograms["itl"].add(gaps)
        else:
            self._observe_itl(times, _array(tokens))

    def _observe_itl(self, times: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
        """A chunk without tokens gives no sample: its gap goes to the next that has some."""
        if (tokens[1:] <= 0).any():
            keep = tokens > 0
            keep[0] = True
            times, tokens = times[keep], tokens[keep]
        gaps, weights = np.diff(times), tokens[1:]
        self.histograms["itl"].record_many(gaps / weights, weights)

    def _record(self, name: str, value_ns: int | None) -> None:
        if value_ns is not None:
            self.histograms[name].record(value_ns)

    @classmethod
    def union(cls, parts: Sequence[RunAggregate]) -> Self:
        """All that the parts have seen, in a new one; nothing where there are none."""
        finished: Counter[Outcome] = Counter()
        for part in parts:
            finished.update(part.finished)
        merged = cls(
            histograms={name: LogHistogram.union(part.histograms[name] for part in parts) for name in HISTOGRAMS},
            finished={outcome: finished[outcome] for outcome in Outcome if outcome in finished},
        )
        for name in COUNTERS:
            setattr(merged, name, sum(getattr(part, name) for part in parts))
        return merged

    def since(self, earlier: RunAggregate) -> RunAggregate:
        """What has come after ``earlier``, a former state of this one; gauges are as they are now. Raises ValueError
        where it is none: a worker that began anew, or has left, knows less than before.
        """
        part = RunAggregate(
            histograms={name: self.histograms[name].since(earlier.histograms[name]) for name in HISTOGRAMS},
            finished={
                outcome: self.finished.get(outcome, 0) - earlier.finished.get(outcome, 0)
                for outcome in Outcome
                if outcome in self.finished or outcome in earlier.finished
            },
        )
        for name in COUNTERS:
            setattr(part, name, getattr(self, name) - (0 if name in GAUGES else getattr(earlier, name)))
        if min((*part.finished.values(), *(getattr(part, name) for name in COUNTERS if name not in GAUGES))) < 0:
            raise ValueError("the earlier aggregate is no former state of this one: it counts more")
        return part

    def to_message(
        self,
        worker_id: str,
        sequence: int,
        stages: Mapping[int, RunAggregate] = MappingProxyType({}),
        core_time: CoreTime | None = None,
        health: Mapping[str, float | None] | None = None,
    ) -> dict[str, Any]:
        """A snapshot as msgpack can carry it: text, numbers and bytes. ``stages`` are parts of the whole. ``health``
        has the keys ``HEALTH``; None where nothing is known yet.
        """
        return {
            "schema": SCHEMA,
            "worker_id": worker_id,
            "sequence": sequence,
            "core_time": None if core_time is None else core_time.to_message(),
            **self._content(),
            "stages": [{"stage": stage, **aggregate._content()} for stage, aggregate in stages.items()],
            "health": None if health is None else dict(health),
        }

    def _content(self) -> dict[str, Any]:
        return {
            "counters": {name: getattr(self, name) for name in COUNTERS},
            "finished": {str(outcome): count for outcome, count in self.finished.items()},
            "histograms": {name: self.histograms[name].to_bytes() for name in HISTOGRAMS},
        }

    @classmethod
    def from_content(cls, message: Mapping[Any, Any]) -> Self:
        """Raises ValueError, naming the field, on anything that ``to_message`` cannot have made."""
        counters = _mapping(message, "counters", COUNTERS)
        known = {name: _count(counters[name], f"counters.{name}") for name in COUNTERS}
        finished = {}
        for name, count in _mapping(message, "finished", None).items():
            if name not in _OUTCOMES:
                raise ValueError(f"snapshot field 'finished' has the unknown outcome {str(name)[:40]!r}")
            finished[_OUTCOMES[name]] = _count(count, f"finished.{name}")
        histograms = _mapping(message, "histograms", HISTOGRAMS).items()
        return cls({name: _histogram(data, name) for name, data in histograms}, finished, **known)


def _is_doubtful(request: ObservedRequest) -> bool:
    widths, times = request.chunk_width_ns, request.chunk_ns
    if not widths:
        return False
    return any(
        width > max(DOUBT_NS, DOUBT_SHARE * at) for width, at in ((widths[0], times[0]), (widths[-1], times[-1]))
    )


class StageAggregates:
    """The last few stages that were announced, each with what is known of its requests.

    A request belongs to a stage by the time at which it was scheduled, or else sent.
    """

    def __init__(self) -> None:
        self._windows: dict[int, tuple[int, int]] = {}
        self.aggregates: dict[int, RunAggregate] = {}

    def open(self, stage: int, start_unix_ns: int, end_unix_ns: int) -> None:
        """Announce a stage, or other times of one that is known: its end, say, when it is cut short."""
        self._windows[stage] = (start_unix_ns, end_unix_ns)
        self.aggregates.setdefault(stage, RunAggregate())
        while len(self.aggregates) > KEPT_STAGES:
            oldest = min(self.aggregates)
            del self._windows[oldest], self.aggregates[oldest]

    def at(self, time_unix_ns: int) -> RunAggregate | None:
        for stage, (start_unix_ns, end_unix_ns) in self._windows.items():
            if start_unix_ns <= time_unix_ns < end_unix_ns:
                return self.aggregates[stage]
        return None


@dataclass(frozen=True, slots=True)
class Snapshot:
    worker_id: str
    sequence: int
    aggregate: RunAggregate
    stages: Mapping[int, RunAggregate] = field(default_factory=dict)
    core_time: CoreTime | None = None
    health: Mapping[str, float | None] | None = None
    """With the keys ``HEALTH``; None where the worker knows nothing of itself yet."""

    @classmethod
    def from_message(cls, message: object) -> Snapshot:
        """Raises ValueError, naming the field, on anything that ``to_message`` cannot have made."""
        if not isinstance(message, Mapping):
            raise ValueError(f"a snapshot is a mapping, not {type(message).__name__}")
        if message.get("schema") != SCHEMA:
            raise ValueError(f"snapshot field 'schema' is {message.get('schema')!r}: this version reads {SCHEMA}")
        worker_id = message.get("worker_id")
        if not isinstance(worker_id, str) or not 0 < len(worker_id) <= MAX_WORKER_ID:
            raise ValueError(f"snapshot field 'worker_id' is not a text of 1 to {MAX_WORKER_ID} characters")
        sequence = _count(message.get("sequence"), "sequence")
        told = message.get("core_time")
        core_time = None if told is None else CoreTime.from_message(told, "snapshot field 'core_time'")
        stages, health = _stages(message.get("stages")), _health(message)
        return cls(worker_id, sequence, RunAggregate.from_content(message), stages, core_time, health)


def _health(message: Mapping[Any, Any]) -> dict[str, float | None] | None:
    if message.get("health") is None:
        return None
    values = _mapping(message, "health", HEALTH)
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_COUNT:
            raise ValueError(f"snapshot field 'health.{name}' is not a number within ±2^53")
    return {name: values[name] for name in HEALTH}


def _stages(value: object) -> dict[int, RunAggregate]:
    if not isinstance(value, list | tuple) or len(value) > KEPT_STAGES:
        raise ValueError(f"snapshot field 'stages' is not a list of at most {KEPT_STAGES}")
    stages = {}
    for message in value:
        if not isinstance(message, Mapping):
            raise ValueError(f"snapshot field 'stages' holds a {type(message).__name__}, not a mapping")
        stages[_count(message.get("stage"), "stages.stage")] = RunAggregate.from_content(message)
    return stages


def _mapping(message: Mapping[Any, Any], name: str, keys: Sequence[str] | None) -> Mapping[Any, Any]:
    value = message.get(name)
    if not isinstance(value, Mapping) or (keys is not None and set(value) != set(keys)):
        expected = "" if keys is None else " with the keys " + ", ".join(keys)
        raise ValueError(f"snapshot field {name!r} is not a mapping{expected}")
    return value


def _count(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"snapshot field {name!r} is not a count from 0 to 2^53")
    return value


def _histogram(data: object, name: str) -> LogHistogram:
    if not isinstance(data, bytes):
        raise ValueError(f"snapshot field 'histograms.{name}' is not bytes")
    try:
        return LogHistogram.from_bytes(data)
    except ValueError as error:
        raise ValueError(f"snapshot field 'histograms.{name}': {error}") from error


class Snapshots:
    """The newest snapshot of each worker."""

    def __init__(self) -> None:
        self._newest: dict[str, Snapshot] = {}

    def offer(self, snapshot: Snapshot) -> bool:
        """Keep it if it is newer than what is there; whether it was."""
        known = self._newest.get(snapshot.worker_id)
        if known is not None and known.sequence >= snapshot.sequence:
            return False
        self._newest[snapshot.worker_id] = snapshot
        return True

    @property
    def worker_ids(self) -> list[str]:
        return sorted(self._newest)

    def of_worker(self, worker_id: str) -> Snapshot | None:
        return self._newest.get(worker_id)

    def merged(self) -> RunAggregate:
        return RunAggregate.union([newest.aggregate for newest in self._newest.values()])

    def of_stage(self, stage: int) -> RunAggregate | None:
        """What all workers know of one stage; None where none has said anything of it, or not lately."""
        parts = [newest.stages[stage] for newest in self._newest.values() if stage in newest.stages]
        return RunAggregate.union(parts) if parts else None
