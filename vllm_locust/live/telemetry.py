"""What servers and GPUs last said of themselves, from rows of telemetry as they come."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from vllm_locust.server_series import UP

STALE_NS: Final = 5_000_000_000
"""What is older is no longer told as if it were so."""
_SUMMED: Final = ("requests_running", "requests_waiting")
_WORST: Final = ("kv_cache_usage",)
_GPU_FIGURES: Final = (
    *("utilization", "memory_used_bytes", "memory_total_bytes", "power_w", "temperature_c"),
    *("sm_activity", "memory_bandwidth_utilization", "sm_clock_mhz"),
)

Row = Mapping[str, Any]


class ServersNow:
    """``targets``: the pages that are this run's; others write to the same stream."""

    def __init__(self, targets: Collection[str]) -> None:
        self._targets = frozenset(targets)
        self._newest: dict[tuple[str, str | None, str], tuple[int, float]] = {}

    def take(self, now_ns: int, rows: Sequence[Row]) -> None:
        for row in rows:
            target = row["target"]
            if target not in self._targets:
                continue
            if row["metric"] == UP and not row["value"]:
                self._newest = {key: value for key, value in self._newest.items() if key[0] != target}
            elif row["metric"] in (*_SUMMED, *_WORST):
                self._newest[target, row["engine"], row["metric"]] = now_ns, float(row["value"])

    def figures(self, now_ns: int) -> dict[str, float | None]:
        """``server_requests_running`` and so on: sums over all servers, of a share the largest; None where not told."""
        known: dict[str, list[float]] = {}
        for (_, _, metric), (at_ns, value) in self._newest.items():
            if now_ns - at_ns <= STALE_NS:
                known.setdefault(metric, []).append(value)
        sums = {f"server_{name}": sum(known[name]) if name in known else None for name in _SUMMED}
        return sums | {f"server_{name}": max(known[name]) if name in known else None for name in _WORST}


class GpusNow:
    def __init__(self) -> None:
        self._newest: dict[tuple[str, int, int], tuple[int, Row]] = {}

    def take(self, now_ns: int, rows: Sequence[Row]) -> None:
        for row in rows:
            mig = row.get("mig_instance")
            self._newest[row["host"], row["gpu_index"], -1 if mig is None else mig] = now_ns, row

    def table(self, now_ns: int) -> list[dict[str, Any]]:
        """A row for each GPU heard of lately: ``gpu`` (host/index), ``name`` and its figures, None where not told."""
        found = []
        for (host, index, mig), (at_ns, row) in sorted(self._newest.items(), key=lambda item: item[0]):
            if now_ns - at_ns <= STALE_NS:
                gpu = f"{host}/{index}" if mig < 0 else f"{host}/{index}.{mig}"
                found.append({"gpu": gpu, "name": row.get("gpu_name")} | {name: row.get(name) for name in _GPU_FIGURES})
        return found
