"""Rules of the diagnosis: what the GPUs were busy with. That some kernel ran says little: see ``GpuFigures``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Final

from vllm_locust.diagnosis.figures import GpuFigures, RunFigures, StageFigures
from vllm_locust.diagnosis.finding import Answer, Finding, Need, Rule, Thresholds
from vllm_locust.verdict.reason import number_text, percent_text

_ACTIVITIES: Final = {
    "tensor_activity": "tensor cores",
    "sm_activity": "SMs",
    "dram_activity": "memory",
    "memory_bandwidth_utilization": "memory (by NVML)",
}


def _mean(gpus: Sequence[GpuFigures], name: str) -> float | None:
    values = [value for gpu in gpus if (value := getattr(gpu, name)) is not None]
    return fmean(values) if values else None


def _used(stage: StageFigures, limits: Thresholds) -> list[GpuFigures]:
    """Those that ran anything: one that the server does not use says nothing of what limits it."""
    return [gpu for gpu in stage.gpus if gpu.utilization is None or gpu.utilization >= limits.gpu_unused]


def _busy_with(figures: dict[str, float | None]) -> str:
    return ", ".join(
        f"{words} {percent_text(value)}" for name, words in _ACTIVITIES.items() if (value := figures[name]) is not None
    )


def _figures(stage: StageFigures, limits: Thresholds) -> dict[str, float | None]:
    gpus = _used(stage, limits)
    figures = {name: _mean(gpus, name) for name in ("utilization", *_ACTIVITIES)}
    if figures["dram_activity"] is not None:
        figures["memory_bandwidth_utilization"] = None
    return figures


def _traffic_is_high(figures: dict[str, float | None], limits: Thresholds) -> bool | None:
    if (dram := figures["dram_activity"]) is not None:
        return dram >= limits.dram_activity
    by_nvml = figures["memory_bandwidth_utilization"]
    return None if by_nvml is None else by_nvml >= limits.memory_bandwidth_utilization


def _computing_is_low(figures: dict[str, float | None], limits: Thresholds) -> bool | None:
    if (tensor := figures["tensor_activity"]) is not None:
        return tensor < limits.low_tensor_activity
    sms = figures["sm_activity"]
    return None if sms is None else sms < limits.low_sm_activity


def _memory_bound_decode(stage: StageFigures, _: RunFigures, limits: Thresholds) -> Answer:
    if not stage.gpus:
        return Need.GPU
    figures = _figures(stage, limits)
    high, low = _traffic_is_high(figures, limits), _computing_is_low(figures, limits)
    if high is None or low is None:
        return Need.GPU_ACTIVITY
    if not (high and low):
        return None
    busy = figures["utilization"]
    although = "" if busy is None else f", although some kernel ran for {percent_text(busy)}"
    return Finding(
        code="memory_bound_decode",
        weight=figures["dram_activity"] or figures["memory_bandwidth_utilization"] or 0.0,
        sentence=(
            f"the GPUs moved data more than they computed (of the time: {_busy_with(figures)}){although}: each step "
            "reads all weights and the KV cache for few tokens."
        ),
        figures=figures,
        attempt=(
            "more requests at a time (a higher --max-num-seqs, more load) while TPOT allows it; fewer bytes a step "
            "(--quantization fp8, --kv-cache-dtype fp8); several tokens a step (--speculative-config)"
        ),
        confirm="twice the requests in flight give nearly twice the tokens/s at about the same TPOT",
    )


def _compute_bound(stage: StageFigures, run: RunFigures, limits: Thresholds) -> Answer:
    if not stage.gpus:
        return Need.GPU
    figures = _figures(stage, limits)
    busy, tensor = figures["utilization"], figures["tensor_activity"]
    if busy is None and tensor is None:
        return Need.GPU_UTILIZATION
    flat = _flat_since(stage, run, limits)
    if tensor is not None and tensor >= limits.tensor_activity:
        return _computing(tensor, f"the GPUs computed (of the time: {_busy_with(figures)})", flat, stage, figures)
    if tensor is None and not _with_less_load(stage, run, limits):
        return Need.MORE_STAGES
    saturated = busy is not None and busy >= limits.utilization and not _traffic_is_high(figures, limits)
    if busy is None or not saturated or flat is None:
        return None
    if tensor is None:
        how = f"some kernel ran for {percent_text(busy)} of the time (whether it computed, tensor activity would tell)"
    else:
        how = f"the GPUs were busy for {percent_text(busy)} of the time ({_busy_with(figures)})"
    return _computing(busy, how, flat, stage, figures)


def _computing(
    weight: float, how: str, flat: StageFigures | None, stage: StageFigures, figures: dict[str, float | None]
) -> Finding:
    more = ""
    if flat is not None and stage.total_tokens_per_s is not None and flat.total_tokens_per_s is not None:
        more = (
            f", and the load of {stage.name} brought {number_text(stage.total_tokens_per_s, 4)} tokens/s where "
            f"{flat.name} had {number_text(flat.total_tokens_per_s, 4)}"
        )
    return Finding(
        code="compute_bound",
        weight=weight,
        sentence=f"{how}{more}.",
        figures={**figures, "total_tokens_per_s": stage.total_tokens_per_s},
        attempt=(
            "more GPUs (--tensor-parallel-size, --data-parallel-size), cheaper arithmetic (--quantization fp8), or "
            "less to compute (--enable-prefix-caching)"
        ),
        confirm="more load brings no more tokens/s; a higher SM clock or one more GPU does",
    )


def _with_less_load(stage: StageFigures, run: RunFigures, limits: Thresholds) -> list[StageFigures]:
    load = stage.load
    if load is None or stage.total_tokens_per_s is None:
        return []
    return [
        other
        for other in run.stages
        if other.load and other.total_tokens_per_s and load >= limits.more_load * other.load
    ]


def _flat_since(stage: StageFigures, run: RunFigures, limits: Thresholds) -> StageFigures | None:
    """The stage of least load that had as many tokens/s already, where that was clearly less load."""
    tokens = stage.total_tokens_per_s or 0.0
    flat = [
        other
        for other in _with_less_load(stage, run, limits)
        if tokens <= limits.flat_tokens * (other.total_tokens_per_s or 0.0)
    ]
    return min(flat, key=lambda other: other.load or 0.0, default=None)


def _uneven_gpus(stage: StageFigures, _: RunFigures, limits: Thresholds) -> Answer:
    if not stage.gpus:
        return Need.GPU
    if len(stage.gpus) < 2:
        return Need.TWO_GPUS
    known = [(gpu, gpu.utilization) for gpu in stage.gpus if gpu.utilization is not None]
    if len(known) < 2:
        return Need.GPU_UTILIZATION
    unused = [gpu.name for gpu, busy in known if busy < limits.gpu_unused]
    if unused and len(unused) < len(known):
        return Finding(
            code="uneven_gpus",
            weight=len(unused) / len(known),
            sentence=f"{' and '.join(unused)} ran nothing while the others worked.",
            figures={"gpus": float(len(known)), "unused": float(len(unused))},
            attempt=(
                "--tensor-parallel-size or --data-parallel-size, and CUDA_VISIBLE_DEVICES of the server; where another "
                "server owns it, leave it out with collect --gpus"
            ),
            confirm="every GPU has about the same share of the time",
        )
    shares = {name: _extremes(stage.gpus, name) for name in ("sm_activity", "utilization")}
    name, found = next((item for item in shares.items() if item[1] is not None), ("", None))
    if found is None or found[1][0] - found[0][0] < limits.gpu_spread:
        return None
    (least, idler), (most, worker) = found
    return Finding(
        code="uneven_gpus",
        weight=most - least,
        sentence=(
            f"{worker} was busy for {percent_text(most)} of the time ({name.replace('_', ' ')}) and {idler} for "
            f"{percent_text(least)}."
        ),
        figures={"least": least, "most": most},
        attempt=(
            "with replicas (--data-parallel-size) a router that looks at their queues; with --pipeline-parallel-size "
            "stages of equal cost, or --tensor-parallel-size; for experts --enable-expert-parallel --enable-eplb"
        ),
        confirm="requests running are even over the engines, and the spread over the GPUs goes",
    )


def _extremes(gpus: Sequence[GpuFigures], name: str) -> tuple[tuple[float, str], tuple[float, str]] | None:
    values = [(value, gpu.name) for gpu in gpus if (value := getattr(gpu, name)) is not None]
    return (min(values), max(values)) if len(values) > 1 else None


POWER_CAP: Final = "sw_power_cap"


def _throttling(stage: StageFigures, _: RunFigures, limits: Thresholds) -> Answer:
    if not stage.gpus:
        return Need.GPU
    told = [(gpu, gpu.throttled) for gpu in stage.gpus if gpu.throttled is not None]
    if not told:
        return Need.THROTTLE_REASONS
    held = [
        (share, reason, gpu.name)
        for gpu, reasons in told
        for reason, share in reasons.items()
        if share >= (limits.power_capped if reason == POWER_CAP else limits.throttled)
    ]
    if not held:
        return None
    share, reason, name = max(held)
    others = len({gpu for _, _, gpu in held}) - 1
    also = f" (and {others} more)" if others else ""
    return Finding(
        code="throttling",
        weight=share,
        sentence=(
            f"the clocks of {name}{also} were held down for {percent_text(share)} of the time: "
            f"{reason.replace('_', ' ')}."
        ),
        figures={"throttled": share},
        attempt=(
            "the power limit (nvidia-smi -pl); quantization and smaller steps draw less"
            if reason == POWER_CAP
            else "cooling, power supply and what nvidia-smi -q -d PERFORMANCE names; then run again"
        ),
        confirm="the SM clock stays at its highest, and tokens/s rise with it",
    )


GPU_RULES: Final[tuple[tuple[str, Rule], ...]] = (
    ("compute_bound", _compute_bound),
    ("memory_bound_decode", _memory_bound_decode),
    ("throttling", _throttling),
    ("uneven_gpus", _uneven_gpus),
)
