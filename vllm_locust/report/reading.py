"""The passes over ``requests.parquet``: what of each request goes where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from vllm_locust.outcome import Outcome
from vllm_locust.phases import Phase
from vllm_locust.report.arrivals import ArrivalCounts
from vllm_locust.report.cold_start import ColdStart
from vllm_locust.report.columns import Flags, RequestColumns, Source, read_batches
from vllm_locust.report.diagnosis_prefills import FirstTokens, PrefillEffects, Turns
from vllm_locust.report.gap_confidence import GapConfidence
from vllm_locust.report.over_time import OverTime
from vllm_locust.report.request_times import RequestTimes
from vllm_locust.report.run_facts import RunFacts
from vllm_locust.report.stage_samples import POOLED, StageSamples

MAX_EXAMPLES: Final = 3
"""Error texts shown for one outcome."""
MAX_DIFFERENT_ERRORS: Final = 1000
"""Error texts counted for one outcome: those that differ in every request must not fill the memory."""


@dataclass(slots=True)
class Everything:
    """What is counted over all phases."""

    requests: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    token_sources: Counter[str] = field(default_factory=Counter)
    stamp_sources: Counter[str] = field(default_factory=Counter)
    """Of requests with a first token or an end: one that was refused has no time that anything stamped."""
    attempts: int = 0
    retried: int = 0
    """Requests that needed more than one attempt."""
    chunks: int = 0
    coalesced: int = 0
    errors: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, columns: RequestColumns) -> None:
        self.requests.update(str(outcome) for outcome in columns.texts("outcome"))
        self.phases.update(str(phase) for phase in columns.texts("phase"))
        self.prompt_tokens += int(columns.ints("prompt_tokens").sum())
        self.output_tokens += int(columns.ints("output_tokens").sum())
        self.token_sources.update(source for source in columns.texts("token_source") if source is not None)
        timed = columns.known("ttft_ns") | columns.known("done_ns")
        self.stamp_sources.update(str(s) for s, has in zip(columns.texts("stamp_source"), timed, strict=True) if has)
        attempts = columns.ints("attempts")
        self.attempts += int(attempts.sum())
        self.retried += int((attempts > 1).sum())
        self.chunks += len(columns.chunk_ns)
        self.coalesced += int(columns.ints("coalesced").sum())
        if not columns.ok.all():
            self._add_errors(columns)

    def _add_errors(self, columns: RequestColumns) -> None:
        outcomes, errors, statuses = (columns.texts(name) for name in ("outcome", "error", "http_status"))
        for row in np.flatnonzero(~columns.ok).tolist():
            # A status may also be that of an earlier attempt, of which the words do not speak.
            status = f"HTTP {statuses[row]}" if outcomes[row] == Outcome.HTTP_ERROR else ""
            text = ": ".join(filter(None, (status, errors[row])))
            examples = self.errors.setdefault(str(outcomes[row]), Counter())
            if text and (text in examples or len(examples) < MAX_DIFFERENT_ERRORS):
                examples[text] += 1

    def as_json(self) -> dict[str, Any]:
        return {
            "requests": sum(self.requests.values()),
            "ok": self.requests[Outcome.OK],
            "by_outcome": dict(sorted(self.requests.items())),
            "by_phase": {phase: self.phases[phase] for phase in Phase},
            "attempts": self.attempts,
            "retried": self.retried,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "token_sources": dict(sorted(self.token_sources.items())),
            "stamp_sources": dict(sorted(self.stamp_sources.items())),
            "chunks": self.chunks,
            "coalesced_chunks": self.coalesced,
        }

    def errors_json(self) -> list[dict[str, Any]]:
        return [
            {
                "outcome": outcome,
                "count": self.requests[outcome],
                "examples": [
                    {"text": text, "count": count}
                    for text, count in self.errors.get(outcome, Counter()).most_common(MAX_EXAMPLES)
                ],
            }
            for outcome, _ in sorted(self.requests.items(), key=lambda item: (-item[1], item[0]))
            if outcome != Outcome.OK
        ]


class Reading:
    """The passes over ``requests.parquet``."""

    def __init__(self, facts: RunFacts) -> None:
        self.facts = facts
        self.everything = Everything()
        self.stages = {stage.index: StageSamples() for stage in facts.stages}
        self._outside = StageSamples()
        intervals = [stage.interval for stage in facts.stages if stage.interval is not None]
        self.arrivals = ArrivalCounts(intervals)
        self.window_arrivals = ArrivalCounts([] if facts.window is None else [facts.window])
        self.total = StageSamples()
        self.schedule_lags_max_ns: dict[str, float] = {}
        """By worker, of the window's requests."""
        self.times = RequestTimes()
        self.over_time = OverTime(facts)
        self.cold_start = ColdStart()
        self.first_tokens = FirstTokens()
        self.turns = Turns()
        self.prefills: dict[int, PrefillEffects] = {}
        """By the number of the stage; filled by ``gap_inflations``."""

    def read(self, source: Source, missed_arrivals: Source | None) -> None:
        for batch in read_batches(source):
            columns = RequestColumns(batch)
            self.everything.add(columns)
            self.arrivals.add(columns)
            self.window_arrivals.add(columns)
            self._add_schedule_lags(columns)
            self.times.add(columns)
            self.over_time.add(columns)
            self.cold_start.add(columns)
            self.first_tokens.add(columns)
            self.turns.add(columns)
            for samples, mine in self._owners(columns):
                samples.add(columns, mine, self.facts.slos)
        self.times.add_missed(missed_arrivals)
        self.times.settle()
        self.first_tokens.settle()
        for samples in (*self.stages.values(), self._outside):
            samples.settle()
        if len(self.stages) == 1 and not self._outside.attempted:
            self.total = next(iter(self.stages.values()))
        else:
            self.total = StageSamples.union([*self.stages.values(), self._outside])

    def _add_schedule_lags(self, columns: RequestColumns) -> None:
        lags_ns = columns.floats("schedule_lag_ns")
        rows = np.flatnonzero(columns.is_equal("phase", Phase.WINDOW) & ~np.isnan(lags_ns))
        workers = columns.texts("worker_id") if len(rows) else []
        for row in rows.tolist():
            worker_id = str(workers[row])
            self.schedule_lags_max_ns[worker_id] = max(self.schedule_lags_max_ns.get(worker_id, 0.0), lags_ns[row])

    def _owners(self, columns: RequestColumns) -> list[tuple[StageSamples, Flags]]:
        in_window = columns.is_equal("phase", Phase.WINDOW)
        stage = columns.ints("stage", missing=-1)
        known = np.isin(stage, list(self.stages)) & columns.known("stage")
        owners = [(samples, in_window & known & (stage == index)) for index, samples in self.stages.items()]
        return [*owners, (self._outside, in_window & ~known)]

    def stage_rates(self) -> list[dict[str, Any]]:
        """In the order of the stages. Either all of them have an interval or none has."""
        return [self.arrivals.rates(position) for position in range(len(self.facts.stages))]

    def gap_inflations(self, source: Source) -> dict[int, dict[str, Mapping[str, float]]]:
        """By the id of the samples, then by metric. The same pass looks at what prefills did to the gaps."""
        self.prefills = {index: PrefillEffects(samples) for index, samples in self.stages.items()}
        wanted = {id(samples): samples for samples in (*self.stages.values(), self.total)}
        confidence = {
            key: {name: GapConfidence(samples.gaps[name].reported) for name in POOLED}
            for key, samples in wanted.items()
        }
        names = ("outcome", "phase", "stage", "target", "sent_unix_ns", "chunk_ns", "chunk_tokens")
        for batch in read_batches(source, names):
            columns = RequestColumns(batch)
            sent = columns.ints("sent_unix_ns")
            owners = {id(samples): mine for samples, mine in self._owners(columns)}
            owners[id(self.total)] = columns.is_equal("phase", Phase.WINDOW)
            for index, samples in self.stages.items():
                self.prefills[index].add(columns, owners[id(samples)] & columns.ok, self.first_tokens)
            for key, metrics in confidence.items():
                mine = owners[key] & columns.ok
                metrics["chunk_gap"].add(columns.chunk_gaps(mine), sent, mine)
                metrics["itl"].add(columns.itl_gaps(mine), sent, mine)
        return {key: {name: one.inflations() for name, one in metrics.items()} for key, metrics in confidence.items()}
