"""Collectors beside a whole run: their rows on the common clock, cut to the window, in tables, summary and verdict."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.collect.fake_collector import POWER_W
from tests.run.simulated import FAST, ROOT, end_of, environment, simserver, start_locust
from tests.store.servers import Server, wait_until

pytestmark = pytest.mark.timeout(180)

MARGIN_NS = 5_000_000_000


@pytest.fixture
def redis() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def start_collector(redis: Server, *uuids: str, **extra: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.collect.fake_collector", redis.url, *uuids],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(**extra),
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "Ctrl-C ends it" in line:
            return process
    raise AssertionError("the collector did not start")


def end(process: subprocess.Popen[str]) -> str:
    process.terminate()
    _, said = process.communicate(timeout=20)
    assert process.returncode == 0, said
    return said


def window_has_begun(redis: Server) -> bool:
    controls = redis.command("KEYS", "vllm_locust:1:run:*:control")
    assert isinstance(controls, list)
    return any(redis.command("HGET", control.decode(), "window_start_unix_ns") for control in controls)


def test_gpus_beside_a_run(redis: Server, tmp_path: Path) -> None:
    # One collector's wall clock is an hour ahead; the other ends soon after the window has begun.
    ahead = start_collector(redis, "GPU-1", "GPU-2", VLLM_LOCUST_TEST_CLOCK="offset=3600s")
    dying = start_collector(redis, "GPU-3")
    try:
        wait_until(lambda: redis.command("EXISTS", "vllm_locust:1:telemetry:gpu") == 1)
        with simserver(tmp_path, *FAST) as server:
            flags = ("-u", "4", "-r", "4", "-t", "8s", "--warmup-requests", "4", "--max-tokens", "20")
            common = ("--headless", "--only-summary", "--run-dir", "run", "--redis-url", redis.url)
            load = start_locust(tmp_path, server.url, *common, *flags)
            wait_until(lambda: window_has_begun(redis), 60)
            time.sleep(1.0)
            end(dying)
            run = end_of(load, tmp_path)
    finally:
        for process in (ahead, dying):
            if process.poll() is None:
                said = end(process)
    assert run.exit_code in (0, 4), run.output

    described = run.json("run.json")
    window = described["window"]
    rows = pq.read_table(run.run_dir / "gpu.parquet").to_pylist()
    times = {uuid: [row["time_unix_ns"] for row in rows if row["gpu_uuid"] == uuid] for uuid in ("GPU-1", "GPU-2")}
    length_s = (window["end_unix_ns"] - window["start_unix_ns"]) / 1e9
    for found in times.values():
        inside = [at for at in found if window["start_unix_ns"] <= at < window["end_unix_ns"]]
        assert abs(len(inside) - 10 * length_s) <= 8, "ten a second, whatever that clock says"
        assert window["start_unix_ns"] - MARGIN_NS <= min(found)
        assert max(found) < window["end_unix_ns"] + MARGIN_NS
        assert sorted(found) == found
    (row, *_) = [one for one in rows if one["gpu_uuid"] == "GPU-1" and one["tensor_activity"] is not None]
    assert (row["gpu_index"], row["gpu_name"], row["power_w"]) == (0, "NVIDIA H200", POWER_W)
    assert (row["tensor_activity"], row["throttle_reasons"]) == (pytest.approx(0.93), ["sw_power_cap"])

    sources = described["telemetry"]["sources"]
    assert sorted(round((source["offset_ns"] or 0) / 1e9) for source in sources) == [-3600, 0]
    assert all(source["batches_missing"] == 0 for source in sources)
    assert {gpu["gpu_uuid"] for gpu in described["telemetry"]["gpus"]} == {"GPU-1", "GPU-2", "GPU-3"}

    (stage,) = run.summary["stages"]
    by_uuid = {gpu["gpu_uuid"]: gpu for gpu in stage["gpu"]["gpus"]}
    assert by_uuid["GPU-2"]["utilization"] == {"mean": 1.0, "p50": 1.0, "p95": 1.0, "max": 1.0}
    assert by_uuid["GPU-2"]["memory_used_max_bytes"] == 10_525_474_816
    assert by_uuid["GPU-1"]["energy_j"] == pytest.approx(POWER_W * length_s, rel=0.02)
    assert by_uuid["GPU-3"]["energy_j"] is None, "it was hardly watched"
    assert stage["gpu"]["energy_per_output_token_j"] is None
    assert stage["gpu"]["spread"]["utilization"] == 0.0
    (host,) = stage["hosts"]
    assert host["roles"] == ["GPU", "load"]
    assert 0 < host["cpu_fraction"]["mean"] <= host["cpu_fraction"]["max"] <= 1
    assert "tensor cores busy" in (run.run_dir / "report.txt").read_text(encoding="utf-8")

    (reason,) = [one for one in run.summary["verdict"]["reasons"] if one["code"] == "telemetry_missing"]
    assert re.search(r"GPU 0 of \S+ \(GPU-3\)", reason["sentence"])
    assert "GPU-1" not in reason["sentence"]

    processes = pq.read_table(run.run_dir / "gpu_processes.parquet").to_pylist()
    assert {(row["pid"], row["memory_bytes"]) for row in processes} == {(420, 9_871_294_464)}
    hosts = pq.read_table(run.run_dir / "host.parquet").to_pylist()
    assert len(hosts) >= length_s
    assert all(0 <= row["cpu_fraction"] <= 1 for row in hosts if row["cpu_fraction"] is not None)
    assert re.search(r"\d+ samples, \d+ missed; [\d.]+ ms CPU each", said)


def test_a_run_without_a_collector_has_no_tables(redis: Server, tmp_path: Path) -> None:
    gone = start_collector(redis, "GPU-9")
    wait_until(lambda: redis.command("EXISTS", "vllm_locust:1:telemetry:gpu") == 1)
    end(gone)
    time.sleep(3.0)
    with simserver(tmp_path, *FAST) as server:
        flags = ("-u", "2", "-r", "2", "-t", "2s", "--warmup-requests", "0", "--max-tokens", "5")
        common = ("--headless", "--only-summary", "--run-dir", "run", "--redis-url", redis.url)
        run = end_of(start_locust(tmp_path, server.url, *common, *flags), tmp_path)
    assert not (run.run_dir / "gpu.parquet").exists(), run.output
    assert run.summary["stages"][0]["gpu"] is None
    assert "telemetry_missing" not in [reason["code"] for reason in run.summary["verdict"]["reasons"]]
