"""NVIDIA's GPUs by what a DCGM exporter says of them over HTTP: the same columns, from another host too.

The exporter shows what it last read, by itself every 30 s: ``--collect-interval 1000`` makes it read each second. For
the profiling fields it needs its ``dcp-metrics-included.csv``, for ``sm_activity`` and ``sm_occupancy`` a list of
fields that names them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from vllm_locust import clock
from vllm_locust.clock import WallAxis
from vllm_locust.collect.gpu_fields import MIB, throttle_reasons
from vllm_locust.collect.gpu_source import Remarks, Rows, Tick
from vllm_locust.collect.metrics_text import Sample, read_samples
from vllm_locust.collect.page_request import Page, PageFailed
from vllm_locust.metrics_page import MetricsPage
from vllm_locust.telemetry import Row, TelemetryKind

SECOND_NS: Final = 1_000_000_000

_COLUMNS: Final[Mapping[str, tuple[str, float]]] = {
    "DCGM_FI_DEV_GPU_UTIL": ("utilization", 0.01),
    "DCGM_FI_DEV_MEM_COPY_UTIL": ("memory_bandwidth_utilization", 0.01),
    "DCGM_FI_PROF_SM_ACTIVE": ("sm_activity", 1),
    "DCGM_FI_PROF_SM_OCCUPANCY": ("sm_occupancy", 1),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("tensor_activity", 1),
    "DCGM_FI_PROF_DRAM_ACTIVE": ("dram_activity", 1),
    "DCGM_FI_DEV_POWER_USAGE": ("power_w", 1),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": ("energy_j", 0.001),
    "DCGM_FI_DEV_GPU_TEMP": ("temperature_c", 1),
    "DCGM_FI_DEV_SM_CLOCK": ("sm_clock_mhz", 1),
    "DCGM_FI_DEV_MEM_CLOCK": ("memory_clock_mhz", 1),
    "DCGM_FI_PROF_PCIE_TX_BYTES": ("pcie_tx_bytes_per_s", 1),
    "DCGM_FI_PROF_PCIE_RX_BYTES": ("pcie_rx_bytes_per_s", 1),
    "DCGM_FI_PROF_NVLINK_TX_BYTES": ("nvlink_tx_bytes_per_s", 1),
    "DCGM_FI_PROF_NVLINK_RX_BYTES": ("nvlink_rx_bytes_per_s", 1),
    "DCGM_FI_DEV_ENC_UTIL": ("encoder_utilization", 0.01),
    "DCGM_FI_DEV_DEC_UTIL": ("decoder_utilization", 0.01),
}
"""Our column, and what one of the exporter's unit is. The rates are gauges, whatever type the page gives them."""
_ECC: Final = "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"
_XID: Final = "DCGM_FI_DEV_XID_ERRORS"
_USED, _FREE, _RESERVED = (f"DCGM_FI_DEV_FB_{part}" for part in ("USED", "FREE", "RESERVED"))
_THROTTLE: Final = ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS")
_WANTED: Final = frozenset((*_COLUMNS, *_THROTTLE, _ECC, _XID, _USED, _FREE, _RESERVED))
_BLANK: Final = frozenset(
    float(base + reason) for base in (0x7FFF_FFF0, 0x7FFF_FFFF_FFFF_FFF0, 1 << 47) for reason in range(4)
)
"""DCGM's own words for: nothing there, not found, not supported, not permitted."""


class DcgmSource:
    """A ``GpuSource`` that reads its page in a thread of its own: an exporter that does not answer stops no other."""

    def __init__(
        self,
        page: MetricsPage,
        request: Callable[[MetricsPage], Page],
        remarks: Remarks,
        *,
        axis: WallAxis,
        interval_ns: int = SECOND_NS,
    ) -> None:
        """Raises ``PageFailed`` where the first look fails."""
        self._page = page
        self._request = request
        self._remarks = remarks
        self._axis = axis
        self._interval_ns = interval_ns
        self._lock = threading.Lock()
        self._rows: list[Row] = []
        self._xids: dict[str, int] = {}
        self._error: str | None = None
        self._first = self._look()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dcgm", daemon=True)
        self._thread.start()

    def tick(self, tick: Tick) -> None:
        """Its thread looks by itself: the page is not worth reading ten times a second."""

    def take(self, *, last: bool = False) -> Rows:  # noqa: ARG002 - every row is complete
        with self._lock:
            rows, self._rows = self._rows, []
        return {TelemetryKind.GPU: rows}

    def describe(self) -> Iterator[str]:
        for row in self._first:
            yield f"GPU {row['gpu_index']} of {row['host']} ({row['gpu_uuid']}): {row['gpu_name'] or 'of unknown name'}"

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        due_ns = clock.monotonic_ns()
        while not self._closing.wait(max(0, due_ns - clock.monotonic_ns()) / SECOND_NS):
            late_ns = clock.monotonic_ns() - due_ns
            due_ns += self._interval_ns * (1 + max(0, late_ns) // self._interval_ns)
            try:
                rows = self._look()
            except PageFailed as failed:
                if str(failed) != self._error:
                    self._remarks.always(f"--dcgm-url {self._page.url}: {failed}; it is tried again")
                self._error = str(failed)
                continue
            if self._error is not None:
                self._remarks.always(f"--dcgm-url {self._page.url} answers again")
            self._error = None
            with self._lock:
                self._rows += rows

    def _look(self) -> list[dict[str, Any]]:
        answer = self._request(self._page)
        samples = read_samples(answer.text, _WANTED)
        rows = self._gpu_rows(samples.found, (answer.began_ns + answer.ended_ns) // 2 + self._axis.offset_ns)
        if not rows:
            raise PageFailed("its page tells of no GPU: give the address of a DCGM exporter")
        return rows

    def _gpu_rows(self, samples: list[Sample], time_unix_ns: int) -> list[dict[str, Any]]:
        told: dict[str, dict[str, float]] = {}
        labels: dict[str, Mapping[str, str]] = {}
        for sample in samples:
            uuid = _uuid(sample.labels)
            if uuid is not None and math.isfinite(sample.value) and sample.value not in _BLANK:
                told.setdefault(uuid, {})[sample.name] = sample.value
                labels[uuid] = sample.labels
        return [
            {"time_unix_ns": time_unix_ns, "host": labels[uuid].get("Hostname") or self._page.host}
            | _identity(uuid, labels[uuid])
            | _values(values)
            | {"xid": self._new_xid(uuid, values.get(_XID))}
            for uuid, values in told.items()
        ]

    def _new_xid(self, uuid: str, shown: float | None) -> int | None:
        """The exporter goes on showing the last one: it is news only once."""
        if shown is None:
            return None
        before, self._xids[uuid] = self._xids.get(uuid), int(shown)
        return int(shown) if before is not None and shown not in (0, before) else None


def _uuid(labels: Mapping[str, str]) -> str | None:
    """A MIG instance has its GPU's, with its number behind."""
    uuid, gpu = labels.get("UUID"), labels.get("gpu", "")
    if not uuid or not (gpu.isascii() and gpu.isdigit()):
        return None
    return f"{uuid}/{labels['GPU_I_ID']}" if _instance(labels) is not None else uuid


def _instance(labels: Mapping[str, str]) -> int | None:
    number = labels.get("GPU_I_ID", "")
    return int(number) if number.isascii() and number.isdigit() else None


def _identity(uuid: str, labels: Mapping[str, str]) -> dict[str, Any]:
    return {
        "gpu_index": int(labels["gpu"]),
        "gpu_uuid": uuid,
        "gpu_name": labels.get("modelName"),
        "mig_instance": _instance(labels),
    }


def _values(told: Mapping[str, float]) -> dict[str, Any]:
    row: dict[str, Any] = {column: told[name] * scale for name, (column, scale) in _COLUMNS.items() if name in told}
    if _USED in told:
        row["memory_used_bytes"] = round(told[_USED] * MIB)
        if _FREE in told:
            row["memory_total_bytes"] = round((told[_USED] + told[_FREE] + told.get(_RESERVED, 0)) * MIB)
    if _ECC in told:
        row["ecc_errors"] = int(told[_ECC])
    for name in _THROTTLE:
        if name in told:
            row["throttle_reasons"] = throttle_reasons(int(told[name]))
    return row
