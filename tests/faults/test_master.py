"""A master that is killed, a run directory that is full, and two runs at once on one Redis."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.cluster import SHORT, books, cluster, codes, seconds_since, server_host, wait_for_requests
from tests.faults.network import Network
from tests.faults.redis_host import RedisHost
from tests.run.simulated import LocustRun, end_of, start_locust
from tests.store.servers import wait_until

pytestmark = pytest.mark.timeout(150)

NOTHING_MISSING = {"lost": 0, "batches_lost": 0, "spooled_batches": 0}


def test_a_killed_master(network: Network, redis: RedisHost, tmp_path: Path) -> None:
    """Its recorder goes on until the workers are silent; a merge waits for that and completes the run."""
    with server_host(network, tmp_path) as server:
        load = ("--redis-url", redis.url, "-u", "20", "-r", "20", "-t", "60s", "--warmup-requests", "10", *SHORT)
        with cluster(network, tmp_path, server.url, *load) as run:
            run.start_workers()
            wait_for_requests(server, 80)
            run.master.kill()
            wait_for_requests(server, 40)
            for worker in run.workers.values():
                worker.send_signal(signal.SIGTERM)
            merged = run.merge("run")
            workers = [end_of(worker, tmp_path, 45) for worker in run.workers.values()]
            book = books(merged, server)
    assert [worker.exit_code for worker in workers] == [0, 0], [worker.output for worker in workers]
    assert not book.lost
    assert {row["outcome"] for row in book.rows.values()} == {"ok"}
    assert merged.exit_code in (0, 4), merged.output
    assert "stopped_early" in codes(merged)
    facts = merged.json("run.json")
    assert facts["stopped_early"] == "the master ended before the run did"
    assert facts["records"] == NOTHING_MISSING
    assert facts["workers"]["missing"] == []


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", f"vlfault{os.getpid()}", str(path)]
    subprocess.run(mount, check=True, timeout=10)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, timeout=10)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while file.write(b"x" * 65_536):
            pass


def test_a_full_run_directory(network: Network, redis: RedisHost, tmp_path: Path) -> None:
    """Two runs at once: over many hosts, and in one process with the embedded Valkey, which then outlives it."""
    run_dir = tmp_path / "run"
    load = ("-u", "10", "-r", "10", "-t", "12s", "--warmup-requests", "10", *SHORT)
    with small_disk(run_dir, "4m"), server_host(network, tmp_path) as server:
        with cluster(network, tmp_path, server.url, "--redis-url", redis.url, *load) as run:
            run.start_workers()
            flags = ("--headless", "--only-summary", "--run-dir", "run/alone", *load)
            alone = start_locust(tmp_path, server.url, *flags, on=network["client1"].on())
            for directory in (run_dir, run_dir / "alone"):
                wait_until((directory / "run.json").exists, 60)
            wait_for_requests(server, 60)
            filler = run_dir / "filler"
            with pytest.raises(OSError, match="No space left"):
                fill(filler)
            begin = time.monotonic()
            ended, ended_alone = run.end(), end_of(alone, tmp_path)
            assert seconds_since(begin) < 80
            assert f"vllm-locust merge run --redis-url {redis.url}" in told(ended)
            found = re.search(r"merge run/alone --redis-url (\S+)", told(ended_alone))
            assert found is not None
            with stopped_at_last(found[1]):
                for name, url in (("run", redis.url), ("run/alone", found[1])):
                    still_full = run.merge(name, "--redis-url", url)
                    assert told(still_full)
                filler.unlink()
                merged = run.merge("run", "--redis-url", redis.url)
                merged_alone = run.merge("run/alone", "--redis-url", found[1])
        merged_alone.run_dir = run_dir / "alone"
        server.stop()
        rows = [row for one in (merged, merged_alone) for row in one.requests()]
        assert sorted(row["request_id"] for row in rows) == sorted(row["request_id"] for row in server.truth())
        assert {row["outcome"] for row in rows} == {"ok"}
        for one in (merged, merged_alone):
            assert one.exit_code in (0, 4), one.output
            assert one.json("run.json")["records"] == NOTHING_MISSING
            assert one.json("run.json")["stopped_early"] is None


def told(run: LocustRun) -> str:
    """What a run that failed for want of space has said: not much, and no traceback."""
    assert run.exit_code == 1, run.output
    assert "Traceback" not in run.output
    lines = [line for line in run.output.splitlines() if "No space left on device" in line]
    assert 1 <= len(lines) <= 8, lines
    return run.output


@contextmanager
def stopped_at_last(url: str) -> Iterator[None]:
    """An embedded Valkey that was left by its run."""
    try:
        yield
    finally:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(url.removeprefix("unix://"))
            connection.sendall(b"SHUTDOWN NOSAVE\r\n")


def test_two_runs_at_once_on_one_redis(network: Network, redis: RedisHost, tmp_path: Path) -> None:
    with server_host(network, tmp_path) as server:
        load = ("--headless", "--only-summary", "--run-dir", "run", "--redis-url", redis.url, "-u", "8", "-r", "8")
        started = []
        for name in ("client1", "client2"):
            directory = tmp_path / name
            directory.mkdir()
            flags = (*load, "-t", "4s", "--warmup-requests", "8", *SHORT)
            started.append((start_locust(directory, server.url, *flags, on=network[name].on()), directory))
        runs: list[LocustRun] = [end_of(process, directory) for process, directory in started]
        server.stop()
        truth = [row["request_id"] for row in server.truth()]
    recorded = [[row["request_id"] for row in run.requests()] for run in runs]
    assert all(len(names) > 50 for names in recorded)
    assert sorted([*recorded[0], *recorded[1]]) == sorted(truth)
    begins, ends = ([run.json("run.json")["window"][key] for run in runs] for key in ("start_unix_ns", "end_unix_ns"))
    assert max(begins) < min(ends), "they were there at the same time"
    for run in runs:
        assert run.exit_code in (0, 4), run.output
        facts = run.json("run.json")
        assert facts["records"] == NOTHING_MISSING
        assert facts["recorder"]["refused"] == {}
        (worker,) = facts["workers"]["ids"]
        assert {row["worker_id"] for row in run.requests()} == {worker}
