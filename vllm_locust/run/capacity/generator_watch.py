"""Whether the generator itself disturbed a probe, by what its workers tell while the probe runs: such a probe says
nothing of the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from vllm_locust.aggregate import RunAggregate, Snapshots
from vllm_locust.capacity.probe import allowed_share
from vllm_locust.core_time import CoreTime
from vllm_locust.outcome import Outcome
from vllm_locust.slo import Slo
from vllm_locust.statistics import PERCENTILES
from vllm_locust.verdict.reason import THRESHOLDS, percent_text, time_text

MIN_TIME_NS: Final = 2_000_000_000
"""A share of less time than that may be one unlucky moment."""


class GeneratorWatch:
    """``look`` is called about once a second in the probe's window."""

    def __init__(self) -> None:
        self._first: dict[str, CoreTime] = {}
        self._last: dict[str, CoreTime] = {}

    def look(self, snapshots: Snapshots) -> None:
        for worker_id in snapshots.worker_ids:
            newest = snapshots.of_worker(worker_id)
            if newest is not None and newest.core_time is not None:
                self._first.setdefault(worker_id, newest.core_time)
                self._last[worker_id] = newest.core_time

    def disturbance(self, stage: RunAggregate, slos: Sequence[Slo]) -> str | None:
        """By the verdict's limits; ``slos`` are those of the stage."""
        lag_ns = stage.histograms["generator_lag"].quantile(PERCENTILES["p99"])
        if lag_ns is not None and lag_ns > THRESHOLDS.schedule_lag_p99_ns[1]:
            return f"its requests were sent up to {time_text(lag_ns)} (p99) after they were due; add workers"
        used, waited = self._used(), self._waited()
        if waited > THRESHOLDS.probe_run_delay_share:
            return f"a worker waited for a core {percent_text(waited)} of the time: something else runs on its machine"
        if used > THRESHOLDS.probe_cpu_fraction:
            return f"a worker used {percent_text(used)} of a core; add worker processes"
        doubtful = stage.doubtful / max(1, stage.finished.get(Outcome.OK, 0))
        own_fault = used > THRESHOLDS.cause_cpu_fraction or waited > THRESHOLDS.cause_run_delay_share
        if own_fault and doubtful > min(allowed_share(slo) for slo in slos):
            return (
                f"{percent_text(doubtful)} of its answers were read too late to know their times; add worker processes"
            )
        return None

    def _used(self) -> float:
        return _most(last.used_share(first) for first, last in self._spans())

    def _waited(self) -> float:
        return _most(last.waited_share(first) for first, last in self._spans())

    def _spans(self) -> list[tuple[CoreTime, CoreTime]]:
        pairs = [(self._first[worker_id], last) for worker_id, last in self._last.items()]
        return [(first, last) for first, last in pairs if last.at_ns - first.at_ns >= MIN_TIME_NS]


def _most(shares: Iterable[float | None]) -> float:
    return max((share for share in shares if share is not None), default=0.0)
