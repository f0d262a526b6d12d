"""What is sampled beside the requests, and where it goes: the columns of ``gpu.parquet``, ``gpu_processes.parquet``,
``host.parquet`` and ``server.parquet``.

Nothing here knows NVIDIA: whatever tells of a GPU fills the same columns. Fractions are 0-1, unknown is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

Row = Mapping[str, object]


class TelemetryKind(StrEnum):
    """The value names the table."""

    GPU = "gpu"
    GPU_PROCESSES = "gpu_processes"
    HOST = "host"
    SERVER = "server"


class ColumnType(StrEnum):
    INT = "int64"
    FLOAT = "float64"
    TEXT = "text"
    TEXTS = "list of texts"


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: ColumnType
    required: bool = False
    """No row is without it."""


def _columns(required: Mapping[str, ColumnType], others: Mapping[str, ColumnType]) -> tuple[Column, ...]:
    known = (Column(name, type_, required=True) for name, type_ in required.items())
    return (*known, *(Column(name, type_) for name, type_ in others.items()))


def _all(type_: ColumnType, names: str) -> dict[str, ColumnType]:
    return dict.fromkeys(names.split(), type_)


_INT, _FLOAT, _TEXT = ColumnType.INT, ColumnType.FLOAT, ColumnType.TEXT
_WHEN_AND_WHERE: Final = {"time_unix_ns": _INT, "host": _TEXT}

COLUMNS: Final[Mapping[TelemetryKind, tuple[Column, ...]]] = {
    TelemetryKind.GPU: _columns(
        _WHEN_AND_WHERE | {"gpu_index": _INT, "gpu_uuid": _TEXT},
        {"gpu_name": _TEXT}
        | _all(_FLOAT, "utilization memory_bandwidth_utilization")
        | _all(_FLOAT, "sm_activity sm_occupancy tensor_activity dram_activity")
        | _all(_INT, "memory_used_bytes memory_total_bytes")
        | _all(_FLOAT, "power_w energy_j temperature_c sm_clock_mhz memory_clock_mhz")
        | {"throttle_reasons": ColumnType.TEXTS}
        | _all(_INT, "ecc_errors xid mig_instance")
        | _all(_FLOAT, "pcie_tx_bytes_per_s pcie_rx_bytes_per_s nvlink_tx_bytes_per_s nvlink_rx_bytes_per_s")
        | _all(_FLOAT, "encoder_utilization decoder_utilization"),
    ),
    TelemetryKind.GPU_PROCESSES: _columns(
        _WHEN_AND_WHERE | {"gpu_index": _INT, "gpu_uuid": _TEXT, "pid": _INT},
        {"mig_instance": _INT, "name": _TEXT, "memory_bytes": _INT},
    ),
    TelemetryKind.HOST: _columns(
        _WHEN_AND_WHERE,
        _all(_FLOAT, "cpu_fraction load_1m")
        | _all(_INT, "memory_used_bytes memory_total_bytes")
        | _all(_FLOAT, "network_tx_bytes_per_s network_rx_bytes_per_s collector_cpu_fraction")
        | _all(_INT, "missed_ticks"),
    ),
    TelemetryKind.SERVER: _columns(
        {"time_unix_ns": _INT, "target": _TEXT, "metric": _TEXT, "value": _FLOAT},
        {"engine": _TEXT},
    ),
}
"""``energy_j`` and the counts of errors only rise, until the driver is loaded anew. ``xid`` is that of an error since
the row before, ``missed_ticks`` those of the collector since the row before. ``cpu_fraction`` is of all cores
together, ``collector_cpu_fraction`` of one.
"""


class TelemetrySink(Protocol):
    """Where samples go. ``time_unix_ns`` lies on the sampling process's own ``clock.WallAxis``."""

    def put(self, kind: TelemetryKind, rows: Sequence[Row]) -> None:
        """Never blocks on the network and never raises for it."""
        ...
