"""A short load run whose stages are the phases of load on the GPUs: what its report says of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.live.gpu_phases import ROOT, GpuLoad, ProcessEnded
from tests.run.simulated import OPEN_LOOP, free_port, simserver
from vllm_locust import clock
from vllm_locust.store.redis_store import RunStore
from vllm_locust.store.redis_url import redis_options

_RATE = 10


def run_beside(
    url: str, load: GpuLoad, kinds: Sequence[str], seconds: float, directory: Path
) -> tuple[int, list[float | None]]:
    """Locust against the simulated server, its stages so long as each kind of load, results in ``directory/run``. The
    exit code, and by how many seconds each load began after its stage.
    """
    stages = ",".join(f"{_RATE + place}:{seconds:g}s" for place in range(len(kinds)))
    flags = ["--rate-stages", stages, "--warmup-requests", "10", "--max-tokens", "32", "--seed", "1", "--arrival"]
    with simserver(directory, "--first-token-ms", "20", "--token-interval-ms", "5") as server:
        command = [sys.executable, "-m", "locust", "-f", OPEN_LOOP, "--headless", "--only-summary", "--host"]
        end_command = ["--run-dir", str(directory / "run"), "--redis-url", url, "--master-bind-port", str(free_port())]
        with (
            (directory / "locust.log").open("w", encoding="utf-8") as log,
            _process([*command, server.url, *flags, "constant", *end_command], log) as locust,
        ):
            start_ns = _window_start_unix_ns(url, locust)
            late_s = [
                _load_stage(load, kind, start_ns + round(place * seconds * 1e9), seconds)
                for place, kind in enumerate(kinds)
            ]
            return locust.wait(90), late_s


@contextmanager
def _process(command: list[str], log: object) -> Iterator[subprocess.Popen[bytes]]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_LOCUST_", "LOCUST_", "OPENAI_"))}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment  # type: ignore[call-overload]
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _window_start_unix_ns(url: str, locust: subprocess.Popen[bytes]) -> int:
    store = RunStore(redis_options(url), "watching")
    deadline_ns = clock.monotonic_ns() + 90_000_000_000
    try:
        while clock.monotonic_ns() < deadline_ns and locust.poll() is None:
            for control in store._do("find runs", "KEYS", "vllm_locust:1:run:*:control"):
                if start := store._do("read its window", "HGET", control, "window_start_unix_ns"):
                    return int(start)
            clock.sleep(0.05)
    finally:
        store.close()
    raise ProcessEnded("the load run did not begin its window; see locust.log")


def _load_stage(load: GpuLoad, kind: str, start_unix_ns: int, seconds: float) -> float | None:
    late_s = None
    clock.sleep(max(0.0, (start_unix_ns - clock.unix_ns()) / 1e9))
    if kind != "idle":
        load.start(kind, max(0.1, seconds - 0.4 - max(0.0, (clock.unix_ns() - start_unix_ns) / 1e9)))
        late_s = (clock.unix_ns() - start_unix_ns) / 1e9
        load.await_end(kind, seconds + 30)
    return late_s
