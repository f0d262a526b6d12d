"""``vllm-locust merge`` completes what a master, a recorder or a Redis could not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.run.simulated import (
    FAST,
    Distributed,
    LocustRun,
    end_of,
    environment,
    free_port,
    planned_unix_ns,
    run_locust,
    simserver,
    start_locust,
    wait_for_text,
)
from tests.store.servers import Server, request
from vllm_locust.store.columns import RequestColumns
from vllm_locust.store.schema import BatchHeader, BatchKind, encode_batch
from vllm_locust.store.spool import Spool, spool_path

pytestmark = pytest.mark.timeout(180)

LOAD = ("-u", "8", "-r", "8", "-t", "60s", "--warmup-requests", "8", "--max-tokens", "20", "--force-length")
RESULTS = ("run.json", "requests.parquet", "workers.parquet", "summary.json", "report.txt", "report.html")


def merge(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_locust", "merge", *arguments]
    return subprocess.run(
        command, cwd=directory, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )


def results(run_dir: Path) -> dict[str, bytes]:
    return {name: (run_dir / name).read_bytes() for name in RESULTS}


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def start_distributed(
    directory: Path, url: str, redis: Server
) -> tuple[subprocess.Popen[str], list[subprocess.Popen[str]]]:
    port = str(free_port())
    flags = ("--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--expect-workers", "2")
    common = ("--headless", "--only-summary", "--run-dir", "run", "--redis-url", redis.url)
    master = start_locust(directory, url, *flags, *common, *LOAD)
    worker_flags = ("--worker", "--master-host", "127.0.0.1", "--master-port", port)
    return master, [start_locust(directory, None, *worker_flags) for _ in range(2)]


def wait_for_window(redis: Server, run_dir: Path) -> str:
    """The run's id, once its measurement window is some seconds old."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if (run_dir / "run.json").exists():
            run_id: str = json.loads((run_dir / "run.json").read_text())["run_id"]
            store = redis.store(run_id)
            try:
                if "window_start_unix_ns" in store.read_control():
                    time.sleep(2)
                    return run_id
            finally:
                store.close()
        time.sleep(0.1)
    raise AssertionError("the window did not open")


def kill_all(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.mark.parametrize("recorder_dies", [True, False], ids=["with its recorder", "without its recorder"])
def test_a_run_whose_master_was_killed_is_completed(tmp_path: Path, recorder_dies: bool) -> None:
    redis = Server()
    with simserver(tmp_path, *FAST) as server:
        master, workers = start_distributed(tmp_path, server.url, redis)
        try:
            run_id = wait_for_window(redis, tmp_path / "run")
            recorders = children_of(master.pid)
            os.kill(master.pid, signal.SIGKILL)
            master.wait()
            for pid in recorders if recorder_dies else ():
                os.kill(pid, signal.SIGKILL)
            for worker in workers:
                worker.send_signal(signal.SIGTERM)
            if recorder_dies:
                # The workers wait until what they have sent is durable: the merge's own recorder is who says so.
                time.sleep(2)
                first = merge(tmp_path, run_id, "--redis-url", redis.url, "--run-dir", "run")
                assert "workers were missing" in first.stdout, first.stderr
            ended = [end_of(worker, tmp_path, 60) for worker in workers]
            assert [one.exit_code for one in ended] == [0, 0], [one.output for one in ended]
            # A recorder that is left alone has all in the run directory, once the workers have been silent for a while.
            left = ("--redis-url", redis.url) if recorder_dies else ()
            merged = merge(tmp_path, run_id, *left, "--run-dir", "run")
            assert merged.stdout, merged.stderr
            again = results(tmp_path / "run")
            assert merge(tmp_path, "run").returncode == merged.returncode
            assert results(tmp_path / "run") == again, "a merge can be repeated"
        finally:
            kill_all([master, *workers])
            redis.close()
            assert master.stdout is not None
            master.stdout.close()
        server.stop()
        sent = [row["request_id"] for row in server.truth()]
    run = LocustRun(merged.returncode, merged.stdout + merged.stderr, tmp_path / "run")
    recorded = [row["request_id"] for row in run.requests()]
    assert len(sent) > 50
    assert sorted(recorded) == sorted(sent), run.output
    assert_told(run)


def assert_told(run: LocustRun) -> None:
    """Exit code 4 only where the machine is so busy that the generator says so."""
    assert run.exit_code in (0, 4), run.output
    facts, summary = run.json("run.json"), run.summary
    assert facts["stopped_early"] == "the master ended before the run did"
    assert "stopped_early" in [reason["code"] for reason in summary["verdict"]["reasons"]]
    assert facts["records"] == {"lost": 0, "batches_lost": 0, "spooled_batches": 0}
    assert facts["workers"]["missing"] == []
    window = facts["window"]
    ends = [row["sent_unix_ns"] + row["done_ns"] for row in run.requests()]
    assert window["end_unix_ns"] == max(ends) > window["start_unix_ns"]
    phases = {phase: sum(row["phase"] == phase for row in run.requests()) for phase in ("warmup", "window", "drain")}
    assert phases["warmup"] >= 8
    assert summary["stages"][0]["requests"]["ok"] == phases["window"] > 20
    assert phases["drain"] == 0


def test_an_open_loop_whose_master_was_killed_keeps_its_plan(tmp_path: Path) -> None:
    """Window, stages, schedule and shares were published before the load began."""
    redis = Server()
    with simserver(tmp_path, *FAST) as server:
        load = ("--rate-stages", "30:1s,30-90:60s", "--warmup-requests", "5", "--max-tokens", "5", "--force-length")
        test = Distributed(tmp_path, server.url, 2, "--redis-url", redis.url, "-u", "40", *load)
        try:
            wait_for_text(server.truth_log, 80)
            os.killpg(test.master.pid, signal.SIGKILL)
            for worker in test.workers:
                worker.send_signal(signal.SIGTERM)
            ended = test.end()
            merged = merge(tmp_path, "run")
            assert merged.stdout, merged.stderr
        finally:
            redis.close()
        server.stop()
        sent = [row["request_id"] for row in server.truth()]
    assert [worker.exit_code for worker in ended.workers] == [0, 0], ended.worker_outputs
    run = LocustRun(merged.returncode, merged.stdout + merged.stderr, tmp_path / "run")
    described, rows = run.json("run.json"), run.requests()
    assert sorted(row["request_id"] for row in rows) == sorted(sent), run.output
    plan, window = described["schedule"], described["window"]
    assert window["start_unix_ns"] == plan["t0_unix_ns"] + plan["warmup_ns"]
    hold, ramp = described["stages"]
    assert (hold["start_unix_ns"], hold["offered_rps"]) == (window["start_unix_ns"], 30)
    assert hold["end_unix_ns"] == ramp["start_unix_ns"] == window["start_unix_ns"] + 10**9
    assert ramp["end_unix_ns"] == window["end_unix_ns"]
    assert 30 < ramp["offered_rps"] < 40
    planned = planned_unix_ns(run)
    assert all(row["scheduled_unix_ns"] == planned[row["arrival"]] for row in rows if row["arrival"] < len(planned))
    assert [share["share"] for share in described["shares"]] == [0, 1]
    assert described["slots"] == 40
    assert described["stopped_early"] == "the master ended before the run did"


def spool_of(directory: Path, run_id: str, numbers: range) -> list[str]:
    """A spool of the worker ``far`` with one batch of requests for each number; the ids of the requests."""
    spool = Spool(spool_path(directory, run_id, "far"))
    records = [request(number, "far") for number in numbers]
    payloads = []
    for seq, record in enumerate(records, 1):
        columns = RequestColumns()
        columns.append(record)
        payloads.append(encode_batch(BatchHeader(run_id, "far", seq, BatchKind.REQUESTS, 0), columns.to_arrow()))
    spool.append(payloads)
    spool.close(remove=False)
    return [record.request_id for record in records]


def test_spools_are_taken_in(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        flags = ("-u", "2", "-r", "2", "-t", "1s", "--warmup-requests", "0", "--max-tokens", "5")
        run = run_locust(tmp_path, server.url, *flags)
    before = [row["request_id"] for row in run.requests()]
    facts = run.json("run.json")
    assert facts["records"] == {"lost": 0, "batches_lost": 0, "spooled_batches": 0}
    # As if one more worker had taken part, whose host could not reach Redis.
    words: dict[str, Any] = {"run_id": facts["run_id"], "worker_id": "far", "unstorable_values": 0}
    words |= {"last_seq": 3, "durable_seq": 0, "requests": 3, "spool_path": "/elsewhere", "wall_clock_moved_ns": 0}
    facts["workers"]["flushed"]["far"] = words
    (run.run_dir / "run.json").write_text(json.dumps(facts))
    assert merge(tmp_path, "run").returncode == 1
    assert run.json("run.json")["records"]["spooled_batches"] == 3
    assert "merge RUN --spool DIR" in run.summary["verdict"]["reasons"][0]["sentence"]

    spooled = spool_of(tmp_path / "copied", facts["run_id"], range(3))
    merged = merge(tmp_path, "run", "--spool", "copied", "--spool", "copied")
    assert merged.returncode in (0, 4), merged.stderr
    assert sorted(row["request_id"] for row in run.requests()) == sorted([*before, *spooled])
    assert run.json("run.json")["records"] == {"lost": 0, "batches_lost": 0, "spooled_batches": 0}

    # One in the run directory itself is found without being named; a batch that was there already counts once.
    spool_of(run.run_dir / "spool", facts["run_id"], range(4))
    assert merge(tmp_path, "run").returncode == merged.returncode
    assert sorted(row["request_id"] for row in run.requests()) == sorted([*before, *spooled, "far/3"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("/nothing",), "merge /nothing: /nothing holds no run.json"),
        (("runs/nope",), "merge runs/nope: runs/nope holds no run.json"),
        (("20260101-000000-abcdef",), "runs/20260101-000000-abcdef holds no run.json"),
        (("other", "--run-dir", "run"), "run holds the run some-id; give that id or another --run-dir"),
        (("run", "--spool", "empty"), "--spool empty holds no spool of the run some-id"),
        (("run", "--redis-url", "redis://:secret@h/0"), "--redis-password-file"),
        (("no run", "--redis-url", "{redis}"), "'no run' cannot name a run"),
        (("unknown", "--redis-url", "{redis}"), "knows no such run; check the id and --redis-url"),
    ],
)
def test_what_cannot_be_merged_is_bad_usage(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"run_id": "some-id"}')
    redis = Server()
    try:
        merged = merge(tmp_path, *(argument.format(redis=redis.url) for argument in arguments))
    finally:
        redis.close()
    assert merged.returncode == 2, merged.stderr
    assert words in merged.stderr
    assert "Traceback" not in merged.stderr
    assert "secret" not in merged.stderr
    assert not (tmp_path / "runs").exists()
