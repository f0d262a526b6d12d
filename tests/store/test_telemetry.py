"""Telemetry from a publisher through a real server: numbered batches, their clock, and a server that goes away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.servers import Server, wait_until
from vllm_locust import clock
from vllm_locust.errors import StoreError
from vllm_locust.store.clock_offset import ClockOffset
from vllm_locust.store.redis_url import redis_options
from vllm_locust.store.schema import BatchRefused, compress_stream
from vllm_locust.store.telemetry import PublisherConfig, TelemetryPublisher, new_source
from vllm_locust.store.telemetry_schema import (
    TelemetryBatch,
    TelemetryHeader,
    decode_telemetry,
    encode_telemetry,
    telemetry_rows,
    telemetry_schema,
)
from vllm_locust.store.telemetry_store import TelemetryEntry, TelemetryStore, parse_clock
from vllm_locust.telemetry import COLUMNS, TelemetryKind

MILLISECOND_NS = 1_000_000
GPU_COLUMNS = """
time_unix_ns host gpu_index gpu_uuid gpu_name utilization memory_bandwidth_utilization sm_activity sm_occupancy
tensor_activity dram_activity memory_used_bytes memory_total_bytes power_w energy_j temperature_c sm_clock_mhz
memory_clock_mhz throttle_reasons ecc_errors xid mig_instance pcie_tx_bytes_per_s pcie_rx_bytes_per_s
nvlink_tx_bytes_per_s nvlink_rx_bytes_per_s encoder_utilization decoder_utilization
"""
BEGIN = {"gpu": "0-0", "host": "0-0", "server": "0-0"}


def gpu_row(number: int, **values: object) -> dict[str, object]:
    return {"time_unix_ns": number, "host": "h", "gpu_index": 0, "gpu_uuid": "GPU-1", **values}


def publisher(server: Server, **config: Any) -> TelemetryPublisher:
    settled: dict[str, Any] = {"source": "h-1", "batch_interval_ns": 20 * MILLISECOND_NS}
    return TelemetryPublisher(store(server), PublisherConfig(**settled | config))


def store(server: Server) -> TelemetryStore:
    return TelemetryStore(redis_options(server.url, timeout_s=1.0))


def entries(server: Server) -> list[TelemetryEntry]:
    reader = store(server)
    try:
        return reader.read_telemetry(BEGIN, count=1000)
    finally:
        reader.close()


def batches(server: Server) -> list[TelemetryBatch]:
    return [decode_telemetry(entry.payload or b"") for entry in entries(server)]


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def test_every_kind_has_a_schema_with_its_columns_in_order() -> None:
    for kind in TelemetryKind:
        assert telemetry_schema(kind).names == [column.name for column in COLUMNS[kind]]
    assert telemetry_schema(TelemetryKind.GPU).names == GPU_COLUMNS.split()


NUMBERS = st.none() | st.floats(allow_nan=False, allow_infinity=False)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "utilization": NUMBERS,
            "memory_used_bytes": st.none() | st.integers(0, 1 << 50),
            "throttle_reasons": st.none() | st.lists(st.sampled_from(["sw_power_cap", "hw_slowdown"])),
            "gpu_name": st.none() | st.text(),
        }
    ),
    max_size=4,
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(values=ROWS, seq=st.integers(1, 1 << 53))
def test_a_batch_comes_back_as_it_was(values: list[dict[str, object]], seq: int) -> None:
    rows = telemetry_rows(TelemetryKind.GPU, [gpu_row(number, **row) for number, row in enumerate(values)])
    header = TelemetryHeader("h-1", seq, TelemetryKind.GPU)
    back = decode_telemetry(encode_telemetry(header, rows))
    assert back.header == header
    assert back.rows.equals(rows)


def test_a_row_without_what_it_must_have_is_refused() -> None:
    with pytest.raises(StoreError, match="no usable gpu_uuid"):
        telemetry_rows(TelemetryKind.GPU, [{"time_unix_ns": 1, "host": "h", "gpu_index": 0}])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"schema": "2"}, "schema_version"),
        ({"schema": None}, "schema_version"),
        ({"source": ""}, "bad_header"),
        ({"seq": "0"}, "bad_header"),
        ({"kind": "disk"}, "bad_header"),
        ({"kind": "host"}, "schema_mismatch"),
    ],
)
def test_a_batch_that_cannot_be_believed_is_refused_by_name(changed: dict[str, str | None], reason: str) -> None:
    fields = {"schema": "1", "source": "h-1", "seq": "1", "kind": "gpu", **changed}
    metadata = {f"vllm_locust.telemetry.{name}": value for name, value in fields.items() if value is not None}
    rows = telemetry_rows(TelemetryKind.GPU, [gpu_row(1)])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema.with_metadata(metadata)) as writer:
        writer.write_batch(rows)
    with pytest.raises(BatchRefused) as refused:
        decode_telemetry(compress_stream(sink.getvalue()))
    assert refused.value.reason == reason


def test_bytes_that_are_no_batch_are_refused() -> None:
    for payload in (b"", b"VLB1", b"x" * 100):
        with pytest.raises(BatchRefused):
            decode_telemetry(payload)


def test_rows_reach_their_streams_with_the_clock(server: Server) -> None:
    axis_ahead_ns = 5_000_000_000
    sink = TelemetryPublisher(
        store(server),
        PublisherConfig(source="h-1", batch_interval_ns=20 * MILLISECOND_NS),
        unix_ns=lambda: clock.unix_ns() + axis_ahead_ns,
    )
    sink.put(TelemetryKind.GPU, [gpu_row(1, utilization=0.5), gpu_row(2)])
    sink.put(TelemetryKind.GPU_PROCESSES, [gpu_row(1, pid=7, name="vllm", memory_bytes=9)])
    sink.put(TelemetryKind.HOST, [{"time_unix_ns": 1, "host": "h"}])
    sink.close()
    found = {batch.header.kind: batch for batch in batches(server)}
    assert {kind: batch.header.seq for kind, batch in found.items()} == {
        TelemetryKind.GPU: 1,
        TelemetryKind.GPU_PROCESSES: 2,
        TelemetryKind.HOST: 3,
    }
    assert found[TelemetryKind.GPU].rows.column("utilization").to_pylist() == [0.5, None]
    assert [entry.stream for entry in entries(server)] == ["gpu", "gpu", "host"]
    for entry in entries(server):
        offset = parse_clock(entry.clock or b"")
        assert offset is not None
        assert abs(offset.offset_ns + axis_ahead_ns) < 50 * MILLISECOND_NS


def test_a_new_server_is_sent_the_last_minutes_again(server: Server) -> None:
    sink = publisher(server)
    try:
        sink.put(TelemetryKind.HOST, [{"time_unix_ns": 1, "host": "h"}])
        wait_until(lambda: len(entries(server)) == 1)
        server.kill()
        sink.put(TelemetryKind.HOST, [{"time_unix_ns": 2, "host": "h"}])
        wait_until(lambda: sink.last_error is not None)
        server.start()
        wait_until(lambda: len(entries(server)) == 2)
        times = [batch.rows.column("time_unix_ns").to_pylist() for batch in batches(server)]
        assert times == [[1], [2]]
        assert [batch.header.seq for batch in batches(server)] == [1, 2]
        wait_until(lambda: sink.last_error is None)
        assert sink.lost_batches == 0
    finally:
        sink.close()


def test_what_is_kept_is_bounded_by_age_and_by_size(server: Server) -> None:
    server.kill()
    for bound in ({"keep_ns": 1}, {"memory_bytes": 1}):
        sink = publisher(server, **bound)
        sink.put(TelemetryKind.HOST, [{"time_unix_ns": 1, "host": "h"}])
        wait_until(lambda sink=sink: sink.lost_batches == 1)
        sink.close()


@pytest.mark.parametrize("is_away", [False, True])
def test_what_is_kept_of_a_long_time_is_that_of_the_last_minutes(server: Server, is_away: bool) -> None:
    """Ten minutes are a tenth of a second here, and three seconds five hours."""
    if is_away:
        server.kill()
    sink = publisher(server, batch_interval_ns=MILLISECOND_NS, keep_ns=100 * MILLISECOND_NS)
    kept = []
    end_ns = clock.monotonic_ns() + 3_000 * MILLISECOND_NS
    while clock.monotonic_ns() < end_ns:
        sink.put(TelemetryKind.GPU, [gpu_row(1)])
        clock.sleep(0.002)
        kept.append(len(sink._kept))
    sink.close()
    assert sink._last_seq > 300, "it went on"
    assert max(kept) <= sink._last_seq / 5, "a tenth of a second of three"
    assert max(kept[len(kept) // 2 :]) <= 2 * max(kept[: len(kept) // 2])
    assert (sink.lost_batches > 0) is is_away


def test_a_stream_is_capped_by_age(server: Server) -> None:
    writer = store(server)
    server_run_id = writer.server_run_id()
    payload = encode_telemetry(TelemetryHeader("h-1", 1, TelemetryKind.HOST), telemetry_rows(TelemetryKind.HOST, []))
    now = ClockOffset(
        measured_unix_ns=writer.server_time_unix_ns(),
        measured_monotonic_ns=0,
        offset_ns=0,
        uncertainty_ns=0,
        redis_run_id=server_run_id,
    )
    for ahead_s, length in ((0, 400), (3_500, 401), (3_700, 101)):
        later = replace(now, offset_ns=ahead_s * 1_000_000_000)
        count = 400 if ahead_s == 0 else 1
        assert writer.add_telemetry([(TelemetryKind.HOST, payload)] * count, later) == [None] * count
        assert int(str(server.command("XLEN", "vllm_locust:1:telemetry:host"))) <= length
        if ahead_s < 3_600:
            assert int(str(server.command("XLEN", "vllm_locust:1:telemetry:host"))) == length, "not yet an hour old"
    assert 0 < int(str(server.command("TTL", "vllm_locust:1:telemetry:host"))) <= 7_200
    writer.close()


def test_rows_that_cannot_be_stored_take_no_others_along(server: Server) -> None:
    sink = publisher(server)
    sink.put(TelemetryKind.HOST, [{"time_unix_ns": 1}])
    sink.put(TelemetryKind.GPU, [gpu_row(1)])
    sink.close()
    assert [(batch.header.kind, batch.header.seq) for batch in batches(server)] == [(TelemetryKind.GPU, 2)]
    assert sink.lost_batches == 1


def test_a_publisher_needs_no_right_to_read(server: Server, tmp_path: Path) -> None:
    server.command(
        "ACL", "SETUSER", "collector", "on", ">any", "resetkeys", "~vllm_locust:1:telemetry:*", "-@all",
        "+xadd", "+expire", "+info", "+time", "+auth", "+hello", "+ping", "+select", "+client|setname",
    )  # fmt: skip
    password = tmp_path / "password"
    password.write_text("any")
    url = server.url.replace("unix://", "unix://collector@")
    sink = TelemetryPublisher(
        TelemetryStore(redis_options(url, password)),
        PublisherConfig(source=new_source("h"), batch_interval_ns=20 * MILLISECOND_NS),
    )
    sink.put(TelemetryKind.HOST, [{"time_unix_ns": 1, "host": "h"}])
    sink.close()
    assert sink.last_error is None
    assert len(batches(server)) == 1


@pytest.mark.parametrize("text", [b"", b"null", b"[]", b'{"offset_ns": 1}', b"\xff"])
def test_a_clock_that_is_not_usable_is_none(text: bytes) -> None:
    assert parse_clock(text) is None


def test_a_clock_with_a_number_that_is_none_is_not_usable() -> None:
    measured = asdict(ClockOffset(1, 2, 3, 4, "id"))
    assert parse_clock(json.dumps(measured).encode()) == ClockOffset(1, 2, 3, 4, "id")
    for bad in ("1", 1.5, True, 1 << 63):
        assert parse_clock(json.dumps(measured | {"offset_ns": bad}).encode()) is None
