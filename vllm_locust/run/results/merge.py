"""From the parts that the recorder wrote to the finished run directory: tables, summary and reports.

A merge can be repeated and gives the same bytes again: it starts from the parts, which stay beside the results. So one
that was killed is completed by the next one. Only one at a time is at work in a run directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from vllm_locust import clock
from vllm_locust.capacity.record import final_json
from vllm_locust.config import RunConfig
from vllm_locust.errors import StoreError, UsageError, WorkloadError
from vllm_locust.phases import PHASES, Phase, assign_phase, belonging_time, interval_index
from vllm_locust.report.charts.chart_data import chart_data
from vllm_locust.report.columns import RequestColumns
from vllm_locust.report.html import render_html
from vllm_locust.report.summary import measure
from vllm_locust.report.text import render_text
from vllm_locust.run.common_clock import WorkerClocks
from vllm_locust.run.results.arrivals import account_for_arrivals
from vllm_locust.run.results.experiments import record_experiment
from vllm_locust.run.results.recovery import MergeOrder, check_known, completed, take_in
from vllm_locust.run.results.run_files import check_tables, read_control, read_run, read_search
from vllm_locust.run.telemetry.merge import merge_telemetry
from vllm_locust.slo import Slo, judge_requests, parse_slos
from vllm_locust.store.finalize import finalize, refuse_fewer_rows
from vllm_locust.store.lock_file import try_lock
from vllm_locust.store.rundir import RunDirectory, write_json, write_text
from vllm_locust.store.schema import BatchKind
from vllm_locust.telemetry import TelemetryKind
from vllm_locust.workload.load import load_workload
from vllm_locust.workload.workload import Workload

_WAIT_FOR_MERGE_NS: Final = 1800 * 1_000_000_000


@dataclass(frozen=True, slots=True)
class Merged:
    summary: dict[str, Any]
    text: str

    @property
    def exit_code(self) -> int:
        return int(self.summary["exit_code"])


def merge_run(order: MergeOrder) -> Merged:
    """Take in what is left of the run in spools and in Redis, and write all its results."""
    check_known(order)
    with _alone(order.run_dir):
        take_in(order)
        _refuse_fewer(order.run_dir)
        for leftover in order.run_dir.path.glob(".*.tmp"):
            leftover.unlink()
        return _merged(order.run_dir)


def _refuse_fewer(run_dir: RunDirectory) -> None:
    tables = {BatchKind.REQUESTS: run_dir.requests_parquet, BatchKind.HEALTH: run_dir.workers_parquet}
    refuse_fewer_rows(run_dir.parts, tables)


@contextmanager
def _alone(run_dir: RunDirectory) -> Iterator[None]:
    """Another merge or report of the run is waited for: two of them would mix their results."""
    run_dir.make()
    deadline_ns = clock.monotonic_ns() + _WAIT_FOR_MERGE_NS
    told = False
    while (lock := try_lock(run_dir.merge_lock)) is None:
        if clock.monotonic_ns() > deadline_ns:
            raise StoreError(
                f"another merge of {run_dir.path} is at work: wait until it ends, or end it, and merge again"
            )
        if not told:
            sys.stderr.write(f"vllm-locust: waiting for another merge of {run_dir.path} to end\n")
            told = True
        clock.sleep(0.2)
    try:
        yield
    finally:
        os.close(lock)


def _merged(run_dir: RunDirectory) -> Merged:
    control = read_control(run_dir)
    clocks = WorkerClocks.from_control(control)
    run = completed(read_run(run_dir), control, run_dir, clocks)
    run["clock"] = clocks.as_json()
    slos = parse_slos(run["config"]["slos"])
    finalize(
        run_dir.parts, BatchKind.REQUESTS, run_dir.requests_parquet, lambda rows: add_columns(rows, run, slos, clocks)
    )
    finalize(run_dir.parts, BatchKind.HEALTH, run_dir.workers_parquet, clocks.move)
    run |= merge_telemetry(run, run_dir, clocks.axes)
    workload = _workload_again(run)
    run |= account_for_arrivals(run, run_dir, None if workload is None else workload.offsets_ns())
    write_json(run_dir.run_json, run)
    return _write_reports(run_dir, run, workload)


def report_run(run_dir: RunDirectory) -> Merged:
    """Make summary and reports from the tables that a merge has written. Raises UsageError where there are none."""
    run_dir.refuse_name()
    if not (run_dir.run_json.is_file() and run_dir.requests_parquet.is_file()):
        raise UsageError(f"{run_dir.path} holds no merged run; give the directory of a run, or merge it first")
    with _alone(run_dir):
        run = read_run(run_dir)
        check_tables(run_dir)
        return _write_reports(run_dir, run, _workload_again(run))


def _write_reports(run_dir: RunDirectory, run: dict[str, Any], workload: Workload | None) -> Merged:
    search = read_search(run_dir)
    workers = run_dir.workers_parquet
    measured = measure(
        run,
        run_dir.requests_parquet,
        workers=workers,
        missed_arrivals=_if_there(run_dir.arrivals_parquet),
        server=_if_there(run_dir.telemetry_parquet(TelemetryKind.SERVER)),
        gpu=_if_there(run_dir.telemetry_parquet(TelemetryKind.GPU)),
        host=_if_there(run_dir.telemetry_parquet(TelemetryKind.HOST)),
        length_reference=None if workload is None else workload.length_reference(),
        capacity_search=search,
    )
    summary = measured.summary
    if search is not None:
        write_json(run_dir.capacity_json, final_json(search, summary["capacity"]))
    text = render_text(summary)
    write_json(run_dir.summary_json, summary)
    write_text(run_dir.report_txt, text)
    write_text(run_dir.report_html, render_html(summary, run, chart_data(measured, run_dir.requests_parquet, workers)))
    _record(run_dir, run, summary)
    return Merged(summary, text)


def _record(run_dir: RunDirectory, run: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """The run itself is whole without its line in the table of runs, so a fault there is only told."""
    try:
        record_experiment(run_dir, run, summary)
    except StoreError as error:
        sys.stderr.write(f"vllm-locust: {error}\n")


def _if_there(path: Path) -> Path | None:
    return path if path.exists() else None


def add_columns(rows: pa.RecordBatch, run: Mapping[str, Any], slos: list[Slo], clocks: WorkerClocks) -> pa.RecordBatch:
    """The rows on the common clock, with ``phase``, ``stage`` and ``good``."""
    rows = clocks.move(rows)
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


def _workload_again(run: Mapping[str, Any]) -> Workload | None:
    """The workload of the run; None where it cannot be read any more, or is another one now."""
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
    return workload if workload.fingerprint == run["workload"]["fingerprint"] else None
