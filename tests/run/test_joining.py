"""Workers that come late and workers that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.run.simulated import (
    CHAT,
    FAST,
    Distributed,
    LocustRun,
    end_of,
    free_port,
    simserver,
    start_locust,
    wait_for_text,
)

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
    assert set(json.loads(run.json("parts/control.json")["workers"])) == {row["worker_id"] for row in rows}, (
        "for a merge"
    )


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


SLOW = """
import os

import gevent

from vllm_locust import ChatUser
from vllm_locust.load import limits
from vllm_locust.run import workers
from locust import task

workers.READY_AT_THE_END_S = 30.0
problems = limits.problems


def slowly(*arguments):
    print("PREPARING", flush=True)
    gevent.sleep(float(os.environ["PREPARATION_S"]))
    return problems(*arguments)


limits.problems = slowly


class Reader(ChatUser):
    @task
    def read(self):
        self.ask(self.next_prompt())
"""


class SlowlyPrepared:
    """A master and workers that take as long to get ready as each is told to."""

    def __init__(self, directory: Path, url: str, length: str) -> None:
        self.directory = directory
        self._port = str(free_port())
        (directory / "slow.py").write_text(SLOW, encoding="utf-8")
        bind = (
            "--master",
            "--master-bind-host",
            "127.0.0.1",
            "--master-bind-port",
            self._port,
            "--expect-workers",
            "1",
        )
        flags = (*bind, *LOAD, *TOKENS, "-t", length, "--drain-timeout", "2s")
        self._processes = [self._start(url, *flags, OPENAI_API_KEY="key")]

    def _start(self, url: str | None, *flags: str, **extra: str) -> subprocess.Popen[str]:
        return start_locust(self.directory, url, *flags, locustfile=str(self.directory / "slow.py"), **extra)

    def add_worker(self, preparation_s: float, **extra: str) -> None:
        to_master = ("--worker", "--master-host", "127.0.0.1", "--master-port", self._port)
        self._processes.append(self._start(None, *to_master, PREPARATION_S=str(preparation_s), **extra))

    def end(self) -> LocustRun:
        try:
            run = end_of(self._processes[0], self.directory, 60)
            run.workers = [end_of(worker, self.directory, 20) for worker in self._processes[1:]]
        finally:
            for process in self._processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
        return run


def seconds_to_end(run: LocustRun) -> float:
    described = run.json("run.json")
    return float(described["ended_unix_ns"] - described["window"]["end_unix_ns"]) / 1e9


def test_a_worker_that_comes_while_another_is_prepared_takes_part(tmp_path: Path) -> None:
    """Locust gives it its part of the users: without it they would be missing from the load."""
    with simserver(tmp_path, *FAST) as server:
        load = SlowlyPrepared(tmp_path, server.url, "5s")
        load.add_worker(6, OPENAI_API_KEY="key")
        time.sleep(2)
        load.add_worker(0, OPENAI_API_KEY="key")
        run = load.end()
    assert len({row["worker_id"] for row in run.requests()}) == 2, [run.output, *run.worker_outputs]
    assert run.summary["totals"]["in_flight"]["max"] == 8


def test_the_end_does_not_wait_for_a_worker_that_was_refused(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        load = SlowlyPrepared(tmp_path, server.url, "8s")
        load.add_worker(0, OPENAI_API_KEY="key")
        wait_for_text(server.truth_log, 50)
        load.add_worker(0)
        run = load.end()
    assert "cannot join the run: this worker has no API key" in run.output
    assert len(run.json("run.json")["workers"]["missing"]) == 1
    assert seconds_to_end(run) < 20


def test_a_worker_that_gets_ready_when_the_run_is_over_is_told_so(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        load = SlowlyPrepared(tmp_path, server.url, "8s")
        load.add_worker(0, OPENAI_API_KEY="key")
        wait_for_text(server.truth_log, 50)
        load.add_worker(12, OPENAI_API_KEY="key")
        run = load.end()
    described = run.json("run.json")["workers"]
    assert "PREPARING" in run.worker_outputs[1]
    assert (described["expected"], described["missing"]) == (2, []), run.output
    assert seconds_to_end(run) < 25


def test_the_only_worker_that_leaves_is_named_as_the_reason_of_the_end(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        cluster = Distributed(tmp_path, server.url, 1, *LOAD[4:], *TOKENS, "-t", "60s", locustfile=CHAT)
        wait_for_text(server.truth_log, 60)
        cluster.workers[0].send_signal(signal.SIGTERM)
        run = cluster.end()
    (worker_id,) = run.json("run.json")["workers"]["ids"]
    assert run.json("run.json")["stopped_early"] == f"every worker has left the run before its end: {worker_id}"
    assert "used up" not in run.output
