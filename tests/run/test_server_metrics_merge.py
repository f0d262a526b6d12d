"""Which of the published server metrics are a run's: those that its own scraper read, at their times on its clock."""

from __future__ import annotations

import pyarrow.parquet as pq

from tests.run.test_telemetry_merge import BASE, SECOND, WINDOW, Streams, directory, offset, streams
from vllm_locust.run.server_axes import ServerAxes
from vllm_locust.run.telemetry.merge import merge_telemetry
from vllm_locust.store.rundir import RunDirectory
from vllm_locust.telemetry import TelemetryKind

__all__ = ["directory", "streams"]


def looks(value: float, *seconds: float) -> list[dict[str, object]]:
    return [
        {"time_unix_ns": BASE + round(at * SECOND), "target": "http://h:8000", "metric": "up", "value": value}
        for at in seconds
    ]


def test_another_runs_scraper_read_the_same_server(streams: Streams, directory: RunDirectory) -> None:
    streams.add("server-metrics-r-1-aa", 1, TelemetryKind.SERVER, looks(1.0, 1, 2), offset(0, 10))
    streams.add("server-metrics-r2-2-bb", 1, TelemetryKind.SERVER, looks(0.0, 1.5, 2.5), offset(0, 0))
    streams.add("server-metrics-r-3-cc", 1, TelemetryKind.SERVER, looks(1.0, 3, 4), offset(0, 10))
    streams.take()
    merge_telemetry({"run_id": "r", "window": WINDOW}, directory, ServerAxes({}))
    rows = pq.read_table(directory.telemetry_parquet(TelemetryKind.SERVER)).to_pylist()
    assert [(row["time_unix_ns"] - BASE) / SECOND for row in rows] == [11, 12, 13, 14]
    assert {row["value"] for row in rows} == {1.0}


def test_no_window_no_table(streams: Streams, directory: RunDirectory) -> None:
    streams.add("server-metrics-r-1-aa", 1, TelemetryKind.SERVER, looks(1.0, 1), offset(0, 0))
    streams.take()
    merge_telemetry({"run_id": "r", "window": None}, directory, ServerAxes({}))
    assert not directory.telemetry_parquet(TelemetryKind.SERVER).exists()
