"""What it costs to read a GPU: each call, and the collector as a whole on eight GPUs.

``python -m tests.live.gpu_costs URL`` is a collector that is shown the first GPU eight times over.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from vllm_locust import clock
from vllm_locust.clock import WallAxis
from vllm_locust.collect.gpu_source import Remarks
from vllm_locust.collect.nvml import NvmlSource, open_nvml
from vllm_locust.run.telemetry.collect import CollectOrder, collect

REPEATS = 25
Cost = tuple[str, float, float]
"""Name, CPU and wall time in microseconds, the mean of many."""


def reading_costs(nvml: Any) -> list[Cost]:
    """Each reading of the first GPU, rested for 20 ms before each call as the collector's are."""
    source = NvmlSource(nvml, Remarks(print), host="h", axis=WallAxis(), gpus="0")
    device = source.devices[0]
    others = [("utilization_samples", device.utilization_samples), ("processes", device.processes)]
    costs = []
    for name, call in [*device.fast, *device.slow, *device.rare, *others]:
        call()
        cpu_ns = wall_ns = 0
        for _ in range(REPEATS):
            clock.sleep(0.02)
            cpu_before_ns, before_ns = time.thread_time_ns(), clock.monotonic_ns()
            call()
            wall_ns += clock.monotonic_ns() - before_ns
            cpu_ns += time.thread_time_ns() - cpu_before_ns
        costs.append((name, cpu_ns / REPEATS / 1e3, wall_ns / REPEATS / 1e3))
    source.close()
    return costs


class Eightfold:
    """A driver that shows its first GPU eight times, each under a UUID of its own."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._shown = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nvml, name)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - the binding's name
        return 8

    def nvmlDeviceGetHandleByIndex(self, _: int) -> Any:  # noqa: N802
        return self._nvml.nvmlDeviceGetHandleByIndex(0)

    def nvmlDeviceGetUUID(self, handle: Any) -> str:  # noqa: N802
        self._shown += 1
        return f"{self._nvml.nvmlDeviceGetUUID(handle)}-{self._shown}"


def main() -> int:
    order = CollectOrder.parse(redis_url=sys.argv[1], gpus="all")
    return collect(order, open_driver=lambda: Eightfold(open_nvml()))


if __name__ == "__main__":
    sys.exit(main())
