"""What each container runs, run: an overlay as a user writes it, whole runs, and the exit code of the Job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from tests.k8s.cluster import NODE, Cluster
from tests.k8s.directories import K8S
from tests.k8s.kustomize import Resource, find, render
from tests.run.simulated import FAST, LocustRun, end_of, get, simserver, wait_for_text, wait_for_web

pytestmark = pytest.mark.timeout(180)

KEY = "sk-of-the-test"
LOAD = {
    "LOCUST_USERS": "4",
    "LOCUST_SPAWN_RATE": "4",
    "LOCUST_RUN_TIME": "4s",
    "VLLM_LOCUST_WARMUP_REQUESTS": "4",
    "VLLM_LOCUST_MAX_TOKENS": "20",
}
FILES = ("run.json", "summary.json", "report.txt", "report.html", "requests.parquet", "workers.parquet")


def overlay(directory: Path, of: str, load: dict[str, str]) -> list[Resource]:
    """As a user writes it: another load, by patches of the ConfigMap."""
    directory.mkdir(parents=True)
    patch = [{"op": "add", "path": f"/data/{name}", "value": value} for name, value in load.items()]
    spec = {
        "resources": [os.path.relpath(K8S / of, directory)],
        "patches": [{"target": {"kind": "ConfigMap", "name": "load"}, "patch": yaml.safe_dump(patch)}],
    }
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(spec))
    return render(directory)


@contextmanager
def cluster_of(directory: Path, of: str, secrets: list[Resource], load: dict[str, str]) -> Iterator[Cluster]:
    cluster = Cluster(directory, overlay(directory / "overlay", of, load) + secrets)
    try:
        cluster.start("Deployment", "valkey")
        cluster.await_ready("valkey")
        yield cluster
    finally:
        cluster.end()


def test_master_waits_for_valkey(tmp_path: Path, secrets: list[Resource]) -> None:
    cluster = Cluster(tmp_path / "c", render(K8S / "headless") + secrets)
    (waiting,) = cluster.init_commands("Job", "master")
    process = subprocess.Popen(waiting, start_new_session=True)
    try:
        time.sleep(1.5)
        assert process.poll() is None
        cluster.start("Deployment", "valkey")
        assert process.wait(20) == 0
    finally:
        cluster.end()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def output_of(process: subprocess.Popen[str], timeout_s: float = 30) -> str:
    output, _ = process.communicate(timeout=timeout_s)
    return output


def start_collector(cluster: Cluster) -> subprocess.Popen[str]:
    collector = cluster.start("DaemonSet", "gpu-collector", "--host-only")
    assert collector.stdout is not None
    for line in collector.stdout:
        if "Ctrl-C ends it" in line:
            return collector
    raise AssertionError("the collector did not start")


def test_headless_run_ends_with_the_exit_code_of_the_test(tmp_path: Path, secrets: list[Resource]) -> None:
    with (
        simserver(tmp_path, *FAST, VLLM_API_KEY=KEY) as server,
        cluster_of(tmp_path / "c", "headless", secrets, LOAD | {"LOCUST_HOST": server.url}) as cluster,
    ):
        collector = start_collector(cluster)
        master = cluster.start("Job", "master")
        count = find(render(K8S / "headless"), "Job", "worker")["spec"]["completions"]
        workers = [cluster.start("Job", "worker") for _ in range(count)]
        ended = end_of(master, tmp_path)
        said = [output_of(worker) for worker in workers]
        assert [worker.returncode for worker in workers] == [0] * count, said
        collector.send_signal(signal.SIGTERM)
        assert "0 missed" in output_of(collector)
        assert collector.returncode == 0
        (run_dir,) = cluster.runs
        truth = server.truth()
    run = LocustRun(ended.exit_code, ended.output, run_dir)
    # 4 where the machine is so busy that the generator itself says so.
    assert run.exit_code in (0, 4), run.output
    assert run.summary["exit_code"] == run.exit_code
    assert all((run_dir / name).exists() for name in FILES)
    assert sorted(row["request_id"] for row in run.requests()) == sorted(row["request_id"] for row in truth)
    assert {row["worker_id"] for row in run.requests()} == set(run.json("run.json")["workers"]["ids"])
    assert len(run.json("run.json")["workers"]["ids"]) == count
    for name in ("host", "server"):
        assert pq.read_table(run_dir / f"{name}.parquet").num_rows >= 4, "the rights are enough for it"
    assert {row["host"] for row in pq.read_table(run_dir / "host.parquet").to_pylist()} == {NODE}
    refusals = [line for line in "".join([run.output, *said]).splitlines() if "could not" in line or "NOPERM" in line]
    assert not refusals
    assert KEY not in run.output + "".join(
        path.read_text() for path in run_dir.glob("*.*t*") if path.suffix != ".parquet"
    )


def test_headless_run_that_cannot_begin_ends_with_2(tmp_path: Path, secrets: list[Resource]) -> None:
    with cluster_of(tmp_path / "c", "headless", secrets, LOAD | {"LOCUST_HOST": "http://127.0.0.1:1"}) as cluster:
        ended = end_of(cluster.start("Job", "master"), tmp_path)
    assert ended.exit_code == 2
    assert "http://127.0.0.1:1 cannot be reached" in ended.output


def test_headless_run_that_fails_ends_with_1_and_its_workers_with_0(tmp_path: Path, secrets: list[Resource]) -> None:
    with (
        simserver(tmp_path, *FAST, "--fault", "disconnect:share=1,after=2", VLLM_API_KEY=KEY) as server,
        cluster_of(tmp_path / "c", "headless", secrets, LOAD | {"LOCUST_HOST": server.url}) as cluster,
    ):
        master = cluster.start("Job", "master")
        workers = [cluster.start("Job", "worker") for _ in range(2)]
        ended = end_of(master, tmp_path)
        said = [output_of(worker) for worker in workers]
        (run_dir,) = cluster.runs
    assert ended.exit_code == 1, ended.output
    assert [worker.returncode for worker in workers] == [0, 0], said
    summary = LocustRun(ended.exit_code, ended.output, run_dir).summary
    assert "nothing_measured" in [reason["code"] for reason in summary["verdict"]["reasons"]]


def test_base_serves_the_web_ui_and_drains_when_its_pod_is_ended(tmp_path: Path, secrets: list[Resource]) -> None:
    with (
        simserver(tmp_path, *FAST, VLLM_API_KEY=KEY) as server,
        cluster_of(tmp_path / "c", "base", secrets, LOAD | {"LOCUST_HOST": server.url}) as cluster,
    ):
        master = cluster.start("Deployment", "master")
        workers = [cluster.start("Deployment", "worker") for _ in range(2)]
        wait_for_web(cluster.web, master)
        await_workers(cluster.web, 2)
        get(f"{cluster.web}/swarm", f"user_count=4&spawn_rate=4&run_time=60s&host={server.url}".encode())
        wait_for_text(server.truth_log, 100)
        master.send_signal(signal.SIGTERM)
        ended = end_of(master, tmp_path)
        said = [output_of(worker) for worker in workers]
        (run_dir,) = cluster.runs
        truth = server.truth()
    run = LocustRun(ended.exit_code, ended.output, run_dir)
    assert run.exit_code in (0, 4), run.output
    assert "stopped_early" in [reason["code"] for reason in run.summary["verdict"]["reasons"]]
    assert sorted(row["request_id"] for row in run.requests()) == sorted(row["request_id"] for row in truth), said


def await_workers(web: str, count: int) -> None:
    for _ in range(200):
        workers: list[dict[str, Any]] = json.loads(get(f"{web}/stats/requests")).get("workers", [])
        if [worker["state"] for worker in workers] == ["ready"] * count:
            return
        time.sleep(0.1)
    raise AssertionError(f"{count} workers did not get ready")
