"""The figures of GPUs in a stage, from samples whose answers are plain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.report.rows import BASE, SECOND, batch, request, run
from vllm_locust.report.gpu_numbers import GpuMetrics
from vllm_locust.report.gpu_series import silent_share
from vllm_locust.report.html import render_html
from vllm_locust.report.run_facts import Interval
from vllm_locust.report.summary import summarize
from vllm_locust.report.text import WIDTH, render_text
from vllm_locust.store.telemetry_schema import telemetry_rows
from vllm_locust.telemetry import TelemetryKind

GIB = 1 << 30


def row(second: float, index: int = 0, **columns: object) -> dict[str, object]:
    known: dict[str, object] = {
        "gpu_name": "NVIDIA H200",
        "memory_used_bytes": 60 * GIB,
        "memory_total_bytes": 80 * GIB,
    }
    key = {"time_unix_ns": BASE + round(second * SECOND), "host": "h", "gpu_index": index, "gpu_uuid": f"GPU-{index}"}
    return key | known | columns


def metrics(*rows: dict[str, object], uncertainty_ns: int | None = None) -> GpuMetrics:
    return GpuMetrics([telemetry_rows(TelemetryKind.GPU, rows)] if rows else [], uncertainty_ns)


def stage(first: float, last: float) -> Interval:
    return Interval(start_unix_ns=BASE + round(first * SECOND), end_unix_ns=BASE + round(last * SECOND))


def numbers(found: GpuMetrics, first: float, last: float, output_tokens_per_s: float | None = None) -> dict[str, Any]:
    told = found.numbers(stage(first, last), output_tokens_per_s)
    assert told is not None
    return told


def tenths(first: int, last: int) -> Sequence[float]:
    return [tenth / 10 for tenth in range(first * 10, last * 10)]


def test_nothing_was_sampled() -> None:
    assert metrics().numbers(stage(0, 10), 5.0) is None
    assert metrics(row(20)).numbers(stage(0, 10), 5.0) is None
    assert metrics(row(5)).numbers(None, None) is None


def test_a_stage_has_its_own_samples_in_any_order() -> None:
    rows = [row(t, utilization=n / 100, power_w=100.0 + n) for n, t in enumerate(tenths(0, 10))]
    told = numbers(metrics(*rows[50:], *rows[:50], row(-1, utilization=1.0), row(10, utilization=1.0)), 0, 10)
    (gpu,) = told["gpus"]
    assert gpu["utilization"] == pytest.approx({"mean": 0.495, "p50": 0.49, "p95": 0.94, "max": 0.99})
    assert (gpu["above_95_fraction"], gpu["below_70_fraction"]) == (0.04, 0.7)
    assert gpu["power_w"] == pytest.approx({"mean": 149.5, "p50": 149, "p95": 194, "max": 199})
    assert (gpu["samples"], gpu["gpu_name"], gpu["mig_instance"]) == (100, "NVIDIA H200", None)
    assert (gpu["memory_used_max_bytes"], gpu["memory_total_bytes"]) == (60 * GIB, 80 * GIB)
    assert numbers(metrics(*rows), 2, 3)["gpus"][0]["utilization"]["max"] == pytest.approx(0.29)


def test_what_was_not_told_is_null() -> None:
    (gpu,) = numbers(metrics(row(1), row(2)), 0, 10)["gpus"]
    nulls = {name for name, value in gpu.items() if value is None}
    assert nulls == {
        *("utilization", "memory_bandwidth_utilization", "sm_activity", "sm_occupancy", "tensor_activity"),
        *("dram_activity", "above_95_fraction", "below_70_fraction", "power_w", "energy_j", "temperature_max_c"),
        *("sm_clock_mhz", "throttled_fraction", "ecc_errors", "mig_instance"),
        *(f"{bus}_{way}_bytes_per_s" for bus in ("pcie", "nvlink") for way in ("tx", "rx")),
    }
    assert gpu["xids"] == []


def test_energy_is_read_from_the_counter_between_the_edges_of_the_stage() -> None:
    # 500 W till second 5, then 100 W; the counter is read once a second, between the edges.
    def joules(t: float) -> float:
        return 500 * t if t < 5 else 2500 + 100 * (t - 5)

    rows = [row(t + 0.5, energy_j=1e6 + joules(t + 0.5), power_w=9.0) for t in range(-2, 12)]
    told = numbers(metrics(*rows), 2, 5, output_tokens_per_s=20.0)
    # The reading at 5.5 stands for 4.5…5.5: half of 500 + half of 100 over that second.
    expected = 500 * 2.5 + 300 * 0.5
    assert told["energy_j"] == pytest.approx(expected)
    assert told["energy_per_output_token_j"] == pytest.approx(expected / 60)


@pytest.mark.parametrize(
    ("counter", "expected"),
    [
        ({}, 2000.0),  # no counter: by its power
        ({0: 5000.0, 9: 10.0}, 2000.0),  # it went back: the driver was loaded anew
        ({0: 5000.0, 3: 5600.0}, 2000.0),  # it was read in less than nine tenths of the stage
        ({0: 5000.0, 9.9: 6980.0}, 2000.0),
    ],
)
def test_energy_without_a_counter_that_can_be_trusted(counter: dict[float, float], expected: float) -> None:
    rows = [row(t, power_w=200.0, energy_j=counter.get(t)) for t in tenths(0, 10)]
    assert numbers(metrics(*rows), 0, 10)["energy_j"] == pytest.approx(expected)


def test_between_two_readings_of_the_counter_the_energy_is_where_the_power_was() -> None:
    """Read every 10 s; 600 W from 4 s to 16 s, else 100 W. Its last reading lies before the stage's end."""
    watts = {t: 600.0 if 4 <= t < 16 else 100.0 for t in tenths(-1, 21)}
    joules: dict[float, float] = {-1: 0.0, 9: 100 * 5 + 600 * 5.0, 19: 100 * 5 + 600 * 12 + 100 * 3.0}
    rows = [row(t, power_w=watts[t], energy_j=joules.get(t)) for t in tenths(-1, 21)]
    told = {edges: numbers(metrics(*rows), *edges)["energy_j"] for edges in ((0, 4), (4, 16), (16, 20), (5, 8))}
    assert told == pytest.approx({(0, 4): 400, (4, 16): 7200, (16, 20): 400, (5, 8): 1800}, rel=0.02, abs=60)
    # A counter that says twice as much is believed, where it was read.
    doubled = [one | {"energy_j": None if one["energy_j"] is None else 2 * joules[t]}
               for one, t in zip(rows, tenths(-1, 21), strict=True)]  # fmt: skip
    assert numbers(metrics(*doubled), 5, 8)["energy_j"] == pytest.approx(3600, rel=0.02)


def test_energy_that_would_be_guessed_between_two_readings_is_not_known() -> None:
    # 600 W till 81 s, then idle; nothing was seen from there to 105 s.
    watts = {t: 600.0 if t < 81 else 100.0 for t in tenths(0, 120)}
    joules = np.cumsum([watts[t] * 0.1 for t in tenths(0, 120)]).tolist()
    rows = [
        row(t, power_w=watts[t], energy_j=joules[round(t * 10)] if round(t * 10) % 50 == 0 else None)
        for t in tenths(0, 120)
        if not 81 <= t < 105
    ]
    assert numbers(metrics(*rows), 0, 100)["energy_j"] is None
    assert numbers(metrics(*rows), 0, 80)["energy_j"] == pytest.approx(48_000, rel=0.01)
    # Of the last 1 s of 81 the power is known.
    assert numbers(metrics(*rows), 0, 81)["energy_j"] == pytest.approx(48_600, rel=0.01)


@pytest.mark.parametrize(("first", "last", "known"), [(12, 14, False), (12, 32, False), (18, 112, True)])
def test_energy_without_power_is_known_between_readings_only(first: int, last: int, known: bool) -> None:
    """The counter is read every 10 s, and where the energy went in between is told by nothing."""
    rows = [row(t, energy_j=100.0 * t) for t in range(0, 121, 10)]
    told = numbers(metrics(*rows, *(row(t + 0.5) for t in range(120))), first, last)["energy_j"]
    assert told == (pytest.approx(100.0 * (last - first)) if known else None)


def test_energy_of_a_stage_that_was_hardly_watched_is_not_known() -> None:
    rows = [row(t, power_w=200.0) for t in tenths(0, 5)]
    assert numbers(metrics(*rows), 0, 10)["energy_j"] is None


def test_several_gpus_are_summed_averaged_and_compared() -> None:
    rows = [
        row(t, index, utilization=use, power_w=watts, memory_used_bytes=memory)
        for t in tenths(0, 10)
        for index, use, watts, memory in ((0, 1.0, 600.0, 70 * GIB), (1, 0.4, 200.0, 10 * GIB))
    ]
    told = numbers(metrics(*rows, uncertainty_ns=250_000), 0, 10, output_tokens_per_s=100.0)
    assert told["mean"]["utilization"] == pytest.approx(0.7)
    assert told["spread"] == {
        "utilization": pytest.approx(0.6),
        "sm_activity": None,
        "memory_used_max_bytes": 60 * GIB,
        "power_w": pytest.approx(400),
    }
    assert (told["power_w"], told["energy_j"]) == pytest.approx((800, 8000))
    assert told["energy_per_output_token_j"] == pytest.approx(8.0)
    assert told["clock_uncertainty_s"] == 250e-6


def test_energy_of_all_is_not_known_where_that_of_one_is_not() -> None:
    rows = [row(t, index, power_w=None if index else 100.0) for t in tenths(0, 10) for index in (0, 1)]
    told = numbers(metrics(*rows), 0, 10)
    assert (told["gpus"][0]["energy_j"], told["energy_j"], told["power_w"]) == (pytest.approx(1000), None, None)


def test_mig_instances_are_gpus_without_power() -> None:
    rows = [
        row(t, mig_instance=instance, gpu_uuid=uuid, power_w=watts)
        for t in tenths(0, 10)
        for instance, uuid, watts in ((None, "GPU-0", 100.0), (1, "MIG-a", None), (2, "MIG-b", None))
    ]
    told = numbers(metrics(*rows), 0, 10)
    assert [gpu["mig_instance"] for gpu in told["gpus"]] == [None, 1, 2]
    assert told["power_w"] == pytest.approx(100)


def test_throttling_xids_and_memory_errors() -> None:
    reasons = {0: ["gpu_idle"], 1: ["sw_power_cap"], 2: ["sw_power_cap", "hw_thermal_slowdown"], 3: []}
    rows = [row(t, throttle_reasons=reasons[t], ecc_errors=4 + t, xid={2: 79}.get(t)) for t in range(4)]
    (gpu,) = numbers(metrics(*rows, row(3.5)), 0, 4)["gpus"]
    assert gpu["throttled_fraction"] == {"hw_thermal_slowdown": 0.25, "sw_power_cap": 0.5}
    assert (gpu["xids"], gpu["ecc_errors"]) == ([79], 3)


@pytest.mark.parametrize(
    ("times", "share"),
    [
        ([], 1.0),
        ([5.0, 10.0, 15.0], 0.0),  # gaps of just 5 s
        ([t / 10 for t in range(100)], 0.505),  # silent since 9.9
        ([*range(1, 8), *range(14, 20)], 0.35),
        ([2.0, 10.0, 18.0], 0.0),  # it is sampled every 8 s
    ],
)
def test_silence(times: list[float], share: float) -> None:
    at = np.array([round(t * SECOND) for t in times], dtype=np.int64)
    assert silent_share(at, 0, 20 * SECOND) == pytest.approx(share)


def watched(first: float, *indices: int) -> dict[str, Any]:
    return {
        "gpus": [
            {"host": "h", "gpu_index": n, "gpu_uuid": f"GPU-{n}", "first_unix_ns": BASE + round(first * SECOND)}
            for n in indices
        ],
        "sources": [
            {"source": "g-1", "kinds": ["gpu", "host"], "uncertainty_ns": 90_000},
            {"source": "h-1", "kinds": ["host"], "uncertainty_ns": 1 << 40},
        ],
    }


def summary(rows: list[dict[str, object]], telemetry: dict[str, Any] | None) -> dict[str, Any]:
    requests = [request(10 + t / 10, worker_id="w") for t in range(95)]
    source = [telemetry_rows(TelemetryKind.GPU, rows)] if rows else None
    return summarize(run(telemetry=telemetry), [batch(requests)], gpu=source)


def codes(found: dict[str, Any]) -> list[str]:
    return [reason["code"] for reason in found["verdict"]["reasons"]]


def test_a_gpu_that_fell_silent_degrades_the_run_and_one_that_came_late_does_not() -> None:
    whole = [row(t, utilization=0.5) for t in tenths(5, 25)]
    assert "telemetry_missing" not in codes(summary(whole, watched(5, 0)))
    lost = [one for one in whole if int(str(one["time_unix_ns"])) < BASE + 13 * SECOND]
    found = summary(lost, watched(5, 0))
    (reason,) = [one for one in found["verdict"]["reasons"] if one["code"] == "telemetry_missing"]
    assert (reason["severity"], reason["value"]) == ("degraded", pytest.approx(0.71))
    assert "GPU 0 of h (GPU-0)" in reason["sentence"]
    late = [row(t, utilization=0.5) for t in tenths(17, 25)]
    assert "telemetry_missing" not in codes(summary(late, watched(17, 0)))
    assert "telemetry_missing" in codes(summary([], watched(5, 0)))
    assert "telemetry_missing" not in codes(summary([], None))


def test_the_pages_show_what_utilization_hides() -> None:
    busy = {"utilization": 0.99, "sm_activity": 0.58, "tensor_activity": 0.021, "dram_activity": 0.55}
    held: dict[str, object] = {"throttle_reasons": ["hw_slowdown"], "temperature_c": 71.0, "power_w": 454.0}
    rows = [row(t, index, **busy, **held) for t in tenths(5, 25) for index in (0, 1)]
    found = summary(rows, watched(5, 0, 1))
    assert found["stages"][0]["gpu"]["clock_uncertainty_s"] == 90e-6
    text = render_text(found)
    assert all(len(line) <= WIDTH for line in text.splitlines())
    lines = {line[:26].strip(): line[26:].split() for line in text.splitlines()}
    assert lines["some kernel ran"] == ["99", "%"]
    assert lines["SMs busy"] == ["58", "%"]
    assert lines["tensor cores busy"] == ["2.1", "%"]
    assert lines["memory bandwidth used"] == ["55", "%"]
    assert lines["memory, fullest"] == ["75", "%"]
    assert lines["power, all GPUs"] == ["908", "W"]
    assert "GPU 1 of h was held back for 100 % of the time: hw slowdown" in text.replace("\n ", "")
    page = render_html(found, run())
    assert "tensor cores busy" in page
    assert "some kernel ran" not in render_html(summary([], None), run())
