"""What the GPUs did in each stage: the block ``gpu`` of a stage.

``utilization`` only says that some kernel ran. What a GPU was busy with is in ``sm_activity``, ``tensor_activity`` and
``dram_activity``, where the GPU tells them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np

from vllm_locust.report.columns import Floats, Source
from vllm_locust.report.gpu_energy import energy_j
from vllm_locust.report.gpu_series import FRACTIONS, GpuKey, GpuSeries, read_gpu_series, silent_share
from vllm_locust.report.run_facts import Interval
from vllm_locust.statistics import percentile

_PERCENTILES: Final = {"p50": Fraction(1, 2), "p95": Fraction(19, 20)}
_BUSY, _LOW = 0.95, 0.70
_TRAFFIC: Final = tuple(f"{bus}_{way}_bytes_per_s" for bus in ("pcie", "nvlink") for way in ("tx", "rx"))
_BALANCED: Final = ("utilization", "sm_activity", "memory_used_max_bytes", "power_w")

Span = tuple[int, int]


class GpuMetrics:
    """All GPUs that were sampled. ``clock_uncertainty_ns`` is how far their times may be from the clients'."""

    def __init__(self, source: Source, clock_uncertainty_ns: int | None = None) -> None:
        self.series, self._reasons = read_gpu_series(source)
        self._clock_uncertainty_ns = clock_uncertainty_ns

    @property
    def hosts(self) -> list[str]:
        return sorted({key.host for key in self.series})

    def numbers(self, interval: Interval | None, output_tokens_per_s: float | None) -> dict[str, Any] | None:
        """Of one stage; None where no GPU was sampled in it."""
        if interval is None:
            return None
        span = interval.start_unix_ns, interval.end_unix_ns
        gpus = [
            self._gpu_json(key, one, span)
            for key, one in self.series.items()
            if len(one.known("memory_used_bytes", *span)[0]) or len(one.known("utilization", *span)[0])
        ]
        if not gpus:
            return None
        whole = [gpu for gpu in gpus if gpu["mig_instance"] is None]
        energy_j = _sum_if_known([gpu["energy_j"] for gpu in whole])
        tokens = None if output_tokens_per_s is None else output_tokens_per_s * interval.length_s
        return {
            "gpus": gpus,
            "mean": {name: _mean_of(gpus, name) for name in (*FRACTIONS, "memory_used_max_bytes")},
            "spread": {name: _spread(gpus, name) for name in _BALANCED},
            "power_w": _sum_if_known([None if gpu["power_w"] is None else gpu["power_w"]["mean"] for gpu in whole]),
            "energy_j": energy_j,
            "energy_per_output_token_j": energy_j / tokens if energy_j is not None and tokens else None,
            "clock_uncertainty_s": None if self._clock_uncertainty_ns is None else self._clock_uncertainty_ns / 1e9,
        }

    def _gpu_json(self, key: GpuKey, series: GpuSeries, span: Span) -> dict[str, Any]:
        busy = series.known("utilization", *span)[1]
        used = series.known("memory_used_bytes", *span)[1]
        total = series.known("memory_total_bytes", *span)[1]
        temperature = series.known("temperature_c", *span)[1]
        ecc = series.known("ecc_errors", *span)[1]
        return {
            "host": key.host,
            "gpu_index": key.index,
            "gpu_uuid": key.uuid,
            "gpu_name": series.name,
            "mig_instance": None if key.mig_instance < 0 else key.mig_instance,
            "samples": int(np.diff(np.searchsorted(series.times_unix_ns, span))[0]),
            **{name: _block(series.known(name, *span)[1]) for name in FRACTIONS},
            "above_95_fraction": float((busy > _BUSY).mean()) if len(busy) else None,
            "below_70_fraction": float((busy < _LOW).mean()) if len(busy) else None,
            "memory_used_max_bytes": int(used.max()) if len(used) else None,
            "memory_total_bytes": int(total[-1]) if len(total) else None,
            "power_w": _block(series.known("power_w", *span)[1]),
            "energy_j": energy_j(series, span),
            "temperature_max_c": float(temperature.max()) if len(temperature) else None,
            "sm_clock_mhz": _block(series.known("sm_clock_mhz", *span)[1]),
            "throttled_fraction": self._throttled(series, span),
            "ecc_errors": int(ecc[-1] - ecc[0]) if len(ecc) else None,
            "xids": sorted({int(xid) for xid in series.known("xid", *span)[1]}),
            **{name: _mean(series.known(name, *span)[1]) for name in _TRAFFIC},
        }

    def _throttled(self, series: GpuSeries, span: Span) -> dict[str, float] | None:
        """By reason, the share of the samples at which it held the clocks down."""
        found = series.throttle_between(*span)
        if not len(found):
            return None
        counts = np.bincount(found, minlength=len(self._reasons))
        shares: dict[str, float] = {}
        for words, count in zip(self._reasons, counts.tolist(), strict=True):
            for word in words:
                if count:
                    shares[word] = shares.get(word, 0.0) + count / len(found)
        return dict(sorted(shares.items()))

    def silence(self, watched: Sequence[Mapping[str, Any]], window: Interval) -> dict[str, float]:
        """By GPU that was seen, the share of the window since then in which nothing came of it."""
        by_uuid = {(key.host, key.uuid): one for key, one in self.series.items()}
        found = {}
        for gpu in watched:
            series = by_uuid.get((gpu["host"], gpu["gpu_uuid"]))
            times = np.empty(0, dtype=np.int64) if series is None else series.times_unix_ns
            start_ns = max(window.start_unix_ns, int(gpu["first_unix_ns"]))
            if start_ns < window.end_unix_ns:
                silent_s = silent_share(times, start_ns, window.end_unix_ns) * (window.end_unix_ns - start_ns) / 1e9
                found[f"GPU {gpu['gpu_index']} of {gpu['host']} ({gpu['gpu_uuid']})"] = silent_s / window.length_s
        return found


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


def _block(values: Floats) -> dict[str, float] | None:
    if not len(values):
        return None
    ordered = np.sort(values)
    return {
        "mean": float(values.mean()),
        **{name: percentile(ordered, q) for name, q in _PERCENTILES.items()},
        "max": float(ordered[-1]),
    }


def _mean_value(gpu: Mapping[str, Any], name: str) -> float | None:
    value = gpu[name]
    mean: float | None = value["mean"] if isinstance(value, Mapping) else value
    return mean


def _values(gpus: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [value for gpu in gpus if (value := _mean_value(gpu, name)) is not None]


def _mean_of(gpus: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = _values(gpus, name)
    return sum(values) / len(values) if values else None


def _spread(gpus: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """How unequal the GPUs were: the largest of their means less the smallest. None where there is one alone."""
    values = _values(gpus, name)
    return max(values) - min(values) if len(values) > 1 else None


def _sum_if_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
