"""A DCGM exporter's page becomes the rows that NVML would give."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vllm_locust.clock import WallAxis
from vllm_locust.collect.dcgm import DcgmSource
from vllm_locust.collect.gpu_source import Remarks
from vllm_locust.collect.page_request import Page, PageFailed
from vllm_locust.metrics_page import MetricsPage
from vllm_locust.telemetry import COLUMNS, TelemetryKind

PAGE = (Path(__file__).parent / "samples" / "dcgm_exporter.txt").read_text(encoding="utf-8")
"""Put together from the exporter's field lists and from pages in its issues."""
URL = MetricsPage.parse("http://node-7:9400")


def answer(text: str) -> Page:
    return Page(text, 1_000, 3_000)


@contextmanager
def source(request: Callable[[MetricsPage], Page], said: list[str], interval_s: float = 60) -> Iterator[DcgmSource]:
    made = DcgmSource(URL, request, Remarks(said.append), axis=WallAxis(), interval_ns=round(interval_s * 1e9))
    try:
        yield made
    finally:
        made.close()


def gpu_rows(found: DcgmSource) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    deadline = time.monotonic() + 10
    while not rows and time.monotonic() < deadline:
        rows += [dict(row) for row in found.take()[TelemetryKind.GPU]]
        time.sleep(0.01)
    return rows


def test_a_page_becomes_rows_in_our_units() -> None:
    axis = WallAxis()
    made = DcgmSource(URL, lambda _: answer(PAGE), Remarks(lambda _: None), axis=axis, interval_ns=60_000_000_000)
    rows = {row["gpu_uuid"]: row for row in gpu_rows(made)}
    made.close()
    assert set(rows) == {"GPU-aa", "GPU-bb", "GPU-bb/7"}
    assert rows["GPU-aa"] == {
        "time_unix_ns": axis.offset_ns + 2_000,
        "host": "node-7",
        "gpu_index": 0,
        "gpu_uuid": "GPU-aa",
        "gpu_name": "NVIDIA H100 NVL",
        "mig_instance": None,
        "utilization": 0.99,
        "memory_bandwidth_utilization": pytest.approx(0.7),
        "sm_activity": 0.582,
        "tensor_activity": 0.0209,
        "dram_activity": 0.5465,
        "memory_used_bytes": 60_000 << 20,
        "memory_total_bytes": 80_600 << 20,
        "power_w": 454.173,
        "energy_j": pytest.approx(10_843.923),
        "temperature_c": 49,
        "sm_clock_mhz": 1980,
        "pcie_rx_bytes_per_s": 226_689_612,
        "throttle_reasons": ["sw_power_cap"],
        "xid": None,
    }
    assert set(rows["GPU-aa"]) <= {column.name for column in COLUMNS[TelemetryKind.GPU]}
    # What DCGM has no value for it writes as numbers of its own, near the ends of their types.
    assert {"temperature_c", "energy_j", "dram_activity"}.isdisjoint(rows["GPU-bb"])
    assert (rows["GPU-bb"]["utilization"], rows["GPU-bb"]["sm_clock_mhz"]) == (0.0, 345)
    assert (rows["GPU-bb/7"]["mig_instance"], rows["GPU-bb/7"]["memory_used_bytes"]) == (7, 12 << 20)


def test_an_xid_that_goes_on_being_shown_is_news_once() -> None:
    shown = iter((0, 0, 79, 79, 31, 0))

    def request(_: MetricsPage) -> Page:
        return answer(f'DCGM_FI_DEV_XID_ERRORS{{gpu="0",UUID="GPU-aa"}} {next(shown, 0)}\n')

    said: list[str] = []
    with source(request, said, interval_s=0.02) as found:
        xids: list[int | None] = []
        while len(xids) < 5:
            xids += [row["xid"] for row in gpu_rows(found)]
    assert xids[:5] == [None, 79, None, 31, None]
    assert said == []


def test_an_exporter_that_goes_away_is_said_once_and_asked_again() -> None:
    answers: list[Page | PageFailed] = [answer(PAGE), PageFailed("it answered 503"), PageFailed("it answered 503")]

    def request(_: MetricsPage) -> Page:
        given = answers.pop(0) if answers else answer(PAGE)
        if isinstance(given, PageFailed):
            raise given
        return given

    said: list[str] = []
    with source(request, said, interval_s=0.02) as found:
        assert gpu_rows(found)
    assert said == [
        "--dcgm-url http://node-7:9400/metrics: it answered 503; it is tried again",
        "--dcgm-url http://node-7:9400/metrics answers again",
    ]


@pytest.mark.parametrize(
    "text", ["", "vllm:num_requests_running 3\n", 'DCGM_FI_DEV_GPU_UTIL{gpu="x",UUID="GPU-1"} 3\n']
)
def test_a_page_without_a_gpu_is_the_wrong_one(text: str) -> None:
    with pytest.raises(PageFailed, match="its page tells of no GPU"):
        DcgmSource(URL, lambda _: answer(text), Remarks(lambda _: None), axis=WallAxis())


def test_gpus_are_described() -> None:
    with source(lambda _: answer(PAGE), []) as found:
        assert next(found.describe()) == "GPU 0 of node-7 (GPU-aa): NVIDIA H100 NVL"
