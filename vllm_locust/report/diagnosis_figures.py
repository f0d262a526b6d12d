"""The figures that the diagnosis looks at, from the numbers of a run's stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from vllm_locust.diagnosis.diagnose import diagnose
from vllm_locust.diagnosis.figures import (
    ColdStart,
    GeneratorDoubt,
    GpuFigures,
    PrefillFigures,
    RunFigures,
    ServerFigures,
    StageFigures,
)
from vllm_locust.report.reading import Reading
from vllm_locust.report.worker_health import WorkerHealth
from vllm_locust.verdict.judge import Verdict
from vllm_locust.verdict.reason import Status

Json = Mapping[str, Any]

_OF_GENERATOR: Final = frozenset(
    ("schedule_lag", "slots_full", "rate_missed", "user_stamps", "receive_lag", "cpu_saturated", "run_delay")
)
"""Reasons of the verdict that mean: the generator was too slow, or held back."""


def diagnosis_json(
    stages: Sequence[Json],
    reading: Reading,
    cold_start: Json | None,
    health: WorkerHealth,
    verdict: Verdict,
) -> dict[str, Any]:
    """``stages`` and ``cold_start`` as in ``summary.json``; of ``reading`` both passes are over."""
    run = RunFigures(
        stages=[
            _stage(stage, reading.prefills[stage["stage"]].figures(), reading.stages[stage["stage"]].refused)
            for stage in stages
        ],
        cold_start=None if cold_start is None else _cold_start(cold_start),
        worker_samples=health.samples or 0,
        doubts=[
            GeneratorDoubt(
                code=reason.code,
                sentence=reason.sentence,
                invalid=reason.severity is Status.INVALID,
                by_full_slots=reason.by_full_slots,
            )
            for reason in verdict.reasons
            if reason.code in _OF_GENERATOR
        ],
        later_turns=reading.turns.later_share(),
        shared_prefix=_shared_prefix(reading),
        targets=reading.first_tokens.targets,
    )
    return diagnose(run).as_json()


def _shared_prefix(reading: Reading) -> float | None:
    """The first request of a group repeats nothing."""
    prefix, prompts = reading.facts.shared_prefix, reading.total.floats["prompt_tokens"]
    known = prompts[~np.isnan(prompts)]
    if prefix is None or not len(known):
        return None
    repeats = max(0, len(known) - prefix["groups"])
    return min(1.0, prefix["tokens"] * repeats / float(known.sum()))


def _ns(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * 1e9


def _stage(stage: Json, prefills: PrefillFigures, refused: int) -> StageFigures:
    ttft, gap, in_flight = stage["ttft_s"], stage["chunk_gap_s"], stage["in_flight"]
    ok, output, length_s = stage["requests"]["ok"], stage["output_tokens_per_s"], stage["length_s"]
    return StageFigures(
        name=stage["name"],
        load=next((load for load in (stage["offered_rps"], stage["users"]) if load is not None), in_flight["mean"]),
        ok_requests=ok,
        attempted=stage["requests"]["attempted"],
        refused=refused,
        output_tokens=output * length_s / ok if output is not None and length_s and ok else None,
        total_tokens_per_s=stage["total_tokens_per_s"],
        ttft_n=ttft["n"],
        ttft_ns=_ns(ttft["mean"]),
        ttft_p99_ns=_ns(ttft["p99"]),
        e2e_ns=_ns(stage["e2e_s"]["mean"]),
        gaps=gap["n"],
        gap_ns=_ns(gap["mean"]),
        gap_p50_ns=_ns(gap["p50"]),
        tokens_per_chunk=stage["tokens_per_chunk"],
        overloaded=stage["overloaded"],
        server=None if stage["server"] is None else _server(stage["server"]),
        gpus=[] if stage["gpu"] is None else [_gpu(gpu) for gpu in stage["gpu"]["gpus"]],
        prefills=prefills,
    )


def _server(server: Json) -> ServerFigures:
    waiting, running, kv_cache, ttft = (
        server[name] or {} for name in ("requests_waiting", "requests_running", "kv_cache_usage", "ttft_s")
    )
    finished = server["requests_finished"]
    return ServerFigures(
        running_max=running.get("max"),
        waiting_mean=waiting.get("mean"),
        waiting_first=waiting.get("first"),
        waiting_last=waiting.get("last"),
        waiting_grows=waiting.get("grows"),
        kv_cache_max=kv_cache.get("max"),
        preemptions=server["preemptions"],
        finished=None if finished is None else sum(finished.values()),
        prefix_cache_queries=server["prefix_cache_queries"],
        prefix_cache_hit_rate=server["prefix_cache_hit_rate"],
        ttft_n=ttft.get("n"),
        ttft_ns=_ns(ttft.get("mean")),
        queue_ns=_ns(ttft.get("queue")),
        network_ns=_ns(ttft.get("network")),
    )


def _gpu(gpu: Json) -> GpuFigures:
    names = ("utilization", "sm_activity", "tensor_activity", "dram_activity", "memory_bandwidth_utilization")
    instance = "" if gpu["mig_instance"] is None else f" MIG {gpu['mig_instance']}"
    return GpuFigures(
        name=f"GPU {gpu['gpu_index']}{instance} of {gpu['host']}",
        throttled=gpu["throttled_fraction"],
        **{name: None if gpu[name] is None else gpu[name]["mean"] for name in names},
    )


def _cold_start(cold: Json) -> ColdStart:
    return ColdStart(
        requests=cold["requests"],
        ttft_ns=cold["ttft_mean_s"] * 1e9,
        window_p50_ns=cold["window_ttft_p50_s"] * 1e9,
        matters=cold["matters"],
    )
