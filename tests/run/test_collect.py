"""``vllm-locust collect`` as a process: what it refuses, and what it puts into Redis."""

from __future__ import annotations

import ctypes.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.load.scripted_server import End, serving
from tests.run.simulated import environment, free_port
from tests.store.servers import Server, wait_until
from vllm_locust.store.redis_url import redis_options
from vllm_locust.store.telemetry_schema import TelemetryBatch, decode_telemetry
from vllm_locust.store.telemetry_store import TelemetryStore
from vllm_locust.telemetry import TelemetryKind

DCGM_PAGE = (Path(__file__).parents[1] / "collect" / "samples" / "dcgm_exporter.txt").read_bytes()
NOWHERE = f"redis://127.0.0.1:{free_port()}/0"


@pytest.fixture
def redis() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def start(*flags: str, **extra: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vllm_locust", "collect", *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment(**extra))


def refused(*flags: str) -> str:
    process = start(*flags)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 2, said
    return said


def batches(redis: Server) -> list[TelemetryBatch]:
    store = TelemetryStore(redis_options(redis.url))
    entries = store.read_telemetry({"gpu": "0-0", "host": "0-0"}, count=1000)
    store.close()
    return [decode_telemetry(entry.payload or b"") for entry in entries]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--redis-url", NOWHERE, "--host-only"), ("--redis-url: Redis at redis://127.0.0.1", "start it, or correct")),
        (("--redis-url", "redis://a:secret@h", "--interval", "1ms"), ("has a password in it", "give 10ms to 60s")),
        (("--redis-url", NOWHERE, "--host-only", "--gpus", "0"), ("--gpus with --host-only: give only one of them",)),
        (("--redis-url", NOWHERE, "--interval", "soon"), ("--interval: 'soon' is not a duration",)),
        (("--redis-url", NOWHERE, "--dcgm-url", "node:9400"), ("--dcgm-url: 'node:9400' is not a server address",)),
        (
            ("--redis-url", NOWHERE, "--dcgm-url", f"http://127.0.0.1:{free_port()}"),
            ("--dcgm-url http://127", "refused"),
        ),
        (("--redis-url", NOWHERE, "--host-name", "a\nb"), ("--host-name: give 1 to 253 printable characters",)),
        (("--host-only",), ("--redis-url",)),
    ],
)
def test_bad_usage_is_exit_2_with_the_fix(flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    said = refused(*flags)
    assert all(word in said for word in words), said
    assert "secret" not in said
    assert "Traceback" not in said


def test_without_a_gpu_it_says_what_it_found(redis: Server) -> None:
    if ctypes.util.find_library("nvidia-ml") is not None:
        pytest.skip("there is a driver here")
    said = refused("--redis-url", redis.url)
    assert said == (
        "vllm-locust: no NVIDIA GPU can be read here: NVML Shared Library Not Found; run it on the GPU host (in a "
        "container: with the NVIDIA runtime), give --dcgm-url, or --host-only for this host's load without a GPU\n"
    )


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_host_only(redis: Server, ending: signal.Signals) -> None:
    name = "n" * 253
    process = start("--redis-url", redis.url, "--host-only", "--interval", "50ms", "--host-name", name)
    wait_until(lambda: len(batches(redis)) >= 2)
    process.send_signal(ending)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 0, said
    found = batches(redis)
    assert {batch.header.kind for batch in found} == {TelemetryKind.HOST}
    assert [batch.header.seq for batch in found] == list(range(1, len(found) + 1))
    rows = [row for batch in found for row in batch.rows.to_pylist()]
    assert {row["host"] for row in rows} == {name}
    assert all(0 < row["memory_used_bytes"] < row["memory_total_bytes"] for row in rows)
    told = [row["collector_cpu_fraction"] for row in rows if row["collector_cpu_fraction"] is not None]
    assert told
    assert all(0 <= fraction < 1 for fraction in told)
    assert "sampling the host of" in said


def test_a_dcgm_exporter_on_another_host(redis: Server) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(DCGM_PAGE)}\r\n\r\n".encode()
    with serving({"GET": (head, DCGM_PAGE, End.CLOSE)}) as exporter:
        process = start(
            "--redis-url", redis.url, "--dcgm-url", f"http://127.0.0.1:{exporter.listener.getsockname()[1]}"
        )
        wait_until(lambda: sum(batch.header.kind is TelemetryKind.GPU for batch in batches(redis)) >= 2)
        process.terminate()
        _, said = process.communicate(timeout=20)
    assert process.returncode == 0, said
    assert "GPU 0 of node-7 (GPU-aa): NVIDIA H100 NVL" in said
    rows = [row for batch in batches(redis) if batch.header.kind is TelemetryKind.GPU for row in batch.rows.to_pylist()]
    assert {(row["host"], row["gpu_uuid"]) for row in rows} == {
        ("node-7", "GPU-aa"),
        ("node-7", "GPU-bb"),
        ("node-7", "GPU-bb/7"),
    }
    assert {row["tensor_activity"] for row in rows if row["gpu_uuid"] == "GPU-aa"} == {0.0209}
