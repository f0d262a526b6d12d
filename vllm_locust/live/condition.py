"""The generator's own condition while a run goes on, and the verdict as far as it can be told by then.

The final verdict looks at every request of the window; this one at histograms and at what workers say of their last
second. It knows nothing of coalesced reads, clocks and lost records: it may become worse at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

from vllm_locust.aggregate import RunAggregate, Snapshots
from vllm_locust.duration import seconds
from vllm_locust.live.figures import finished
from vllm_locust.outcome import Outcome
from vllm_locust.statistics import PERCENTILES, nearest_rank
from vllm_locust.verdict.evidence import Evidence
from vllm_locust.verdict.judge import Verdict, judge

KEPT: Final = 600
"""Seconds of each worker that are looked at."""
_P95: Final = Fraction(19, 20)
_P99: Final = Fraction(99, 100)
_SECOND_NS: Final = 1_000_000_000

Health = Mapping[str, float | None]


class Condition:
    """Takes each worker's newest health once; remembers the last ``KEPT`` of each."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[Health]] = {}
        self._sequences: dict[str, int] = {}

    def take(self, snapshots: Snapshots) -> None:
        for worker_id in snapshots.worker_ids:
            snapshot = snapshots.of_worker(worker_id)
            if snapshot is None or snapshot.health is None or self._sequences.get(worker_id) == snapshot.sequence:
                continue
            self._sequences[worker_id] = snapshot.sequence
            self._samples.setdefault(worker_id, deque(maxlen=KEPT)).append(snapshot.health)

    def figures(self) -> dict[str, float | None]:
        """The worst of all workers in their last second."""
        last = [samples[-1] for samples in self._samples.values()]
        return {
            "cpu_fraction_max": _most(last, "cpu_fraction"),
            "loop_lag_max_s": seconds(_most(last, "loop_lag_ns")),
            "gc_pause_max_s": seconds(_most(last, "gc_pause_ns")),
        }

    def verdict(
        self,
        aggregate: RunAggregate,
        *,
        max_failures: float,
        workers_expected: int,
        workers_missing: Sequence[str],
    ) -> Verdict | None:
        """None before a request has ended: nothing is measured yet."""
        done = finished(aggregate)
        if not done:
            return None
        busiest = max(self._samples, key=lambda worker: self._quantile(worker, "cpu_fraction", _P95) or 0, default=None)
        evidence = Evidence(
            window_requests=done,
            window_ok=aggregate.finished.get(Outcome.OK, 0),
            attempted=done,
            failed=done - aggregate.finished.get(Outcome.OK, 0),
            max_failures=max_failures,
            workers_expected=workers_expected,
            workers_missing=workers_missing,
            generator_lag_p99_ns=aggregate.histograms["generator_lag"].quantile(PERCENTILES["p99"]),
            arrivals_dropped=aggregate.dropped_arrivals,
            receive_lag_p99_ns=self._worst("receive_lag_p99_ns", _P95),
            loop_lag_p99_ns=self._worst("loop_lag_ns", _P99),
            cpu_fraction_p95=None if busiest is None else self._quantile(busiest, "cpu_fraction", _P95),
            cpu_worker=busiest,
            run_delay_share=self._run_delay_share(),
            gc_pause_max_ns=self._longest_pause(),
        )
        return judge(evidence)

    def _quantile(self, worker_id: str, name: str, q: Fraction) -> float | None:
        values = sorted(value for health in self._samples[worker_id] if (value := health[name]) is not None)
        return values[nearest_rank(len(values), q) - 1] if values else None

    def _worst(self, name: str, q: Fraction) -> float | None:
        values = [self._quantile(worker, name, q) for worker in self._samples]
        return max((value for value in values if value is not None), default=None)

    def _run_delay_share(self) -> float | None:
        shares = []
        for samples in self._samples.values():
            known = [value for health in samples if (value := health["run_delay_ns"]) is not None]
            if known:
                shares.append(min(1.0, sum(known) / (len(known) * _SECOND_NS)))
        return max(shares, default=None)

    def _longest_pause(self) -> int | None:
        pause = _most([health for samples in self._samples.values() for health in samples], "gc_pause_ns")
        return None if pause is None else int(pause)


def _most(samples: Sequence[Health], name: str) -> float | None:
    return max((value for health in samples if (value := health[name]) is not None), default=None)


def verdict_json(verdict: Verdict | None) -> dict[str, Any]:
    return {"status": None, "reasons": []} if verdict is None else verdict.as_json()
