"""An open loop's schedule held against its records: every planned arrival was sent, was dropped, or is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from vllm_locust.arrival import ArrivalProcess, Schedule
from vllm_locust.phases import PHASES, Phase, assign_phase, interval_index
from vllm_locust.run.results.recovery import MASTER_ENDED
from vllm_locust.store.finalize import read_rows, write_table
from vllm_locust.store.rundir import RunDirectory
from vllm_locust.store.schema import BatchKind

Integers = npt.NDArray[np.int64]

DROPPED: Final = "dropped"
LOST: Final = "lost"


@dataclass(frozen=True, slots=True)
class Placed:
    """Arrivals on record: their numbers in the schedule, and when they were due by the record."""

    numbers: Integers
    scheduled_unix_ns: Integers

    @classmethod
    def of(cls, rows: pa.Table, number: str) -> Placed:
        known = rows.filter(rows.column(number).is_valid())
        return cls(known.column(number).to_numpy(), known.column("scheduled_unix_ns").to_numpy())


@dataclass(frozen=True, slots=True)
class Reconciled:
    planned: int
    lost: Integers
    """Numbers of the arrivals that are neither on record nor dropped."""
    doubled: int
    misplaced: int


def reconcile(planned_unix_ns: Integers, on_record: Placed) -> Reconciled:
    """``planned_unix_ns[k]`` is when arrival k is due, up to the end of the window."""
    numbers, times = np.unique(on_record.numbers, return_counts=True)
    within = on_record.numbers < len(planned_unix_ns)
    expected = planned_unix_ns[on_record.numbers[within]]
    misplaced = int((on_record.scheduled_unix_ns[within] != expected).sum())
    if len(planned_unix_ns):
        misplaced += int((on_record.scheduled_unix_ns[~within] < planned_unix_ns[-1]).sum())
    return Reconciled(
        planned=len(planned_unix_ns),
        lost=np.setdiff1d(np.arange(len(planned_unix_ns)), numbers, assume_unique=True),
        doubled=int((times > 1).sum()),
        misplaced=misplaced,
    )


def account_for_arrivals(
    run: Mapping[str, Any], run_dir: RunDirectory, trace_offsets_ns: Integers | None
) -> dict[str, Any]:
    """Write ``arrivals.parquet``; what ``run.json`` says of it: ``arrivals``, and the missed ones of each stage.

    Nothing in a closed loop. A trace's offsets are None where its workload cannot be read any more.
    """
    schedule = run.get("schedule")
    if schedule is None:
        return {"arrivals": None}
    sent = Placed.of(pq.read_table(run_dir.requests_parquet, columns=["arrival", "scheduled_unix_ns"]), "arrival")
    dropped_rows = read_rows(run_dir.parts, BatchKind.ARRIVALS)
    dropped = Placed.of(dropped_rows, "number")
    on_record = Placed(
        np.concatenate([sent.numbers, dropped.numbers]),
        np.concatenate([sent.scheduled_unix_ns, dropped.scheduled_unix_ns]),
    )
    planned_unix_ns = _planned_unix_ns(run, on_record, trace_offsets_ns)
    found = None if planned_unix_ns is None else reconcile(planned_unix_ns, on_record)
    missed = _in_phases(_missed_rows(run, dropped_rows, planned_unix_ns, found), run)
    write_table(run_dir.arrivals_parquet, missed)
    return {
        "arrivals": {
            "planned": None if found is None else found.planned,
            DROPPED: dropped_rows.num_rows,
            LOST: None if found is None else len(found.lost),
            "doubled": 0 if found is None else found.doubled,
            "misplaced": 0 if found is None else found.misplaced,
        },
        "stages": _with_missed(run["stages"], missed),
    }


def _planned_unix_ns(run: Mapping[str, Any], on_record: Placed, trace: Integers | None) -> Integers | None:
    """When each arrival is due, up to the end of the window. None where that cannot be known."""
    schedule, window = run["schedule"], run["window"]
    if schedule["process"] == ArrivalProcess.TRACE and trace is None:
        return None
    t0_unix_ns = int(schedule["t0_unix_ns"])
    if window is None:
        # What was due in a warm-up that did not end is no loss.
        return np.empty(0, np.int64)
    until_unix_ns = int(window["end_unix_ns"])
    if run["stopped_early"] == MASTER_ENDED:
        # Nobody told the workers when to stop: they did when the last arrival on record had been sent.
        until_unix_ns = min(until_unix_ns, int(on_record.scheduled_unix_ns.max(initial=t0_unix_ns - 1)) + 1)
    planned = Schedule.from_json(schedule, trace_offsets_ns=trace)
    return t0_unix_ns + planned.offsets_ns(max(0, until_unix_ns - t0_unix_ns))


def _missed_rows(
    run: Mapping[str, Any], dropped: pa.Table, planned_unix_ns: Integers | None, found: Reconciled | None
) -> pa.Table:
    rows = dropped
    if found is not None and planned_unix_ns is not None:
        owners = [_owner(run, number) for number in found.lost.tolist()]
        lost = {
            "number": found.lost,
            "worker_id": owners,
            "scheduled_unix_ns": planned_unix_ns[found.lost],
            "status": [LOST] * len(owners),
        }
        rows = pa.concat_tables([rows, pa.table(lost, schema=rows.schema)])
    return rows.sort_by([("number", "ascending"), ("worker_id", "ascending")])


def _owner(run: Mapping[str, Any], number: int) -> str:
    """Of the arrival's share: whoever took it last before the arrival."""
    shares = run["schedule"]["shares"]
    owners = [
        owner["worker_id"]
        for owner in run["shares"]
        if owner["share"] == number % shares and owner["first_arrival"] <= number
    ]
    return str(owners[-1])


def _in_phases(rows: pa.Table, run: Mapping[str, Any]) -> pa.Table:
    due = rows.column("scheduled_unix_ns").to_numpy()
    window = run["window"] or {"start_unix_ns": None, "end_unix_ns": None}
    phase = assign_phase(due, window["start_unix_ns"], window["end_unix_ns"])
    stages = run["stages"]
    index, inside = interval_index(
        due, [stage["start_unix_ns"] for stage in stages], [stage["end_unix_ns"] for stage in stages]
    )
    numbers = np.array([stage["stage"] for stage in stages] or [0], dtype=np.int32)
    in_window = phase == PHASES.index(Phase.WINDOW)
    names = pa.array([str(PHASES[code]) for code in phase.tolist()], pa.string())
    return rows.append_column("phase", names).append_column(
        "stage", pa.array(numbers[index], mask=~(inside & in_window))
    )


def _with_missed(stages: list[dict[str, Any]], missed: pa.Table) -> list[dict[str, Any]]:
    pairs = zip(missed.column("stage").to_pylist(), missed.column("status").to_pylist(), strict=True)
    counts = Counter(pairs)
    return [
        {**stage, **{f"{status}_arrivals": counts[stage["stage"], status] for status in (DROPPED, LOST)}}
        for stage in stages
    ]
