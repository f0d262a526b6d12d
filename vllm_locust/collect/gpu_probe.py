"""What the GPUs of this host tell, found out by reading each twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_locust.checkup.gpu import GpuFacts
from vllm_locust.clock import WallAxis
from vllm_locust.collect.gpu_source import Remarks, Tick
from vllm_locust.collect.nvml import NvmlSource, open_nvml


def gpu_facts(host: str, *, open_driver: Callable[[], Any] = open_nvml) -> GpuFacts:
    """Raises ``UsageError`` where no GPU can be read."""
    nvml = open_driver()
    remarks: list[str] = []
    source = NvmlSource(nvml, Remarks(remarks.append), host=host, axis=WallAxis())
    try:
        for number in range(2):
            source.tick(Tick(number, per_second=1, slow_every_s=1))
        driver = nvml.nvmlSystemGetDriverVersion()
        return GpuFacts(
            driver.decode() if isinstance(driver, bytes) else str(driver),
            {f"{device.label} {device.name or 'of unknown name'}": device.has_gpm for device in source.devices},
            tuple(remarks),
        )
    finally:
        source.close()
