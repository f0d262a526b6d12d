from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.servers import health, request
from vllm_locust.errors import StoreError
from vllm_locust.outcome import Outcome
from vllm_locust.record import ArrivalRecord, HealthSample, RequestRecord
from vllm_locust.store.columns import RequestColumns, arrivals_to_arrow, health_to_arrow
from vllm_locust.store.schema import (
    MAX_SPAN_NS,
    MAX_UNIX_NS,
    SCHEMAS,
    BatchHeader,
    BatchKind,
    BatchRefused,
    check_run_id,
    compress_stream,
    decode_batch,
    encode_batch,
    schema_of,
)

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "str": TEXT,
    "str | None": st.none() | TEXT,
    "int": INT64,
    "int | None": st.none() | INT64,
    "bool": st.booleans(),
    "Outcome": st.sampled_from(Outcome),
    "float": st.floats(allow_nan=False),
    "list[int]": st.lists(INT64, max_size=5),
    "list[int] | None": st.none() | st.lists(st.integers(0, (1 << 31) - 1), max_size=5),
}


UNIX_NS = st.integers(0, MAX_UNIX_NS)
SPAN_NS = st.integers(-MAX_SPAN_NS, MAX_SPAN_NS)
BY_NAME: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "_unix_ns": {"int": UNIX_NS, "int | None": st.none() | UNIX_NS},
    "_ns": {
        "int": SPAN_NS,
        "int | None": st.none() | SPAN_NS,
        "list[int]": st.lists(SPAN_NS, max_size=5),
        "list[int] | None": st.none() | st.lists(SPAN_NS, max_size=5),
    },
}


def any_value(name: str, type_name: str) -> st.SearchStrategy[Any]:
    """Any that a record may have in this field: times are bounded, and a worker speaks for itself."""
    if name == "worker_id":
        return st.just("w1")
    suffix = next((suffix for suffix in BY_NAME if name.endswith(suffix)), None)
    return BY_TYPE[type_name] if suffix is None else BY_NAME[suffix][type_name]


def any_of(record_type: type) -> st.SearchStrategy[Any]:
    return st.builds(
        record_type, **{field.name: any_value(field.name, str(field.type)) for field in fields(record_type)}
    )


def batch_of(records: list[RequestRecord], seq: int = 1, worker_id: str = "w1", run_id: str = "run") -> bytes:
    columns = RequestColumns()
    for record in records:
        columns.append(record)
    return encode_batch(BatchHeader(run_id, worker_id, seq, BatchKind.REQUESTS), columns.to_arrow())


def with_metadata(rows: pa.RecordBatch | None = None, **changed: str) -> bytes:
    payload = batch_of([request(1)])
    with pa.ipc.open_stream(pa.decompress(payload[8:], int.from_bytes(payload[4:8], "little"), "zstd")) as reader:
        rows = reader.read_next_batch() if rows is None else rows
        metadata = {key.decode(): value.decode() for key, value in (reader.schema.metadata or {}).items()}
    metadata |= {f"vllm_locust.{key}": value for key, value in changed.items()}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema.with_metadata(metadata)) as writer:
        writer.write_batch(rows)
    return compress_stream(sink.getvalue())


def test_the_columns_are_the_fields_of_the_records() -> None:
    assert set(schema_of(BatchKind.REQUESTS).names) == {field.name for field in fields(RequestRecord)}
    assert schema_of(BatchKind.HEALTH).names == [field.name for field in fields(HealthSample)]
    assert schema_of(BatchKind.ARRIVALS).names == [field.name for field in fields(ArrivalRecord)]
    by_kind = (BatchKind.REQUESTS, RequestRecord), (BatchKind.HEALTH, HealthSample), (BatchKind.ARRIVALS, ArrivalRecord)
    for kind, record_type in by_kind:
        nullable = {field.name for field in schema_of(kind) if field.nullable}
        assert nullable == {field.name for field in fields(record_type) if "None" in str(field.type)}


@settings(max_examples=30, deadline=None)
@given(st.lists(any_of(RequestRecord), min_size=1, max_size=5), st.integers(1, 1 << 53))
def test_any_requests_come_back_the_same(records: list[RequestRecord], seq: int) -> None:
    batch = decode_batch(batch_of(records, seq), "run")
    assert [RequestRecord(**row) for row in batch.rows.to_pylist()] == records
    assert batch.header == BatchHeader("run", "w1", seq, BatchKind.REQUESTS)


@settings(max_examples=30, deadline=None)
@given(st.lists(any_of(HealthSample), min_size=1, max_size=3))
def test_any_health_samples_come_back_the_same(samples: list[HealthSample]) -> None:
    payload = encode_batch(BatchHeader("run", "w1", 1, BatchKind.HEALTH), health_to_arrow(samples))
    assert [HealthSample(**row) for row in decode_batch(payload, "run").rows.to_pylist()] == samples


@settings(max_examples=20, deadline=None)
@given(st.lists(any_of(ArrivalRecord), min_size=1, max_size=3))
def test_any_arrivals_come_back_the_same(records: list[ArrivalRecord]) -> None:
    payload = encode_batch(BatchHeader("run", "w1", 1, BatchKind.ARRIVALS), arrivals_to_arrow(records))
    assert [ArrivalRecord(**row) for row in decode_batch(payload, "run").rows.to_pylist()] == records


@pytest.mark.parametrize("rows", [0, 2])
def test_a_batch_of_the_version_before_is_read_with_nulls_for_what_it_lacks(rows: int) -> None:
    columns = RequestColumns()
    for number in range(rows + 1):
        columns.append(request(number))
    current = columns.to_arrow().slice(0, rows)
    schema = SCHEMAS[1][BatchKind.REQUESTS]
    old = with_metadata(current.select(schema.names).cast(schema), schema="1")
    assert decode_batch(old, "run").rows.to_pylist() == current.to_pylist()
    assert decode_batch(old, "run").rows.schema == schema_of(BatchKind.REQUESTS)


def test_what_a_server_sends_and_no_column_holds_is_changed_and_counted() -> None:
    record = request(1)
    record.finish_reason = "a\ud800b"
    record.output_tokens = 10**30
    record.chunk_tokens = [1, 1 << 40, 1]
    columns = RequestColumns()
    columns.append(request(0))
    columns.append(record)
    columns.append(request(2))
    before, row, after = columns.to_arrow().to_pylist()
    assert (row["finish_reason"], row["output_tokens"], row["chunk_tokens"]) == ("a?b", None, None)
    assert columns.unstorable_values == 3
    assert (before["chunk_tokens"], after["chunk_tokens"]) == ([1, 1, 1], [1, 1, 1])
    assert row["chunk_ns"] == record.chunk_ns


def test_a_value_of_another_type_is_changed_or_null_and_counted() -> None:
    odd: dict[str, tuple[Any, Any]] = {
        "conversation_id": (40, "40"),
        "response_id": ({"id": 1}, None),
        "turn": ("first", None),
        "http_status": ([200], None),
        "task": (7, "7"),
        "chunk_tokens": (["a"], None),
    }
    record = request(1)
    for name, (value, _) in odd.items():
        setattr(record, name, value)
    columns = RequestColumns()
    for one in (request(0), record, request(2)):
        columns.append(one)
    before, row, after = columns.to_arrow().to_pylist()
    assert {name: row[name] for name in odd} == {name: stored for name, (_, stored) in odd.items()}
    assert columns.unstorable_values == len(odd)
    assert (before["task"], after["chunk_tokens"]) == ("chat", [1, 1, 1])


def test_a_record_without_what_each_must_have_is_refused_before_it_is_sent() -> None:
    record = request(1)
    record.target = None  # type: ignore[assignment]
    columns = RequestColumns()
    columns.append(record)
    with pytest.raises(StoreError, match="1 records have no usable target"):
        columns.to_arrow()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"sent_unix_ns": -1}, "out_of_range"),
        ({"sent_unix_ns": MAX_UNIX_NS + 1}, "out_of_range"),
        ({"scheduled_unix_ns": -(1 << 63)}, "out_of_range"),
        ({"e2e_ns": MAX_SPAN_NS + 1}, "out_of_range"),
        ({"chunk_ns": [1, (1 << 63) - 1]}, "out_of_range"),
        ({"worker_id": "w2"}, "other_worker"),
        ({"outcome": "splendid"}, "unknown_outcome"),
    ],
)
def test_rows_that_no_worker_can_have_measured_are_refused(changed: dict[str, Any], reason: str) -> None:
    columns = RequestColumns()
    columns.append(request(1))
    columns.append(replace(request(2), **changed))
    with pytest.raises(BatchRefused) as refused:
        decode_batch(encode_batch(BatchHeader("run", "w1", 1, BatchKind.REQUESTS), columns.to_arrow()), "run")
    assert refused.value.reason == reason


@pytest.mark.parametrize("worker_id", ["../../etc/passwd", "a:b|c{d}", "ünï 😀", "'; DROP", "-", "%s%n", "w" * 256])
def test_a_strange_worker_id_is_only_a_string(worker_id: str) -> None:
    assert decode_batch(batch_of([request(1, worker_id)], worker_id=worker_id), "run").header.worker_id == worker_id


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"schema": "3"}, "schema_version"),
        ({"schema": "1"}, "schema_mismatch"),
        ({"schema": "1", "kind": "arrivals"}, "schema_mismatch"),
        ({"schema": "0"}, "schema_version"),
        ({"schema": "one"}, "schema_version"),
        ({"run_id": "other"}, "other_run"),
        ({"worker_id": ""}, "bad_header"),
        ({"worker_id": "w" * 257}, "bad_header"),
        ({"worker_id": "a\nb"}, "bad_header"),
        ({"seq": "0"}, "bad_header"),
        ({"seq": "-1"}, "bad_header"),
        ({"seq": "9" * 5000}, "bad_header"),
        ({"seq": "١"}, "bad_header"),
        ({"kind": "gpu"}, "bad_header"),
        ({"kind": "health"}, "schema_mismatch"),
        ({"lost_rows": "x"}, "bad_header"),
    ],
)
def test_a_header_that_is_wrong_is_refused_by_name(changed: dict[str, str], reason: str) -> None:
    with pytest.raises(BatchRefused) as refused:
        decode_batch(with_metadata(None, **changed), "run")
    assert refused.value.reason == reason


def test_another_schema_version_is_refused_with_both_versions_named() -> None:
    with pytest.raises(BatchRefused, match="schema version '7', and this program reads 1, 2"):
        decode_batch(with_metadata(schema="7"), "run")


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_refused(payload: bytes) -> None:
    with pytest.raises(BatchRefused):
        decode_batch(payload, "run")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_batch_is_refused_or_read_but_never_worse(data: st.DataObject) -> None:
    payload = bytearray(batch_of([request(1), request(2)]))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        batch = decode_batch(bytes(payload), "run")
    except BatchRefused:
        return
    batch.rows.validate(full=True)


@pytest.mark.parametrize(
    ("size", "reason"), [(0, "unreadable"), (100, "unreadable"), (1 << 20, "unreadable"), (0xFFFFFFFF, "too_large")]
)
def test_a_size_that_is_a_lie_is_refused(size: int, reason: str) -> None:
    payload = batch_of([request(1)])
    with pytest.raises(BatchRefused) as refused:
        decode_batch(payload[:4] + size.to_bytes(4, "little") + payload[8:], "run")
    assert refused.value.reason == reason


def test_a_small_batch_that_would_unpack_to_gigabytes_is_refused() -> None:
    bomb = bytes(pa.compress(bytes(1 << 28), codec="zstd", asbytes=True))
    assert len(bomb) < 1 << 16
    for size in (1000, (1 << 28)):
        with pytest.raises(BatchRefused):
            decode_batch(b"VLB1" + size.to_bytes(4, "little") + bomb, "run")


def test_a_null_where_none_may_be_is_refused() -> None:
    rows = decode_batch(batch_of([request(1)]), "run").rows
    index = rows.schema.get_field_index("request_id")
    broken = rows.set_column(index, rows.schema.field(index), pa.array([None], pa.string()))
    with pytest.raises(BatchRefused) as refused:
        decode_batch(encode_batch(BatchHeader("run", "w1", 1, BatchKind.REQUESTS), broken), "run")
    assert refused.value.reason == "null_value"


@pytest.mark.parametrize("run_id", ["", "../x", "a/b", "a:b", ".hidden", "a b", "x" * 129, "a\n", "é"])
def test_a_run_id_that_could_be_a_path_or_a_key_is_refused(run_id: str) -> None:
    with pytest.raises(StoreError, match="cannot name a run"):
        check_run_id(run_id)


def test_the_record_is_not_kept_alive_by_its_columns() -> None:
    columns = RequestColumns()
    record = request(1)
    columns.append(record)
    arrived = list(record.chunk_ns)
    record.chunk_ns.clear()
    assert columns.to_arrow().to_pylist()[0]["chunk_ns"] == arrived
    assert asdict(health(1))["in_flight"] == 1
