"""What servers, GPUs and workers told, on the pictures' axis of time."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

import numpy as np

from vllm_locust.report.charts.bins import TimeBins, numbers
from vllm_locust.report.columns import Columns, Floats, Source, read_batches
from vllm_locust.report.gpu_series import GpuKey, GpuSeries
from vllm_locust.report.server_numbers import ServerMetrics, total_of_engines

MAX_GPUS: Final = 32
"""Shown one by one; the others are in the mean, and in the tables."""
GPU_COLUMNS: Final = (
    *("utilization", "sm_activity", "tensor_activity", "dram_activity"),
    *("power_w", "memory_used_bytes"),
)
_GENERATOR: Final = {"cpu_fraction": 1.0, "loop_lag_ns": 1e-9, "receive_lag_p99_ns": 1e-9}
_SECOND_NS: Final = 1_000_000_000


def server_json(servers: ServerMetrics, bins: TimeBins) -> dict[str, Any] | None:
    """None where no page was read."""
    if not servers.targets:
        return None
    edges = bins.edges.tolist()
    requests = {
        name: bins.told(*total_of_engines(servers.gauges[name], (edges[0], edges[-1])))
        for name in ("requests_running", "requests_waiting")
    }
    # The fullest engine has the say: it is the first that must preempt.
    caches = [bins.told(one.times_unix_ns, one.values) for one in servers.gauges["kv_cache_usage"]]
    cache = np.fmax.reduce([np.full(bins.count, np.nan), *caches])
    rates = {
        f"{name}_per_s": [servers.rate(f"{name}_total", span) for span in pairwise(edges)]
        for name in ("prompt_tokens", "generation_tokens")
    }
    columns: dict[str, Any] = {**requests, "kv_cache_usage": cache, **rates}
    return {name: numbers(values) for name, values in columns.items()}


def gpus_json(series: Mapping[GpuKey, GpuSeries], bins: TimeBins) -> dict[str, Any] | None:
    """The mean over all of them first, where there are several. None where there are none."""
    if not series:
        return None
    columns = {key: _of_gpu(one, bins) for key, one in series.items()}
    listed = [{"name": _name(key), **_as_json(columns[key])} for key in list(series)[:MAX_GPUS]]
    if len(series) > 1:
        whole = {name: _mean([one[name] for one in columns.values()]) for name in GPU_COLUMNS}
        listed.insert(0, {"name": f"mean of {len(series)} GPUs", **_as_json(whole)})
    return {"series": listed, "left_out": max(0, len(series) - MAX_GPUS)}


def _name(key: GpuKey) -> str:
    part = f" MIG {key.mig_instance}" if key.mig_instance >= 0 else ""
    return f"{key.host} {key.index}{part}"


def _of_gpu(series: GpuSeries, bins: TimeBins) -> dict[str, Floats]:
    return {name: bins.told(series.times_unix_ns, series.columns[name]) for name in GPU_COLUMNS}


def _as_json(columns: Mapping[str, Floats]) -> dict[str, Any]:
    return {name: None if np.isnan(values).all() else numbers(values) for name, values in columns.items()}


def _mean(columns: list[Floats]) -> Floats:
    stacked = np.array(columns)
    known = (~np.isnan(stacked)).sum(axis=0)
    return np.where(known > 0, np.nansum(stacked, axis=0) / np.maximum(known, 1), np.nan)


def generator_json(workers: Source | None, bins: TimeBins) -> dict[str, Any] | None:
    """Of the worker that was worst off in each bin; a sample speaks of the second before it. None without samples."""
    found = {name: np.full(bins.count, np.nan) for name in _GENERATOR}
    for batch in read_batches(workers or ()):
        columns = Columns(batch)
        times = columns.ints("time_unix_ns") - _SECOND_NS
        for name, scale in _GENERATOR.items():
            found[name] = np.fmax(found[name], bins.largest(times, columns.floats(name) * scale))
    if all(np.isnan(values).all() for values in found.values()):
        return None
    return {name.replace("_ns", "_s"): numbers(values) for name, values in found.items()}
