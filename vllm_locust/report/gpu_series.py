"""Each GPU's samples of a run, from ``gpu.parquet``. Some 150 bytes a sample: 6 MB for an hour of a GPU at 10 Hz."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from vllm_locust.report.columns import Columns, Floats, Ints, Source, read_batches

FRACTIONS: Final = (
    "utilization",
    "sm_activity",
    "sm_occupancy",
    "tensor_activity",
    "dram_activity",
    "memory_bandwidth_utilization",
)
_OTHERS: Final = (
    *("memory_used_bytes", "memory_total_bytes", "power_w", "energy_j", "temperature_c", "sm_clock_mhz"),
    *("pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s", "nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s"),
    *("ecc_errors", "xid"),
)
LONGEST_SILENCE_S: Final = 5.0
_NO_THROTTLE: Final = frozenset(("gpu_idle", "applications_clocks_setting", "display_clock_setting"))
"""Clocks that are low because nothing is asked for more, or that someone has set."""


@dataclass(frozen=True, slots=True, order=True)
class GpuKey:
    host: str
    index: int
    mig_instance: int
    """-1: the whole GPU."""
    uuid: str


class GpuSeries:
    """Columns in order of time, NaN where null. ``throttle`` holds for each sample a place in ``reasons``, or -1."""

    def __init__(self, name: str | None, times: Ints, columns: dict[str, Floats], throttle: Ints) -> None:
        order = np.argsort(times, kind="stable")
        self.name = name
        self.times_unix_ns = times[order]
        self.columns = {column: values[order] for column, values in columns.items()}
        self.throttle = throttle[order]

    def known(self, column: str, start_unix_ns: int, end_unix_ns: int) -> tuple[Ints, Floats]:
        """Times and values that are not null, from start to before the end."""
        first, last = np.searchsorted(self.times_unix_ns, (start_unix_ns, end_unix_ns))
        values = self.columns[column][first:last]
        there = ~np.isnan(values)
        return self.times_unix_ns[first:last][there], values[there]

    def throttle_between(self, start_unix_ns: int, end_unix_ns: int) -> Ints:
        first, last = np.searchsorted(self.times_unix_ns, (start_unix_ns, end_unix_ns))
        found = self.throttle[first:last]
        return found[found >= 0]


class _Gathering:
    def __init__(self) -> None:
        self.name: str | None = None
        self.times: list[Ints] = []
        self.columns: dict[str, list[Floats]] = {column: [] for column in (*FRACTIONS, *_OTHERS)}
        self.throttle: list[Ints] = []

    def done(self) -> GpuSeries:
        columns = {column: np.concatenate(pieces) for column, pieces in self.columns.items()}
        return GpuSeries(self.name, np.concatenate(self.times), columns, np.concatenate(self.throttle))


def read_gpu_series(source: Source) -> tuple[dict[GpuKey, GpuSeries], list[tuple[str, ...]]]:
    """By GPU, and the sets of throttle reasons that ``GpuSeries.throttle`` names by their place."""
    gathered: dict[GpuKey, _Gathering] = {}
    places: dict[tuple[str, ...], int] = {}
    for batch in read_batches(source):
        columns = Columns(batch)
        times = columns.ints("time_unix_ns")
        values = {column: columns.floats(column) for column in (*FRACTIONS, *_OTHERS)}
        throttle = _throttle(batch.column("throttle_reasons").to_pylist(), places)
        keys = list(
            zip(
                columns.texts("host"),
                columns.ints("gpu_index").tolist(),
                columns.ints("mig_instance", missing=-1).tolist(),
                columns.texts("gpu_uuid"),
                strict=True,
            )
        )
        rows: dict[GpuKey, list[int]] = {}
        for row, (host, index, instance, uuid) in enumerate(keys):
            rows.setdefault(GpuKey(str(host), index, instance, str(uuid)), []).append(row)
        names = columns.texts("gpu_name")
        for key, mine in rows.items():
            gpu = gathered.setdefault(key, _Gathering())
            gpu.name = gpu.name or names[mine[0]]
            gpu.times.append(times[mine])
            gpu.throttle.append(throttle[mine])
            for column, pieces in gpu.columns.items():
                pieces.append(values[column][mine])
    return {key: gathered[key].done() for key in sorted(gathered)}, list(places)


def _throttle(lists: list[list[str] | None], places: dict[tuple[str, ...], int]) -> Ints:
    found = np.full(len(lists), -1, dtype=np.int64)
    for row, reasons in enumerate(lists):
        if reasons is not None:
            words = tuple(word for word in reasons if word not in _NO_THROTTLE)
            found[row] = places.setdefault(words, len(places))
    return found


def silent_share(times_unix_ns: Ints, start_unix_ns: int, end_unix_ns: int) -> float:
    """The share of the time that lies in stretches without a sample of more than ``LONGEST_SILENCE_S``, or of three
    times the usual distance of two samples.
    """
    inside = times_unix_ns[(times_unix_ns > start_unix_ns) & (times_unix_ns < end_unix_ns)]
    gaps_s = np.diff(np.concatenate(([start_unix_ns], inside, [end_unix_ns]))) / 1e9
    usual_s = float(np.median(gaps_s)) if len(inside) > 1 else 0.0
    length_s = (end_unix_ns - start_unix_ns) / 1e9
    return float(gaps_s[gaps_s > max(LONGEST_SILENCE_S, 3 * usual_s)].sum() / length_s) if length_s > 0 else 0.0
