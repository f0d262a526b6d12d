"""Telemetry parts become tables: on the common clock, cut to the window and its margin, each batch once."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.store.servers import Server
from vllm_locust.run.server_axes import ServerAxes
from vllm_locust.run.telemetry.merge import MARGIN_NS, merge_telemetry
from vllm_locust.store.clock_offset import ClockOffset
from vllm_locust.store.redis_url import redis_options
from vllm_locust.store.rundir import RunDirectory
from vllm_locust.store.telemetry_intake import TelemetryIntake
from vllm_locust.store.telemetry_schema import TelemetryHeader, encode_telemetry, telemetry_rows
from vllm_locust.store.telemetry_store import TelemetryStore
from vllm_locust.telemetry import TelemetryKind

SECOND = 1_000_000_000
BASE = 1_800_000_000 * SECOND
WINDOW = {"start_unix_ns": BASE, "end_unix_ns": BASE + 60 * SECOND}


class Streams:
    """Batches put into the streams as a collector would, with clocks and times as the test wants them."""

    def __init__(self, server: Server, directory: RunDirectory) -> None:
        self._server = server
        self._intake = TelemetryIntake(directory.telemetry_parts, TelemetryStore(redis_options(server.url)))
        self._intake.restart(0)

    def add(self, source: str, seq: int, kind: TelemetryKind, rows: list[dict[str, Any]], clock: ClockOffset) -> None:
        payload = encode_telemetry(TelemetryHeader(source, seq, kind), telemetry_rows(kind, rows))
        stream = f"vllm_locust:1:telemetry:{'host' if kind is TelemetryKind.HOST else 'gpu'}"
        self._server.command("XADD", stream, "*", "b", payload, "c", json.dumps(asdict(clock)))

    def take(self) -> None:
        self._intake.turn(finishing=True)
        self._intake.write()


def offset(at_s: float, offset_s: float, uncertainty_ns: int = 50_000) -> ClockOffset:
    """Measured at this second of the source's own clock."""
    return ClockOffset(BASE + round(at_s * SECOND), 0, round(offset_s * SECOND), uncertainty_ns, "redis")


def host(*seconds: float) -> list[dict[str, Any]]:
    return [{"time_unix_ns": BASE + round(at * SECOND), "host": "h"} for at in seconds]


def gpu(uuid: str, *seconds: float) -> list[dict[str, Any]]:
    return [row | {"gpu_index": 0, "gpu_uuid": uuid} for row in host(*seconds)]


def seconds(path: Path) -> list[float]:
    return [(int(at) - BASE) / SECOND for at in pq.read_table(path).column("time_unix_ns").to_numpy()]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


@pytest.fixture
def streams(directory: RunDirectory) -> Any:
    server = Server()
    yield Streams(server, directory)
    server.close()


def test_rows_are_moved_to_the_common_clock_and_cut_to_the_window(streams: Streams, directory: RunDirectory) -> None:
    # Ten seconds behind at first, eleven at the end: in the middle of the two measurements it is ten and a half.
    streams.add("slow", 1, TelemetryKind.HOST, host(-20, -16, -14, 0), offset(0, 10))
    streams.add("slow", 2, TelemetryKind.HOST, host(20, 40, 54, 56), offset(40, 11))
    streams.take()
    described = merge_telemetry({"run_id": "r", "window": WINDOW}, directory, ServerAxes({}))
    assert seconds(directory.telemetry_parquet(TelemetryKind.HOST)) == [-4, 10, 30.5, 51]
    assert MARGIN_NS == 5 * SECOND
    assert described == {
        "telemetry": {
            "rows": {"host": 4},
            "gpus": [],
            "sources": [
                {
                    "source": "slow",
                    "kinds": ["host"],
                    "batches": 2,
                    "batches_missing": 0,
                    "offset_ns": 11 * SECOND,
                    "uncertainty_ns": 50_000,
                }
            ],
        }
    }


def test_sources_are_told_apart_and_rows_are_in_order(streams: Streams, directory: RunDirectory) -> None:
    streams.add("a", 7, TelemetryKind.GPU, gpu("GPU-1", 1, 3), offset(0, 0))
    streams.add("b", 1, TelemetryKind.GPU, gpu("GPU-2", 102, 104, 170), offset(0, -100))
    streams.add("a", 10, TelemetryKind.GPU, gpu("GPU-1", 5), offset(0, 0))
    streams.add("a", 10, TelemetryKind.GPU, gpu("GPU-1", 5), offset(0, 0))
    streams.take()
    # Another part: what comes again is not taken again.
    streams.add("a", 7, TelemetryKind.GPU, gpu("GPU-1", 1, 3), offset(0, 0))
    streams.add("c", 1, TelemetryKind.GPU, gpu("GPU-3", -100), offset(0, 0))
    streams.take()
    told = merge_telemetry({"run_id": "r", "window": WINDOW}, directory, ServerAxes({}))["telemetry"]
    table = pq.read_table(directory.telemetry_parquet(TelemetryKind.GPU)).to_pylist()
    assert [((row["time_unix_ns"] - BASE) // SECOND, row["gpu_uuid"]) for row in table] == [
        (1, "GPU-1"),
        (2, "GPU-2"),
        (3, "GPU-1"),
        (4, "GPU-2"),
        (5, "GPU-1"),
    ]
    missing = {source["source"]: (source["batches"], source["batches_missing"]) for source in told["sources"]}
    assert missing == {"a": (2, 2), "b": (1, 0), "c": (1, 0)}
    first = {one["gpu_uuid"]: (one["first_unix_ns"] - BASE) / SECOND for one in told["gpus"]}
    assert first == {"GPU-1": 1, "GPU-2": 2, "GPU-3": -100}
    before = directory.telemetry_parquet(TelemetryKind.GPU).read_bytes()
    merge_telemetry({"run_id": "r", "window": WINDOW}, directory, ServerAxes({}))
    assert directory.telemetry_parquet(TelemetryKind.GPU).read_bytes() == before


def test_a_clock_that_was_never_measured_is_taken_at_its_word(streams: Streams, directory: RunDirectory) -> None:
    payload = encode_telemetry(TelemetryHeader("a", 1, TelemetryKind.HOST), telemetry_rows(TelemetryKind.HOST, host(1)))
    streams._server.command("XADD", "vllm_locust:1:telemetry:host", "*", "b", payload, "c", "nonsense")
    streams.take()
    told = merge_telemetry({"run_id": "r", "window": WINDOW}, directory, ServerAxes({}))["telemetry"]
    assert seconds(directory.telemetry_parquet(TelemetryKind.HOST)) == [1]
    assert [(source["offset_ns"], source["uncertainty_ns"]) for source in told["sources"]] == [(None, None)]


def test_without_telemetry_or_window_there_is_no_table(streams: Streams, directory: RunDirectory) -> None:
    assert merge_telemetry({"run_id": "r", "window": WINDOW}, directory, ServerAxes({})) == {"telemetry": None}
    streams.add("a", 1, TelemetryKind.HOST, host(1), offset(0, 0))
    streams.take()
    assert merge_telemetry({"run_id": "r", "window": None}, directory, ServerAxes({})) == {"telemetry": None}
    assert not directory.telemetry_parquet(TelemetryKind.HOST).exists()
