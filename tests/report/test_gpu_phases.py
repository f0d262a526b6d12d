"""Rows that the collector took on an H200, idle and under five seconds and more of known work: what the report makes of
them. Plain utilization cannot tell three of the loads apart; the other columns do.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, Final

import pytest

from tests.report.rows import batch, request, run
from vllm_locust.report.summary import summarize
from vllm_locust.report.text import WIDTH, render_text
from vllm_locust.store.telemetry_schema import telemetry_rows
from vllm_locust.telemetry import TelemetryKind

SAMPLES: Final = Path(__file__).parents[1] / "collect" / "samples" / "h200"
PHASES: Final = ("idle", "matmul", "copy", "thin", "generate")
"""``thin`` multiplies by thin matrices as decoding does; ``generate`` is a transformer of 5 billion parameters that
writes tokens without CUDA graphs.
"""
HALF_A_STEP_NS: Final = 50_000_000


def sampled(phase: str) -> dict[str, list[dict[str, Any]]]:
    kinds: dict[str, list[dict[str, Any]]] = {"gpu": [], "gpu_processes": [], "host": []}
    with gzip.open(SAMPLES / f"{phase}.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            kinds[row.pop("kind")].append(row)
    return kinds


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    phases = [sampled(phase) for phase in PHASES]
    spans = [(one["gpu"][0]["time_unix_ns"], one["gpu"][-1]["time_unix_ns"]) for one in phases]
    stages = [
        {"stage": n, "name": name, "stage_kind": "hold", "start_unix_ns": first, "end_unix_ns": last + HALF_A_STEP_NS}
        for n, (name, (first, last)) in enumerate(zip(PHASES, spans, strict=True))
    ]
    described = run(stages=stages)
    described["window"] = {"start_unix_ns": spans[0][0], "end_unix_ns": spans[-1][1] + HALF_A_STEP_NS}
    requests = [request(0, stage=n) | {"sent_unix_ns": first + 1} for n, (first, _) in enumerate(spans)]
    gpu = [telemetry_rows(TelemetryKind.GPU, one["gpu"]) for one in phases]
    host = [telemetry_rows(TelemetryKind.HOST, one["host"]) for one in phases]
    return summarize(described, [batch(requests)], gpu=gpu, host=host)


def of(summary: dict[str, Any], phase: str) -> dict[str, Any]:
    (stage,) = [stage for stage in summary["stages"] if stage["name"] == phase]
    (gpu,) = stage["gpu"]["gpus"]
    assert isinstance(gpu, dict)
    return gpu


def test_utilization_does_not_tell_loads_apart(summary: dict[str, Any]) -> None:
    busy = {phase: of(summary, phase)["utilization"]["mean"] for phase in PHASES}
    assert busy["idle"] == 0
    assert busy == pytest.approx(busy | {"matmul": 0.98, "copy": 0.99, "thin": 0.98}, abs=0.01)
    assert busy["generate"] == pytest.approx(0.51, abs=0.02)


@pytest.mark.parametrize(
    ("phase", "tensor", "dram", "sms", "watts"),
    [
        ("idle", 0.0, 0.0, 0.0, 124),
        ("matmul", 0.92, 0.17, 0.95, 689),
        ("copy", 0.0, 0.88, 0.98, 473),
        ("thin", 0.063, 0.80, 0.83, 639),
        ("generate", 0.19, 0.18, 0.385, 389),
    ],
)
def test_what_the_gpu_was_busy_with(
    summary: dict[str, Any], phase: str, tensor: float, dram: float, sms: float, watts: float
) -> None:
    """The median, since the first second of a phase is half before it."""
    gpu = of(summary, phase)
    (length_s,) = [stage["length_s"] for stage in summary["stages"] if stage["name"] == phase]
    medians = {name: gpu[name]["p50"] for name in ("tensor_activity", "dram_activity", "sm_activity")}
    expected = {"tensor_activity": tensor, "dram_activity": dram, "sm_activity": sms}
    assert medians == pytest.approx(expected, abs=0.01)
    assert gpu["power_w"]["mean"] == pytest.approx(watts, abs=1)
    assert gpu["energy_j"] == pytest.approx(gpu["power_w"]["mean"] * length_s, rel=0.005), (
        "its counter and its power agree"
    )


def test_the_report_says_what_utilization_hides(summary: dict[str, Any]) -> None:
    text = render_text(summary)
    assert all(len(line) <= WIDTH for line in text.splitlines())
    flat = " ".join(text.split())
    for phase, busy, tensor, dram in (("copy", "99 %", "0 %", "87.4 %"), ("thin", "97.8 %", "6.27 %", "79.8 %")):
        assert (
            f"stage {phase}: the GPUs look busy, as some kernel ran for {busy} of the time; the tensor cores worked "
            f"for {tensor} of it, and {dram} of the memory's bandwidth was used"
        ) in flat
    assert flat.count("the GPUs look busy") == 2


def test_the_diagnosis_names_what_each_load_is_bound_by(summary: dict[str, Any]) -> None:
    found = {finding["code"]: set(finding["stages"]) for finding in summary["diagnosis"]["findings"]}
    assert found["compute_bound"] == {"matmul"}
    assert found["memory_bound_decode"] == {"copy", "thin"}
    assert "idle" not in found["throttling"]
    assert found["throttling"] >= {"matmul"}, "it was at its power limit"


def test_the_collector_missed_nothing(summary: dict[str, Any]) -> None:
    hosts = [stage["hosts"][0] for stage in summary["stages"]]
    assert sum(host["missed_ticks"] for host in hosts) == 0
    assert all(host["collector_cpu_fraction"]["mean"] < 0.02 for host in hosts[1:])
