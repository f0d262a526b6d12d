"""What the numbers need to know from ``run.json``: the window, its stages, what was asked, and what the run's end
found.

Keys that are read (everything else in ``run.json`` is only shown):

- ``run_id`` (text), ``run_name``, ``tags``, ``command``, ``versions``, ``hosts``: shown. - ``workload``: of it
``name``, ``token_count_method``, ``filters`` and ``warnings`` are repeated in the summary, and ``shared_prefix`` is
``{"groups", "tokens"}`` or null. - ``config``:
``RunConfig.to_json()``; of it ``slos`` and ``max_failures``. - ``window``: ``{"start_unix_ns", "end_unix_ns"}`` on
the common clock, or null when it never began. - ``stages``: in order, each ``{"stage", "name", "stage_kind":
"hold"|"ramp", "start_unix_ns", "end_unix_ns"}`` and, where they apply, ``offered_rps``, ``users``,
``dropped_arrivals``, ``lost_arrivals``. None: the window is the only stage. - ``schedule``: of an open loop, of it
``process`` and ``burstiness``. - ``arrivals``: of an open loop, what the merge found when it held the schedule against
the records: ``{"planned", "dropped", "lost", "doubled", "misplaced"}``; ``lost`` is null where it could not look. -
``stopped_early``: why, or null. -
``workers``: ``{"expected", "missing": [id, …], "flushed":
{id: {"unstorable_values"}}}``. - ``records``: ``{"lost", "batches_lost", "spooled_batches"}``. -
``clock``: ``{"step_max_ns", "uncertainty_max_ns"}``. - ``server_metrics``: ``{"pages": [{"target"}]}``, the servers
whose own metrics were to be read. - ``telemetry``: ``{"gpus": [{"host",
"gpu_index", "gpu_uuid", "first_unix_ns"}], "sources": [{"source", "kinds",
"uncertainty_ns"}]}``, what a collector had sampled, or null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm_locust.arrival import ArrivalProcess, Schedule
from vllm_locust.slo import Slo, parse_slos

ONLY_STAGE: Final = "window"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Half open, on the common clock."""

    start_unix_ns: int
    end_unix_ns: int

    @property
    def length_s(self) -> float:
        return (self.end_unix_ns - self.start_unix_ns) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    index: int
    name: str
    kind: str
    interval: Interval | None
    """None when the window never began."""
    offered_rps: float | None = None
    users: int | None = None
    dropped_arrivals: int = 0
    lost_arrivals: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    run_id: str
    window: Interval | None
    stages: tuple[Stage, ...]
    slos: tuple[Slo, ...]
    max_failures: float | None
    stopped_early: str | None
    workers_expected: int | None
    workers_missing: tuple[str, ...]
    records_lost: int
    batches_lost: int
    spooled_batches: int
    spools: tuple[str, ...]
    """Where workers had their spools, each on its host, when they ended."""
    unstorable_values: int
    clock_step_max_ns: int | None
    clock_uncertainty_max_ns: int | None
    process_gap_cv: float | None
    """The coefficient of variation that the gaps between arrivals are meant to have, at a steady rate."""
    metrics_targets: tuple[str, ...]
    """Servers whose own metrics were to be read."""
    gpus_watched: tuple[Mapping[str, Any], ...]
    """GPUs that a collector had sampled."""
    gpu_clock_uncertainty_ns: int | None
    server_clock_uncertainty_ns: int | None
    arrivals: Mapping[str, int | None] | None
    """None in a closed loop."""
    shared_prefix: Mapping[str, int] | None
    """``groups`` of prompts, each of which begins with the same ``tokens``; None where none were made so."""

    @classmethod
    def from_run(cls, run: Mapping[str, Any]) -> RunFacts:
        config = run.get("config") or {}
        workers, records, clock = (run.get(key) or {} for key in ("workers", "records", "clock"))
        window = None if run.get("window") is None else _interval(run["window"])
        return cls(
            run_id=run["run_id"],
            window=window,
            stages=_stages(run.get("stages") or (), window),
            slos=tuple(parse_slos(config.get("slos") or ())),
            max_failures=config.get("max_failures"),
            stopped_early=run.get("stopped_early"),
            workers_expected=workers.get("expected"),
            workers_missing=tuple(workers.get("missing") or ()),
            records_lost=records.get("lost") or 0,
            batches_lost=records.get("batches_lost") or 0,
            unstorable_values=sum(
                words.get("unstorable_values") or 0 for words in (workers.get("flushed") or {}).values()
            ),
            spooled_batches=records.get("spooled_batches") or 0,
            spools=tuple(
                words["spool_path"] for words in (workers.get("flushed") or {}).values() if words.get("spool_path")
            ),
            clock_step_max_ns=clock.get("step_max_ns"),
            clock_uncertainty_max_ns=clock.get("uncertainty_max_ns"),
            process_gap_cv=_process_gap_cv(run.get("schedule")),
            metrics_targets=tuple(page["target"] for page in (run.get("server_metrics") or {}).get("pages") or ()),
            gpus_watched=tuple((run.get("telemetry") or {}).get("gpus") or ()),
            gpu_clock_uncertainty_ns=_telemetry_clock_ns(run, "gpu"),
            server_clock_uncertainty_ns=_telemetry_clock_ns(run, "server", of=run["run_id"]),
            arrivals=run.get("arrivals"),
            shared_prefix=(run.get("workload") or {}).get("shared_prefix"),
        )


def _telemetry_clock_ns(run: Mapping[str, Any], kind: str, of: str = "") -> int | None:
    """How far the clock of what sampled a kind may be from the common one, at worst; of sources so named."""
    known = [
        source["uncertainty_ns"]
        for source in (run.get("telemetry") or {}).get("sources") or ()
        if kind in source["kinds"] and of in source["source"] and source["uncertainty_ns"] is not None
    ]
    return max(known, default=None)


def _process_gap_cv(schedule: Mapping[str, Any] | None) -> float | None:
    if schedule is None or schedule["process"] == ArrivalProcess.TRACE:
        return None
    return Schedule.from_json(schedule).gap_cv


def _interval(value: Mapping[str, Any]) -> Interval:
    start, end = value["start_unix_ns"], value["end_unix_ns"]
    if end < start:
        raise ValueError(f"run.json: an interval ends at {end}, before its start at {start}")
    return Interval(start_unix_ns=start, end_unix_ns=end)


def _stages(values: Sequence[Mapping[str, Any]], window: Interval | None) -> tuple[Stage, ...]:
    if not values:
        return (Stage(index=0, name=ONLY_STAGE, kind="hold", interval=window),)
    return tuple(
        Stage(
            index=value["stage"],
            name=value.get("name") or str(value["stage"]),
            kind=value.get("stage_kind") or "hold",
            interval=_interval(value),
            offered_rps=value.get("offered_rps"),
            users=value.get("users"),
            dropped_arrivals=value.get("dropped_arrivals") or 0,
            lost_arrivals=value.get("lost_arrivals") or 0,
        )
        for value in values
    )
