"""``--collect``: a run that samples GPUs and load of its own host, without a Redis that anyone must start."""

from __future__ import annotations

import ctypes.util
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.run.simulated import FAST, LocustRun, run_locust, simserver

FLAGS = ("-u", "2", "-r", "2", "-t", "3s", "--warmup-requests", "2", "--max-tokens", "10")
DRIVER = """
import sys
sys.path.remove({directory!r})
del sys.modules["pynvml"]
import pynvml
from tests.collect.fake_nvml import FakeDevice, FakeNvml
driver = FakeNvml(FakeDevice(uuid="GPU-1"), FakeDevice(uuid="GPU-2"))
driver.nvmlInit = lambda: None
sys.modules["pynvml"] = driver
"""
"""In place of the binding."""


def run(directory: Path, *flags: str, **environment: str) -> LocustRun:
    with simserver(directory, *FAST) as server:
        return run_locust(directory, server.url, *FLAGS, *flags, **environment)


def test_the_host(tmp_path: Path) -> None:
    found = run(tmp_path, "--collect", "host")
    assert found.exit_code in (0, 4), found.output
    (stage,) = found.summary["stages"]
    (host,) = stage["hosts"]
    assert host["roles"] == ["load"]
    assert host["samples"] >= 2
    assert stage["gpu"] is None
    assert "sampling the host of" in found.output
    assert "Ctrl-C" not in found.output.split("sampling the host of")[1].splitlines()[0]
    assert "HOSTS" in (found.run_dir / "report.txt").read_text(encoding="utf-8")


def test_gpus(tmp_path: Path) -> None:
    driver = tmp_path / "driver"
    driver.mkdir()
    (driver / "pynvml.py").write_text(DRIVER.format(directory=str(driver)), encoding="utf-8")
    found = run(tmp_path, "--collect", "gpus", PYTHONPATH=str(driver), CUDA_VISIBLE_DEVICES="1")
    assert found.exit_code in (0, 4), found.output
    rows = pq.read_table(found.run_dir / "gpu.parquet").to_pylist()
    assert {row["gpu_uuid"] for row in rows} == {"GPU-2"}
    window = found.json("run.json")["window"]
    inside = [row for row in rows if window["start_unix_ns"] <= row["time_unix_ns"] < window["end_unix_ns"]]
    assert len(inside) >= 24, "ten a second, to the window's end"
    assert "telemetry_missing" not in [reason["code"] for reason in found.summary["verdict"]["reasons"]]


def test_without_a_gpu_nothing_is_sent(tmp_path: Path) -> None:
    if ctypes.util.find_library("nvidia-ml") is not None:
        pytest.skip("there is a driver here")
    with simserver(tmp_path, *FAST) as server:
        found = run_locust(tmp_path, server.url, *FLAGS, "--collect", "gpus")
        assert server.truth() == []
    assert found.exit_code == 2, found.output
    assert "--collect gpus: no NVIDIA GPU can be read here: NVML Shared Library Not Found" in found.output
    assert "Traceback" not in found.output
