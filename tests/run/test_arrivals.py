"""The schedule held against the records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.store.servers import request
from vllm_locust.arrival import ArrivalProcess, Piece, Schedule
from vllm_locust.record import ArrivalRecord, RequestRecord
from vllm_locust.run.common_clock import WorkerClocks
from vllm_locust.run.results.arrivals import Placed, account_for_arrivals, reconcile
from vllm_locust.run.results.merge import add_columns
from vllm_locust.run.results.recovery import MASTER_ENDED
from vllm_locust.store.columns import RequestColumns, arrivals_to_arrow
from vllm_locust.store.finalize import finalize
from vllm_locust.store.parts import PartStore
from vllm_locust.store.rundir import RunDirectory
from vllm_locust.store.schema import Batch, BatchHeader, BatchKind

SECOND = 1_000_000_000
T0 = 1_800_000_000 * SECOND
SCHEDULE = Schedule(ArrivalProcess.CONSTANT, seed=1, pieces=[Piece(10 * SECOND, 2.0, 2.0), Piece(5 * SECOND, 2.0, 2.0)])
"""Arrival k is due k/2 seconds after T0; 2 s of warm-up, then stages of 8 s and 5 s."""


def run_json(**changed: Any) -> dict[str, Any]:
    stages = [(0, 2, 10), (1, 10, 15)]
    return {
        "window": {"start_unix_ns": T0 + 2 * SECOND, "end_unix_ns": T0 + 15 * SECOND},
        "stages": [
            {"stage": n, "start_unix_ns": T0 + start * SECOND, "end_unix_ns": T0 + end * SECOND}
            for n, start, end in stages
        ],
        "stopped_early": None,
        "schedule": SCHEDULE.to_json() | {"t0_unix_ns": T0, "shares": 2},
        "shares": [
            {"share": 0, "worker_id": "w0", "first_arrival": 0},
            {"share": 1, "worker_id": "w1", "first_arrival": 0},
            {"share": 1, "worker_id": "w2", "first_arrival": 25},
        ],
        **changed,
    }


def record(number: int, worker_id: str = "w0") -> RequestRecord:
    made = request(number, worker_id)
    made.arrival, made.scheduled_unix_ns = number, T0 + number * SECOND // 2
    return made


def account(
    directory: Path, run: dict[str, Any], records: list[RequestRecord], dropped: list[int], trace: Any = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    run_dir = RunDirectory(directory / "run")
    run_dir.path.mkdir()
    columns = RequestColumns()
    for one in records:
        columns.append(one)
    store = PartStore(run_dir.parts, "run")
    batches = [Batch(BatchHeader("run", "w0", 1, BatchKind.REQUESTS), columns.to_arrow())]
    if dropped:
        unsent = arrivals_to_arrow([ArrivalRecord(k, f"w{k % 2}", T0 + k * SECOND // 2, "dropped") for k in dropped])
        batches.append(Batch(BatchHeader("run", "w0", 2, BatchKind.ARRIVALS), unsent))
    store.write(batches)
    store.close()
    clocks = WorkerClocks({}, None)
    finalize(
        run_dir.parts, BatchKind.REQUESTS, run_dir.requests_parquet, lambda rows: add_columns(rows, run, [], clocks)
    )
    told = account_for_arrivals(run, run_dir, trace)
    rows = pq.read_table(run_dir.arrivals_parquet).to_pylist() if run_dir.arrivals_parquet.exists() else []
    return told, rows


def test_what_is_neither_sent_nor_dropped_is_lost(tmp_path: Path) -> None:
    records = [record(k) for k in range(30) if k not in (1, 7, 20, 23, 25)]
    told, rows = account(tmp_path, run_json(), records, dropped=[7, 20])
    assert told["arrivals"] == {"planned": 30, "dropped": 2, "lost": 3, "doubled": 0, "misplaced": 0}
    seen = [(row["number"], row["worker_id"], row["status"], row["phase"], row["stage"]) for row in rows]
    assert seen == [
        (1, "w1", "lost", "warmup", None),
        (7, "w1", "dropped", "window", 0),
        (20, "w0", "dropped", "window", 1),
        (23, "w1", "lost", "window", 1),
        (25, "w2", "lost", "window", 1),
    ]
    assert [row["scheduled_unix_ns"] for row in rows] == [T0 + row["number"] * SECOND // 2 for row in rows]
    counts = [(stage["dropped_arrivals"], stage["lost_arrivals"]) for stage in told["stages"]]
    assert counts == [(1, 0), (1, 2)]


def test_a_run_without_a_loss_has_an_empty_table(tmp_path: Path) -> None:
    told, rows = account(tmp_path, run_json(), [record(k) for k in range(30)], dropped=[])
    assert told["arrivals"] == {"planned": 30, "dropped": 0, "lost": 0, "doubled": 0, "misplaced": 0}
    assert rows == []


def test_doubled_and_misplaced_arrivals_are_counted(tmp_path: Path) -> None:
    records = [record(k) for k in range(30)]
    records[4].scheduled_unix_ns = T0 + 2 * SECOND + 1
    told, _ = account(tmp_path, run_json(), [*records, record(9, "w2")], dropped=[3])
    assert told["arrivals"] == {"planned": 30, "dropped": 1, "lost": 0, "doubled": 2, "misplaced": 1}


def test_after_an_early_end_nothing_more_is_planned(tmp_path: Path) -> None:
    """Arrivals that were due between the end of the window and the workers' hearing of it belong to the drain."""
    window = {"start_unix_ns": T0 + 2 * SECOND, "end_unix_ns": T0 + 12 * SECOND}
    run = run_json(window=window, stopped_early="Ctrl-C")
    told, rows = account(tmp_path, run, [record(k) for k in range(26) if k != 23], dropped=[])
    assert (told["arrivals"]["planned"], [row["number"] for row in rows]) == (24, [23])


def test_without_its_master_a_run_ends_with_the_last_arrival_on_record(tmp_path: Path) -> None:
    run = run_json(stopped_early=MASTER_ENDED)
    told, rows = account(tmp_path, run, [record(k) for k in range(20) if k != 8], dropped=[])
    assert (told["arrivals"]["planned"], [row["number"] for row in rows]) == (20, [8])


def test_a_run_that_ended_in_its_warmup_has_lost_nothing(tmp_path: Path) -> None:
    told, rows = account(tmp_path, run_json(window=None, stages=[]), [record(0), record(2)], dropped=[1])
    assert told == {
        "arrivals": {"planned": 0, "dropped": 1, "lost": 0, "doubled": 0, "misplaced": 0},
        "stages": [],
    }
    assert [(row["number"], row["phase"]) for row in rows] == [(1, "warmup")]


def test_a_closed_loop_has_no_arrivals(tmp_path: Path) -> None:
    told, rows = account(tmp_path, run_json(schedule=None), [request(1)], dropped=[])
    assert (told, rows) == ({"arrivals": None}, [])


@pytest.mark.parametrize("readable", [True, False])
def test_a_trace_is_held_against_its_own_times(tmp_path: Path, readable: bool) -> None:
    offsets = np.arange(30) * SECOND // 2
    trace = Schedule(ArrivalProcess.TRACE, seed=1, trace_offsets_ns=offsets)
    run = run_json(schedule=trace.to_json() | {"t0_unix_ns": T0, "shares": 2})
    told, rows = account(tmp_path, run, [record(k) for k in range(29)], [], offsets if readable else None)
    assert told["arrivals"]["lost"] == (1 if readable else None)
    assert [row["number"] for row in rows] == ([29] if readable else [])


def test_an_arrival_beyond_the_window_must_be_due_beyond_it() -> None:
    planned = np.array([0, 10, 20])
    late = reconcile(planned, Placed(np.array([0, 1, 2, 3]), np.array([0, 10, 20, 30])))
    wrong = reconcile(planned, Placed(np.array([0, 1, 2, 3]), np.array([0, 10, 20, 5])))
    assert (late.misplaced, wrong.misplaced) == (0, 1)
