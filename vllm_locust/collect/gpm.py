"""GPM, NVML's performance counters on Hopper and later: what share of the SMs, the tensor cores and the memory's
bandwidth was in use between two samples. Plain utilization only says that some kernel ran.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from vllm_locust.collect.gpu_fields import MIB
from vllm_locust.collect.nvml_calls import NvmlCalls

_SCALE: Final = {
    "sm_activity": ("SM_UTIL", 0.01),
    "sm_occupancy": ("SM_OCCUPANCY", 0.01),
    "tensor_activity": ("ANY_TENSOR_UTIL", 0.01),
    "dram_activity": ("DRAM_BW_UTIL", 0.01),
    "pcie_tx_bytes_per_s": ("PCIE_TX_PER_SEC", MIB),
    "pcie_rx_bytes_per_s": ("PCIE_RX_PER_SEC", MIB),
    "nvlink_tx_bytes_per_s": ("NVLINK_TOTAL_TX_PER_SEC", MIB),
    "nvlink_rx_bytes_per_s": ("NVLINK_TOTAL_RX_PER_SEC", MIB),
}
"""Our column, the metric's name in NVML, and what one of it is."""


class Gpm:
    """``sample`` fills a GPM sample of the GPU or the MIG instance. Each reading is about the time since the last."""

    def __init__(self, calls: NvmlCalls, sample: Callable[[Any], object]) -> None:
        nvml = self._nvml = calls.nvml
        self._calls = calls
        self._sample = sample
        self._previous, self._current = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self._has_previous = False
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(_SCALE)
        for index, (metric, _) in enumerate(_SCALE.values()):
            self._request.metrics[index].metricId = getattr(nvml, f"NVML_GPM_METRIC_{metric}")

    def read(self) -> dict[str, float]:
        """Nothing the first time. Raises the binding's error where the call as a whole fails."""
        self._sample(self._current)
        found: dict[str, float] = {}
        if self._has_previous:
            self._request.sample1, self._request.sample2 = self._previous, self._current
            found = self._evaluate()
        self._previous, self._current = self._current, self._previous
        self._has_previous = True
        return found

    def _evaluate(self) -> dict[str, float]:
        self._nvml.nvmlGpmMetricsGet(self._request)
        found: dict[str, float] = {}
        for index, (column, (_, scale)) in enumerate(_SCALE.items()):
            metric = self._request.metrics[index]
            if metric.nvmlReturn:
                self._calls.refused(column, metric.nvmlReturn)
            elif math.isfinite(metric.value):
                found[column] = metric.value * scale
        return found

    def forget(self) -> None:
        """The next reading would span a time in which the GPU was away."""
        self._has_previous = False

    def close(self) -> None:
        for sample in (self._previous, self._current):
            self._nvml.nvmlGpmSampleFree(sample)
