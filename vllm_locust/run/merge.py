"""From the parts that the recorder wrote to the finished run directory: tables, summary and reports.

A merge can be repeated and gives the same bytes again: it starts from the parts, which stay beside the results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vllm_locust.config import RunConfig
from vllm_locust.errors import RunFailed, WorkloadError
from vllm_locust.phases import PHASES, Phase, assign_phase, belonging_time, interval_index
from vllm_locust.report.columns import RequestColumns
from vllm_locust.report.html import render_html
from vllm_locust.report.summary import summarize
from vllm_locust.report.text import render_text
from vllm_locust.slo import Slo, judge_requests, parse_slos
from vllm_locust.store.finalize import finalize
from vllm_locust.store.rundir import RunDirectory, read_json, write_json, write_text
from vllm_locust.store.schema import BatchKind
from vllm_locust.workload.load import load_workload


@dataclass(frozen=True, slots=True)
class Merged:
    summary: dict[str, Any]
    text: str

    @property
    def exit_code(self) -> int:
        return int(self.summary["exit_code"])


def merge_run(run_dir: RunDirectory) -> Merged:
    """Write every result of the run in ``run_dir``. Raises RunFailed where there is no run to merge."""
    if not run_dir.run_json.is_file():
        raise RunFailed(f"{run_dir.path} holds no run.json; give the directory of a run")
    run = read_json(run_dir.run_json)
    clocks = worker_clocks(run_dir)
    run["clock"] = clocks.as_json()
    slos = parse_slos(run["config"]["slos"])
    finalize(
        run_dir.parts, BatchKind.REQUESTS, run_dir.requests_parquet, lambda rows: add_columns(rows, run, slos, clocks)
    )
    finalize(run_dir.parts, BatchKind.HEALTH, run_dir.workers_parquet, lambda rows: on_common_clock(rows, clocks))
    write_json(run_dir.run_json, run)
    return report_run(run_dir)


def report_run(run_dir: RunDirectory) -> Merged:
    """Make summary and reports from the tables that a merge has written."""
    run = read_json(run_dir.run_json)
    reference = _length_reference(run)
    summary = summarize(run, run_dir.requests_parquet, workers=run_dir.workers_parquet, length_reference=reference)
    text = render_text(summary)
    write_json(run_dir.summary_json, summary)
    write_text(run_dir.report_txt, text)
    write_text(run_dir.report_html, render_html(summary, run))
    return Merged(summary, text)


@dataclass(frozen=True, slots=True)
class WorkerClocks:
    """How far each worker's wall clock is from the Redis server's, which is the common clock."""

    offset_ns: Mapping[str, int]
    uncertainty_max_ns: int | None
    step_max_ns: int | None

    def as_json(self) -> dict[str, Any]:
        return {
            "offset_ns": dict(self.offset_ns),
            "uncertainty_max_ns": self.uncertainty_max_ns,
            "step_max_ns": self.step_max_ns,
        }

    def of(self, worker_ids: list[str | None]) -> npt.NDArray[np.int64]:
        return np.array([self.offset_ns.get(worker or "", 0) for worker in worker_ids], dtype=np.int64)


def worker_clocks(run_dir: RunDirectory) -> WorkerClocks:
    """From the clock fields that the workers published. An offset within its own uncertainty is none."""
    control = read_json(run_dir.control_json) if run_dir.control_json.is_file() else {}
    offsets, uncertainties, steps = {}, [], []
    for name, lines in control.items():
        if not name.startswith("clock:"):
            continue
        measured = [json.loads(line) for line in lines.splitlines()]
        if not measured:
            continue
        best = min(measured, key=lambda one: int(one["uncertainty_ns"]))
        offset_ns, uncertainty_ns = int(best["offset_ns"]), int(best["uncertainty_ns"])
        offsets[name.removeprefix("clock:")] = offset_ns if abs(offset_ns) > uncertainty_ns else 0
        uncertainties.append(uncertainty_ns)
        steps.append(_wall_step_ns(measured))
    return WorkerClocks(offsets, max(uncertainties, default=None), max(steps, default=None))


def _wall_step_ns(measured: list[dict[str, Any]]) -> int:
    """How far the wall clock ran away from the monotonic one between two measurements."""
    distances = [int(one["measured_unix_ns"]) - int(one["measured_monotonic_ns"]) for one in measured]
    return max((abs(after - before) for before, after in pairwise(distances)), default=0)


def on_common_clock(rows: pa.RecordBatch, clocks: WorkerClocks) -> pa.RecordBatch:
    """The rows with every ``*_unix_ns`` column moved from its worker's clock to the common one."""
    if not any(clocks.offset_ns.values()):
        return rows
    offsets = clocks.of(rows.column("worker_id").to_pylist())
    for index, name in enumerate(rows.schema.names):
        if name.endswith("_unix_ns"):
            moved = pa.compute.add(rows.column(index), pa.array(offsets))
            rows = rows.set_column(index, rows.schema.field(index), moved)
    return rows


def add_columns(rows: pa.RecordBatch, run: Mapping[str, Any], slos: list[Slo], clocks: WorkerClocks) -> pa.RecordBatch:
    """The rows on the common clock, with ``phase``, ``stage`` and ``good``."""
    rows = on_common_clock(rows, clocks)
    columns = RequestColumns(rows)
    belongs_ns = belonging_time(
        columns.ints("scheduled_unix_ns"), columns.known("scheduled_unix_ns"), columns.ints("sent_unix_ns")
    )
    window = run["window"] or {"start_unix_ns": None, "end_unix_ns": None}
    phase = assign_phase(belongs_ns, window["start_unix_ns"], window["end_unix_ns"])
    in_window = phase == PHASES.index(Phase.WINDOW)
    stages = run.get("stages") or ([{"stage": 0, **run["window"]}] if run["window"] else [])
    index, inside = interval_index(
        belongs_ns, [stage["start_unix_ns"] for stage in stages], [stage["end_unix_ns"] for stage in stages]
    )
    numbers = np.array([stage["stage"] for stage in stages] or [0], dtype=np.int32)
    good, decided = judge_requests(slos, columns.ok, columns.slo_values_ns())
    return (
        rows.append_column("phase", pa.array([str(PHASES[code]) for code in phase.tolist()], pa.string()))
        .append_column("stage", pa.array(numbers[index], mask=~(inside & in_window)))
        .append_column("good", pa.array(good, mask=~decided))
    )


def _length_reference(run: Mapping[str, Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """The lengths of the workload's source; None where it cannot be read any more."""
    config = RunConfig.from_json(run["config"])
    try:
        workload = load_workload(
            config.workload,
            tokenizer=config.tokenizer,
            max_model_len=run["server"]["max_model_len"],
            max_tokens=config.max_tokens,
            seed=config.seed,
        )
    except WorkloadError:
        return None
    return workload.length_reference() if workload.fingerprint == run["workload"]["fingerprint"] else None
