"""Scaling curves: the highest throughput of each size against the smallest one's.

speed-up = throughput / throughput of the smallest size; efficiency = speed-up / (size / smallest size).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

LOW_EFFICIENCY: Final = 0.8
TENSOR_PARALLEL: Final = ("tp", "tensor_parallel", "tensor_parallel_size")
_COMMUNICATION: Final = (
    "likely communication: tensor parallelism exchanges activations in every layer; look at the NVLink and PCIe "
    "columns (traffic over PCIe, or NVLink near its limit), at how the GPUs are connected (nvidia-smi topo -m), and at "
    "GPU activity that falls while the load stays"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedRun:
    """One run and the figures of its best stage. Rates per second, None where nothing was sampled."""

    size: int
    label: str
    stage: str
    output_tokens_per_s: float
    tpot_p50_s: float | None
    gpu_utilization: float | None
    sm_activity: float | None
    nvlink_bytes_per_s: float | None
    pcie_bytes_per_s: float | None
    overloaded: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One size: the mean over its runs; of a percentile the lowest and the highest, since a mean of them is none."""

    size: int
    runs: Sequence[SizedRun]
    output_tokens_per_s: float
    speed_up: float
    efficiency: float
    remarks: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        figures = ("gpu_utilization", "sm_activity", "nvlink_bytes_per_s", "pcie_bytes_per_s")
        return {
            "size": self.size,
            "runs": [{"run": run.label, "stage": run.stage} for run in self.runs],
            "output_tokens_per_s": self.output_tokens_per_s,
            "output_tokens_per_s_each": self.output_tokens_per_s / self.size,
            "speed_up": self.speed_up,
            "efficiency": self.efficiency,
            "tpot_p50_s": _range([run.tpot_p50_s for run in self.runs]),
            **{name: _mean([getattr(run, name) for run in self.runs]) for name in figures},
            "remarks": list(self.remarks),
        }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _range(values: Sequence[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None]
    return [min(known), max(known)] if known else None


def scaling_curve(runs: Sequence[SizedRun], tag: str) -> list[Point]:
    """By size. ``runs`` must have at least two sizes, and throughput above 0 at the smallest."""
    sizes = sorted({run.size for run in runs})
    by_size = {size: [run for run in runs if run.size == size] for size in sizes}
    rates = {size: sum(run.output_tokens_per_s for run in some) / len(some) for size, some in by_size.items()}
    smallest = sizes[0]
    points = []
    for size in sizes:
        speed_up = rates[size] / rates[smallest]
        efficiency = speed_up * smallest / size
        remarks = _remarks(tag, size, smallest, speed_up, efficiency)
        if any(run.overloaded is False and run.output_tokens_per_s > 0 for run in by_size[size]):
            remarks = (*remarks, "its best stage was not at the limit: a higher load may give more")
        points.append(
            Point(
                size=size,
                runs=by_size[size],
                output_tokens_per_s=rates[size],
                speed_up=speed_up,
                efficiency=efficiency,
                remarks=remarks,
            )
        )
    return points


def _remarks(tag: str, size: int, smallest: int, speed_up: float, efficiency: float) -> tuple[str, ...]:
    if size == smallest:
        return ()
    said = []
    if efficiency < LOW_EFFICIENCY:
        said.append(f"efficiency below {LOW_EFFICIENCY:.0%}".replace("%", " %"))
    slower = smallest == 1 and size == 2 and speed_up < 1
    if tag in TENSOR_PARALLEL and (slower or (smallest == 1 and size == 4 and speed_up < 4 * LOW_EFFICIENCY)):
        said.append(f"TP {size} is {'slower than' if speed_up < 1 else f'only {speed_up:.2f}×'} TP 1: {_COMMUNICATION}")
    return tuple(said)


def best_stage(summary: Mapping[str, Any], *, size: int, label: str) -> SizedRun | None:
    """The hold with the most output tokens/s; None where none has any. ``summary`` is ``summary.json``."""
    stages = [one for one in summary["stages"] if one["stage_kind"] == "hold" and one["output_tokens_per_s"]]
    if not stages:
        return None
    stage = max(stages, key=lambda one: float(one["output_tokens_per_s"]))
    gpu = stage["gpu"] or {"mean": {}, "gpus": []}
    return SizedRun(
        size=size,
        label=label,
        stage=stage["name"],
        output_tokens_per_s=stage["output_tokens_per_s"],
        tpot_p50_s=stage["tpot_s"]["p50"],
        gpu_utilization=gpu["mean"].get("utilization"),
        sm_activity=gpu["mean"].get("sm_activity"),
        nvlink_bytes_per_s=_traffic(gpu["gpus"], "nvlink"),
        pcie_bytes_per_s=_traffic(gpu["gpus"], "pcie"),
        overloaded=stage["overloaded"],
    )


def _traffic(gpus: Sequence[Mapping[str, Any]], bus: str) -> float | None:
    """Sent and received, over all GPUs."""
    known = [value for gpu in gpus for way in ("tx", "rx") if (value := gpu[f"{bus}_{way}_bytes_per_s"]) is not None]
    return sum(known) if known else None
