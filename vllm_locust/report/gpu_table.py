"""What the GPUs did, stage beside stage: means over the GPUs, and how unequal these were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from vllm_locust.diagnosis.finding import THRESHOLDS
from vllm_locust.diagnosis.gpu import POWER_CAP
from vllm_locust.report import figures

Json = Mapping[str, Any]


def has_gpu(stages: Sequence[Json]) -> bool:
    return any(stage["gpu"] is not None for stage in stages)


def _row(show: Callable[[Json], str]) -> Callable[[Json], str]:
    return lambda stage: figures.UNKNOWN if stage["gpu"] is None else show(stage["gpu"])


def _share(name: str) -> Callable[[Json], str]:
    return _row(lambda gpu: figures.share(gpu["mean"][name]))


def _mean_of(gpu: Json, name: str) -> float | None:
    values = [one[name] for one in gpu["gpus"] if one[name] is not None]
    return sum(values) / len(values) if values else None


def _fullest(gpu: Json) -> str:
    shares = [
        one["memory_used_max_bytes"] / one["memory_total_bytes"]
        for one in gpu["gpus"]
        if one["memory_used_max_bytes"] is not None and one["memory_total_bytes"]
    ]
    return figures.share(max(shares, default=None))


def _hottest(gpu: Json) -> str:
    degrees = max(
        (one["temperature_max_c"] for one in gpu["gpus"] if one["temperature_max_c"] is not None), default=None
    )
    return figures.UNKNOWN if degrees is None else f"{degrees:.0f} °C"


def _unit(value: float | None, unit: str) -> str:
    return figures.UNKNOWN if value is None else f"{figures.rate(value)} {unit}"


_LOOKS_BUSY: Final = 0.90

GPU_ROWS: Final[tuple[tuple[str, Callable[[Json], str]], ...]] = (
    ("GPUs", _row(lambda gpu: figures.count(len(gpu["gpus"])))),
    ("some kernel ran", _share("utilization")),
    ("  above 95 %", _row(lambda gpu: figures.share(_mean_of(gpu, "above_95_fraction")))),
    ("  below 70 %", _row(lambda gpu: figures.share(_mean_of(gpu, "below_70_fraction")))),
    ("SMs busy", _share("sm_activity")),
    ("tensor cores busy", _share("tensor_activity")),
    ("memory bandwidth used", _share("dram_activity")),
    ("memory, fullest", _row(_fullest)),
    ("power, all GPUs", _row(lambda gpu: _unit(gpu["power_w"], "W"))),
    ("energy, all GPUs", _row(lambda gpu: _unit(gpu["energy_j"], "J"))),
    ("energy/output token", _row(lambda gpu: _unit(gpu["energy_per_output_token_j"], "J"))),
    ("temperature, hottest", _row(_hottest)),
    ("uneven by (kernel ran)", _row(lambda gpu: figures.share(gpu["spread"]["utilization"]))),
)
"""Label and value. The first share is NVML's utilization, which says nothing about how busy a GPU was."""


def gpu_remarks(stages: Sequence[Json]) -> Iterator[str]:
    for stage in stages:
        name = f"stage {stage['name']}" if len(stages) > 1 else "the window"
        if (hidden := _hidden(stage["gpu"])) is not None:
            yield f"{name}: {hidden}"
        for gpu in (stage["gpu"] or {"gpus": ()})["gpus"]:
            yield from (f"{name}: GPU {gpu['gpu_index']} of {gpu['host']} {fault}" for fault in _faults(gpu))


def _hidden(gpu: Json | None) -> str | None:
    """What a high utilization hides: that the tensor cores rested."""
    if gpu is None or (gpu["mean"]["utilization"] or 0.0) < _LOOKS_BUSY:
        return None
    tensor, dram = gpu["mean"]["tensor_activity"], gpu["mean"]["dram_activity"]
    if tensor is None or dram is None or tensor >= THRESHOLDS.tensor_activity:
        return None
    return (
        f"the GPUs look busy, as some kernel ran for {figures.share(gpu['mean']['utilization'])} of the time; the "
        f"tensor cores worked for {figures.share(tensor)} of it, and {figures.share(dram)} of the memory's bandwidth "
        "was used"
    )


def _faults(gpu: Json) -> Iterator[str]:
    for reason, share in (gpu["throttled_fraction"] or {}).items():
        if share >= (THRESHOLDS.power_capped if reason == POWER_CAP else THRESHOLDS.throttled):
            yield f"was held back for {figures.share(share)} of the time: {reason.replace('_', ' ')}"
    if gpu["xids"]:
        yield f"reported XID {', '.join(map(str, gpu['xids']))}"
    if gpu["ecc_errors"]:
        yield f"had {figures.count(gpu['ecc_errors'])} uncorrected memory errors"
