"""``--collect``: a run that samples GPUs and load of its own host, without a Redis that anyone must start."""

from __future__ import annotations

import ctypes.util
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.run.simulated import FAST, LocustRun, end_of, run_locust, simserver, start_locust
from tests.store.servers import Server, wait_until
from vllm_locust.errors import UsageError
from vllm_locust.run.telemetry import own_collector

pytestmark = pytest.mark.timeout(120)

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


@pytest.fixture
def valkey() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


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


STUCK = """
import time

class NVMLError(Exception):
    pass

def nvmlInit():
    time.sleep(1000)
"""
"""A driver that does not answer."""


@pytest.fixture
def stuck_driver(tmp_path: Path) -> Path:
    driver = tmp_path / "driver"
    driver.mkdir()
    (driver / "pynvml.py").write_text(STUCK, encoding="utf-8")
    return driver


def collectors_in(directory: Path) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            here = process.joinpath("cwd").readlink() == directory
            if here and b"run.telemetry.own_collector" in process.joinpath("cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_a_driver_that_does_not_answer(
    tmp_path: Path, stuck_driver: Path, monkeypatch: pytest.MonkeyPatch, valkey: Server
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(stuck_driver))
    monkeypatch.setattr(own_collector, "ANSWER_LIMIT_S", 2.0)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="--collect gpus: the collector did not answer within 2 s"):
        own_collector.OwnCollector(
            own_collector.OwnCollectorConfig(what="gpus", redis_url=valkey.url, redis_password_file=None)
        )
    assert not collectors_in(tmp_path)


def test_ctrl_c_while_the_driver_does_not_answer(tmp_path: Path, stuck_driver: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        flags = ("--headless", "--run-dir", "run", *FLAGS, "--collect", "gpus")
        load = start_locust(tmp_path, server.url, *flags, PYTHONPATH=str(stuck_driver))
        wait_until(lambda: bool(collectors_in(tmp_path)), 30)
        load.send_signal(signal.SIGINT)
        found = end_of(load, tmp_path, 25)
        assert found.exit_code == 1, found.output
        assert "Traceback" not in found.output
        wait_until(lambda: not collectors_in(tmp_path), 15)
        assert server.truth() == []


def test_without_a_gpu_nothing_is_sent(tmp_path: Path) -> None:
    if ctypes.util.find_library("nvidia-ml") is not None:
        pytest.skip("there is a driver here")
    with simserver(tmp_path, *FAST) as server:
        found = run_locust(tmp_path, server.url, *FLAGS, "--collect", "gpus")
        assert server.truth() == []
    assert found.exit_code == 2, found.output
    assert (
        "--collect gpus: no NVIDIA GPU can be read here: NVML Shared Library Not Found; give --collect host for this "
        "host's load alone, or start vllm-locust collect on the GPU host\n"
    ) in found.output
    assert "--dcgm-url" not in found.output, "a flag that locust lacks"
    assert "Traceback" not in found.output
