"""Workers that come late and workers that are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.run.simulated import FAST, end_of, free_port, simserver, start_locust, wait_for_text

pytestmark = pytest.mark.timeout(120)

LOAD = ("--headless", "--only-summary", "--run-dir", "run", "-u", "8", "-r", "8", "--warmup-requests", "8")
TOKENS = ("--max-tokens", "20", "--force-length")


def test_a_worker_that_joins_late_takes_part(tmp_path: Path) -> None:
    port = str(free_port())
    to_master = ("--worker", "--master-host", "127.0.0.1", "--master-port", port)
    with simserver(tmp_path, *FAST) as server:
        bind = ("--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--expect-workers", "1")
        master = start_locust(tmp_path, server.url, *bind, *LOAD, *TOKENS, "-t", "10s")
        first = start_locust(tmp_path, None, *to_master)
        wait_for_text(server.truth_log, 100)
        second = start_locust(tmp_path, None, *to_master)
        run = end_of(master, tmp_path)
        outputs = [end_of(worker, tmp_path, 20).output for worker in (first, second)]
        server.stop()
        truth = {row["request_id"] for row in server.truth()}
    rows = run.requests()
    assert sorted(row["request_id"] for row in rows) == sorted(truth), run.output
    assert len({row["worker_id"] for row in rows}) == 2, [run.output, *outputs]
    assert run.json("run.json")["workers"]["expected"] == 2


def test_a_killed_worker_is_named_and_what_it_had_confirmed_is_kept(tmp_path: Path) -> None:
    port = str(free_port())
    to_master = ("--worker", "--master-host", "127.0.0.1", "--master-port", port)
    with simserver(tmp_path, *FAST) as server:
        bind = ("--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--expect-workers", "2")
        master = start_locust(tmp_path, server.url, *bind, *LOAD, *TOKENS, "-t", "8s", "--drain-timeout", "5s")
        workers = [start_locust(tmp_path, None, *to_master) for _ in range(2)]
        wait_for_text(server.truth_log, 600)
        os.killpg(workers[0].pid, signal.SIGKILL)
        run = end_of(master, tmp_path)
        for worker in workers:
            end_of(worker, tmp_path, 20)
        server.stop()
        truth = {row["request_id"]: row for row in server.truth()}
    rows = run.requests()
    assert run.exit_code == 1, run.output
    assert len(rows) == len({row["request_id"] for row in rows}) > 300
    assert {row["request_id"] for row in rows} <= set(truth)
    codes = [reason["code"] for reason in run.summary["verdict"]["reasons"]]
    assert "workers_missing" in codes
    by_worker = {row["worker_id"] for row in rows}
    assert len(by_worker) == 2, "what the killed worker had shipped is there"
    finished_elsewhere = sum(row["outcome"] == "ok" for row in truth.values()) - len(rows)
    # Batches leave a worker once a second: at most about that much of its work is lost with it, and it is counted.
    assert 0 <= finished_elsewhere <= 300


def test_a_worker_that_is_told_to_leave_is_named(tmp_path: Path) -> None:
    port = str(free_port())
    to_master = ("--worker", "--master-host", "127.0.0.1", "--master-port", port)
    with simserver(tmp_path, *FAST) as server:
        bind = ("--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--expect-workers", "2")
        master = start_locust(tmp_path, server.url, *bind, *LOAD, *TOKENS, "-t", "6s")
        workers = [start_locust(tmp_path, None, *to_master) for _ in range(2)]
        wait_for_text(server.truth_log, 300)
        workers[0].terminate()
        run = end_of(master, tmp_path)
        for worker in workers:
            end_of(worker, tmp_path, 20)
        server.stop()
        truth = {row["request_id"] for row in server.truth()}
    assert {row["request_id"] for row in run.requests()} == truth, "nothing is lost when it leaves in order"
    assert len(run.json("run.json")["workers"]["missing"]) == 1
    assert "workers_missing" in [reason["code"] for reason in run.summary["verdict"]["reasons"]]
    assert run.exit_code == 1, run.output
