"""The figures of hosts in a stage, from samples whose answers are plain."""

from __future__ import annotations

from typing import Any

import pytest

from tests.report.rows import BASE, SECOND, batch, health, health_row, interval, request, run
from vllm_locust.report.host_numbers import HostMetrics
from vllm_locust.report.html import render_html
from vllm_locust.report.run_facts import Interval
from vllm_locust.report.summary import summarize
from vllm_locust.report.text import WIDTH, render_text
from vllm_locust.store.telemetry_schema import telemetry_rows
from vllm_locust.telemetry import TelemetryKind


def row(second: float, host: str = "h1", **columns: object) -> dict[str, object]:
    known = {"memory_used_bytes": 3 << 30, "memory_total_bytes": 4 << 30, "missed_ticks": 0}
    return {"time_unix_ns": BASE + round(second * SECOND), "host": host} | known | columns


def metrics(*rows: dict[str, object], **roles: list[str]) -> HostMetrics:
    return HostMetrics([telemetry_rows(TelemetryKind.HOST, rows)] if rows else [], roles)


def stage(first: float, last: float) -> Interval:
    return Interval(start_unix_ns=BASE + round(first * SECOND), end_unix_ns=BASE + round(last * SECOND))


def test_nothing_was_sampled() -> None:
    assert metrics().numbers(stage(0, 10)) is None
    assert metrics(row(20)).numbers(stage(0, 10)) is None
    assert metrics(row(5)).numbers(None) is None


def test_a_stage_has_the_samples_that_speak_of_it() -> None:
    # At second 0 a sample speaks of the second before; at second 3 of the stage's last.
    rows = [row(t, cpu_fraction=t / 10, network_tx_bytes_per_s=t * 1e6, missed_ticks=1) for t in (3, 0, 2, 1, 4)]
    hosts = metrics(*rows, h1=["GPU"]).numbers(stage(0, 3)) or []
    assert hosts == [
        {
            "host": "h1",
            "roles": ["GPU"],
            "samples": 3,
            "cpu_fraction": pytest.approx({"mean": 0.2, "max": 0.3}),
            "load_1m_max": None,
            "memory_used_max_bytes": 3 << 30,
            "memory_total_bytes": 4 << 30,
            "network_tx_bytes_per_s": pytest.approx({"mean": 2e6, "max": 3e6}),
            "network_rx_bytes_per_s": None,
            "collector_cpu_fraction": None,
            "missed_ticks": 3,
        }
    ]


def test_hosts_are_told_apart_and_stand_by_name() -> None:
    rows = [row(t, host, cpu_fraction=busy) for t in (1, 2) for host, busy in (("b", 0.9), ("a", 0.1))]
    hosts = metrics(*rows).numbers(stage(0, 10)) or ()
    assert [(host["host"], host["cpu_fraction"]["mean"]) for host in hosts] == [("a", 0.1), ("b", 0.9)]


def test_the_pages_show_every_host_in_every_stage() -> None:
    stages = [{"stage": n, "name": f"{n}/s", "stage_kind": "hold", **interval(10 + 5 * n, 15 + 5 * n)} for n in (0, 1)]
    rows: list[dict[str, object]] = [
        row(t, "h1", cpu_fraction=0.25, network_tx_bytes_per_s=2.5e6, network_rx_bytes_per_s=1e6) for t in range(10, 21)
    ]
    rows += [row(t, "gpu-host\x1b[31m", cpu_fraction=0.75) for t in range(10, 15)]
    described = run(stages=stages)
    found: dict[str, Any] = summarize(
        described,
        [batch([request(10 + t / 10, stage=int(t >= 50)) for t in range(95)])],
        workers=[health([health_row(t) for t in range(11, 20)])],
        host=[telemetry_rows(TelemetryKind.HOST, rows)],
    )
    assert [host["roles"] for host in found["stages"][0]["hosts"]] == [[], ["load"]]
    text = render_text(found)
    assert all(len(line) <= WIDTH for line in text.splitlines())
    assert "\x1b" not in text
    section = text[text.index("\nHOSTS") :].strip().split("\n\n")[0].splitlines()
    assert section[0].split() == ["HOSTS", "0/s", "1/s"]
    assert section[2].split() == ["CPU,", "mean", "75", "%", "–"]
    assert section[8] == "  h1 (load)"
    assert section[9].split() == ["CPU,", "mean", *["25", "%"] * 2]
    assert section[12].split() == ["network", "out", *["2.5", "MB/s"] * 2]
    page = render_html(found, described)
    assert "h1 (load)" in page
    assert "2.5 MB/s" in page
    assert "where a collector ran" not in render_html(summarize(run(), [batch([request(11)])]), run())
