"""What the merge knows to be in no file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.store.servers import request
from vllm_locust.run.common_clock import ClockTrack, WorkerClocks
from vllm_locust.run.results.recovery import completed
from vllm_locust.store.columns import RequestColumns
from vllm_locust.store.parts import PartStore
from vllm_locust.store.rundir import RunDirectory, write_json
from vllm_locust.store.schema import Batch, BatchHeader, BatchKind


def batch(seq: int, rows: int, lost_rows: int = 0) -> Batch:
    columns = RequestColumns()
    columns.append(request(0))
    for number in range(1, rows):
        columns.append(request(number))
    return Batch(BatchHeader("r", "w1", seq, BatchKind.REQUESTS, lost_rows), columns.to_arrow().slice(0, rows))


def missing(
    directory: Path,
    batches: list[Batch],
    flushed: dict[str, Any],
    sent: dict[str, int],
    refused: dict[str, int] | None = None,
) -> dict[str, int]:
    run_dir = RunDirectory(directory)
    parts = PartStore(run_dir.parts, "r")
    parts.write(batches)
    parts.close()
    if refused is not None:
        write_json(run_dir.recorder_json, {"refused": refused})
    run = {
        "run_id": "r",
        "ended_unix_ns": 1,
        "workers": {"ids": sorted({"w1", *sent}), "flushed": flushed, "missing": [], "sent": sent},
    }
    records: dict[str, int] = completed(run, {}, run_dir, WorkerClocks({}, None))["records"]
    return records


@pytest.mark.parametrize(
    ("requests", "last_seq", "spool", "expected"),
    [
        # Rows 2 + 3, and 4 that the worker gave up and said so.
        (9, 2, None, (4, 0, 0)),
        (12, 2, None, (7, 0, 0)),
        (5, 2, None, (4, 0, 0)),
        # Where batches are missing, their rows are not counted a second time.
        (12, 3, None, (4, 1, 0)),
        (12, 3, "/spool", (4, 0, 1)),
    ],
)
def test_requests_that_a_worker_counted_and_never_shipped_are_lost(
    tmp_path: Path, requests: int, last_seq: int, spool: str | None, expected: tuple[int, int, int]
) -> None:
    flushed = {"w1": {"last_seq": last_seq, "spool_path": spool, "requests": requests}}
    records = missing(tmp_path, [batch(1, 2), batch(2, 3, lost_rows=4)], flushed, {})
    assert records == dict(zip(("lost", "batches_lost", "spooled_batches"), expected, strict=True))


def test_of_a_worker_without_last_words_its_last_snapshot_counts(tmp_path: Path) -> None:
    records = missing(tmp_path, [batch(1, 2), batch(2, 3, lost_rows=4)], {}, {"w1": 11, "w2": 5})
    assert records == {"lost": 4 + 2 + 5, "batches_lost": 0, "spooled_batches": 0}


def test_its_last_batch_says_more_than_an_old_snapshot(tmp_path: Path) -> None:
    shipped = [replace(one, header=replace(one.header, announced=7)) for one in (batch(1, 3),)]
    assert missing(tmp_path, shipped, {}, {"w1": 5})["lost"] == 7 - 3


def test_a_worker_that_shipped_nothing_lost_all_of_it(tmp_path: Path) -> None:
    flushed = {"w1": {"last_seq": 0, "spool_path": None, "requests": 6}}
    assert missing(tmp_path, [], flushed, {})["lost"] == 6


@pytest.mark.parametrize(
    ("refused", "last_seq", "batches_lost"),
    [
        ({"unreadable": 2, "null_value": 1, "other_run": 5}, 1, 3),
        ({"other_run": 5}, 1, 0),
        # The batch that is missing is the one that was refused, again and again.
        ({"too_large": 4}, 2, 1),
    ],
)
def test_batches_that_the_recorder_could_not_read_are_lost(
    tmp_path: Path, refused: dict[str, int], last_seq: int, batches_lost: int
) -> None:
    flushed = {"w1": {"last_seq": last_seq, "spool_path": None, "requests": 2}}
    assert missing(tmp_path, [batch(1, 2)], flushed, {}, refused)["batches_lost"] == batches_lost


def test_a_worker_that_joined_later_and_was_lost_with_its_master_is_named(tmp_path: Path) -> None:
    """By what the master said when it came, by its batches, or by its measured clock alone."""
    run_dir = RunDirectory(tmp_path)
    parts = PartStore(run_dir.parts, "r")
    one = batch(1, 3)
    parts.write([one, replace(one, header=replace(one.header, worker_id="w2", announced=7))])
    parts.close()
    workers = {"expected": 1, "ids": ["w1"], "flushed": {}, "missing": [], "sent": {}}
    run = {"run_id": "r", "ended_unix_ns": None, "workers": workers, "config": {"window_ns": None}}
    words = {"run_id": "r", "worker_id": "w1", "last_seq": 1, "durable_seq": 1, "requests": 3}
    words |= {"unstorable_values": 0, "spool_path": None, "wall_clock_moved_ns": 0}
    control = {"flushed:w1": json.dumps(words), "workers": json.dumps(["w1", "w3"])}
    clocks = WorkerClocks({"w4": ClockTrack((1,), (0,), 1)}, None)
    found = completed(run, control, run_dir, clocks)
    assert found["workers"]["ids"] == ["w1", "w3", "w2", "w4"]
    assert found["workers"]["missing"] == ["w3", "w2", "w4"]
    assert found["workers"]["expected"] == 4
    assert found["records"] == {"lost": 7 - 3, "batches_lost": 0, "spooled_batches": 0}


@pytest.mark.parametrize("told", ["{", "7", '["", "\\u0000"]'])
def test_a_list_of_workers_that_is_none_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], told: str) -> None:
    workers = {"expected": 1, "ids": ["w1"], "flushed": {}, "missing": [], "sent": {}}
    run = {"run_id": "r", "ended_unix_ns": None, "workers": workers, "config": {"window_ns": None}}
    found = completed(run, {"workers": told}, RunDirectory(tmp_path), WorkerClocks({}, None))
    assert found["workers"]["missing"] == ["w1"]
    assert "control field 'workers' is not usable" in capsys.readouterr().err


def test_the_window_of_a_lost_master_reaches_to_the_end_of_the_last_request(tmp_path: Path) -> None:
    """Which is when it was given up where it got no answer."""
    start_ns = 1_800_000_000 * 10**9
    columns = RequestColumns()
    columns.append(replace(request(0), sent_unix_ns=start_ns + 1, done_ns=2 * 10**9, ended_ns=3 * 10**9))
    columns.append(replace(request(1), sent_unix_ns=start_ns + 2, done_ns=None, ended_ns=5 * 10**9))
    parts = PartStore(RunDirectory(tmp_path).parts, "r")
    parts.write([Batch(BatchHeader("r", "w1", 1, BatchKind.REQUESTS, 0), columns.to_arrow())])
    parts.close()
    workers = {"ids": ["w1"], "flushed": {}, "missing": [], "sent": {}}
    run = {"run_id": "r", "ended_unix_ns": None, "workers": workers, "config": {"window_ns": None}}
    control = {"window_start_unix_ns": str(start_ns)}
    window = completed(run, control, RunDirectory(tmp_path), WorkerClocks({}, None))["window"]
    assert window == {"start_unix_ns": start_ns, "end_unix_ns": start_ns + 2 + 5 * 10**9}
