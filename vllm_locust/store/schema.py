"""The columns that travel from a worker to the run directory, and the numbered batch that carries them.

A batch is one Arrow IPC stream with one record batch, compressed as a whole, behind a magic word and its size. The
stream's metadata names the schema version, the run, the worker, the batch's number and what it holds. What comes off a
network is checked before it is believed: nothing is unpickled, the schema must be equal to the one its version names,
and offsets and sizes are validated.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from vllm_locust.errors import StoreError
from vllm_locust.outcome import Outcome

SCHEMA_VERSION: Final = 2
MAX_BATCH_BYTES: Final = 64 << 20
MAX_BATCH_ROWS: Final = 1 << 20
MAX_SEQ: Final = 1 << 53
MAX_WORKER_ID_CHARS: Final = 256
MAX_UNIX_NS: Final = 1 << 62
"""In 2116."""
MAX_SPAN_NS: Final = 10 * 366 * 86_400_000_000_000
"""Ten years, as the longest duration of a flag."""

_MAGIC: Final = b"VLB1"
_FRAME: Final = struct.Struct("<4sI")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PREFIX = "vllm_locust."
_OUTCOMES: Final = pa.array([str(outcome) for outcome in Outcome], pa.string())


class BatchKind(StrEnum):
    """What a batch holds. The value names its stream in Redis and its part files."""

    REQUESTS = "records"
    HEALTH = "health"
    ARRIVALS = "arrivals"


def _schema(required: dict[str, pa.DataType], nullable: dict[str, pa.DataType], order: str) -> pa.Schema:
    types = required | nullable
    return pa.schema([pa.field(name, types[name], nullable=name in nullable) for name in order.split()])


def _list(value_type: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", value_type, nullable=False))


_REQUESTS_V1: Final = _schema(
    dict.fromkeys(("request_id", "worker_id", "host", "target", "task", "transport"), pa.string())
    | dict.fromkeys(("stamp_source", "outcome"), pa.string())
    | dict.fromkeys(("user_id", "sent_unix_ns", "coalesced", "attempts", "retry_wait_ns"), pa.int64())
    | {"streamed": pa.bool_(), "chunk_ns": _list(pa.int64())},
    dict.fromkeys(
        ("response_id", "conversation_id", "prompt_id", "token_source", "finish_reason", "error"), pa.string()
    )
    | dict.fromkeys(("turn", "scheduled_unix_ns", "connect_ns", "headers_ns", "ttft_ns", "ttft_answer_ns"), pa.int64())
    | dict.fromkeys(("e2e_ns", "done_ns", "schedule_lag_ns", "receive_lag_max_ns", "http_status"), pa.int64())
    | dict.fromkeys(("prompt_tokens", "cached_prompt_tokens", "output_tokens", "reasoning_tokens"), pa.int64())
    | dict.fromkeys(("max_tokens", "prompt_tokens_planned"), pa.int64())
    | {"chunk_tokens": _list(pa.int32()), "chunk_width_ns": _list(pa.int64())},
    "request_id response_id host worker_id user_id target task transport streamed conversation_id turn prompt_id "
    "scheduled_unix_ns sent_unix_ns connect_ns headers_ns ttft_ns ttft_answer_ns e2e_ns done_ns schedule_lag_ns "
    "receive_lag_max_ns chunk_ns chunk_tokens chunk_width_ns prompt_tokens prompt_tokens_planned cached_prompt_tokens "
    "output_tokens reasoning_tokens max_tokens token_source stamp_source coalesced finish_reason outcome http_status "
    "error attempts retry_wait_ns",
)
_HEALTH_V1: Final = _schema(
    dict.fromkeys(("host", "worker_id"), pa.string())
    | dict.fromkeys(("time_unix_ns", "in_flight", "loop_lag_ns", "gc_pause_ns"), pa.int64())
    | {"spooled_batches": pa.int64(), "cpu_fraction": pa.float64()},
    dict.fromkeys(
        ("run_delay_ns", "receive_lag_p99_ns", "receive_lag_max_ns", "schedule_lag_max_ns", "open_fds", "rss_bytes"),
        pa.int64(),
    ),
    "time_unix_ns host worker_id in_flight cpu_fraction run_delay_ns loop_lag_ns receive_lag_p99_ns receive_lag_max_ns "
    "schedule_lag_max_ns gc_pause_ns open_fds rss_bytes spooled_batches",
)

_REQUESTS_V2: Final = (
    _REQUESTS_V1.insert(_REQUESTS_V1.get_field_index("scheduled_unix_ns"), pa.field("arrival", pa.int64()))
    .insert(_REQUESTS_V1.get_field_index("done_ns") + 2, pa.field("ended_ns", pa.int64()))
    .insert(_REQUESTS_V1.get_field_index("schedule_lag_ns") + 3, pa.field("slot_wait_ns", pa.int64()))
    .set(_REQUESTS_V1.get_field_index("user_id"), pa.field("user_id", pa.int64()))
)
_ARRIVALS_V2: Final = _schema(
    dict.fromkeys(("number", "scheduled_unix_ns"), pa.int64()) | dict.fromkeys(("worker_id", "status"), pa.string()),
    {},
    "number worker_id scheduled_unix_ns status",
)

SCHEMAS: Final[dict[int, dict[BatchKind, pa.Schema]]] = {
    1: {BatchKind.REQUESTS: _REQUESTS_V1, BatchKind.HEALTH: _HEALTH_V1},
    2: {BatchKind.REQUESTS: _REQUESTS_V2, BatchKind.HEALTH: _HEALTH_V1, BatchKind.ARRIVALS: _ARRIVALS_V2},
}
"""Every schema version that a reader accepts: the current one and the one before it, which lacks some columns."""


def schema_of(kind: BatchKind) -> pa.Schema:
    return SCHEMAS[SCHEMA_VERSION][kind]


def as_current(rows: pa.Table, kind: BatchKind) -> pa.Table | None:
    """Rows of any accepted version with the current columns, null where their version has none. None: of no version."""
    schema = schema_of(kind)
    accepted = [version[kind] for version in SCHEMAS.values() if kind in version]
    if not any(rows.schema.equals(one, check_metadata=False) for one in accepted):
        return None
    names = rows.schema.names
    columns = [rows.column(f.name) if f.name in names else pa.nulls(rows.num_rows, f.type) for f in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def empty_rows(kind: BatchKind) -> pa.RecordBatch:
    schema = schema_of(kind)
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


class BatchRefused(StoreError):
    """A batch that this version cannot or must not read. ``reason`` is the name under which it is counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """Who wrote a batch and which one it is. ``(worker_id, seq)`` is unique in a run, over all kinds."""

    run_id: str
    worker_id: str
    seq: int
    kind: BatchKind
    lost_rows: int = 0
    """Rows that the worker could keep nowhere: the batch stands in for them, so that the loss has a number."""
    announced: int = 0
    """Requests that the worker had begun when it made the batch."""


@dataclass(frozen=True, slots=True)
class Batch:
    header: BatchHeader
    rows: pa.RecordBatch


def check_run_id(run_id: str) -> str:
    """A run id is part of keys and file names, so only letters, digits, dot, dash and underscore may be in it."""
    if _RUN_ID.fullmatch(run_id) is None:
        raise StoreError(
            f"run id {run_id!r} cannot name a run: use at most 128 letters, digits, '.', '-' and '_', a letter first"
        )
    return run_id


def check_worker_id(worker_id: str) -> str:
    if not 0 < len(worker_id) <= MAX_WORKER_ID_CHARS or not worker_id.isprintable():
        raise StoreError(f"worker id {worker_id!r} must be 1 to {MAX_WORKER_ID_CHARS} printable characters")
    return worker_id


def encode_batch(header: BatchHeader, rows: pa.RecordBatch) -> bytes:
    metadata = {
        f"{_PREFIX}schema": str(SCHEMA_VERSION),
        f"{_PREFIX}run_id": header.run_id,
        f"{_PREFIX}worker_id": header.worker_id,
        f"{_PREFIX}seq": str(header.seq),
        f"{_PREFIX}kind": header.kind.value,
        f"{_PREFIX}lost_rows": str(header.lost_rows),
        f"{_PREFIX}announced": str(header.announced),
    }
    return pack_rows(rows, metadata)


def pack_rows(rows: pa.RecordBatch, metadata: Mapping[str, str]) -> bytes:
    """The bytes of a batch: one Arrow stream with the metadata, framed and compressed."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema.with_metadata(dict(metadata))) as writer:
        writer.write_batch(rows)
    return compress_stream(sink.getvalue())


def compress_stream(stream: pa.Buffer) -> bytes:
    """Compressed as a whole: a quarter of the time that Arrow's own compression, buffer by buffer, takes."""
    return _FRAME.pack(_MAGIC, stream.size) + bytes(pa.compress(stream, codec="zstd", asbytes=True))


def decompress_stream(payload: bytes) -> pa.Buffer:
    """The Arrow stream in a batch. Never takes more memory than the limit, whatever the batch says of its size."""
    if len(payload) < _FRAME.size or not payload.startswith(_MAGIC):
        raise BatchRefused("unreadable", f"a batch of {len(payload)} bytes does not begin as one")
    _, size = _FRAME.unpack_from(payload)
    if max(size, len(payload)) > MAX_BATCH_BYTES:
        raise BatchRefused("too_large", f"a batch of {size} bytes is over the limit of {MAX_BATCH_BYTES}")
    stream = pa.decompress(memoryview(payload)[_FRAME.size :], decompressed_size=size, codec="zstd")
    assert isinstance(stream, pa.Buffer)
    return stream


def decode_batch(payload: bytes, run_id: str) -> Batch:
    """Read one batch of the run ``run_id``, or raise ``BatchRefused``."""
    try:
        with pa.ipc.open_stream(decompress_stream(payload)) as reader:
            version, header = _header(reader.schema.metadata or {}, run_id)
            schema = SCHEMAS[version].get(header.kind)
            if schema is None or not reader.schema.equals(schema, check_metadata=False):
                raise BatchRefused("schema_mismatch", f"batch {header.seq} of {header.worker_id!r} has other columns")
            rows = reader.read_next_batch()
            rows.validate(full=True)
    except (pa.ArrowException, OSError, EOFError, StopIteration, MemoryError, UnicodeDecodeError) as exc:
        raise BatchRefused("unreadable", f"a batch of {len(payload)} bytes is not an Arrow stream: {exc}") from exc
    check_rows(f"batch {header.seq} of {header.worker_id!r}", rows)
    _check_worker(header, rows)
    return Batch(header, rows if version == SCHEMA_VERSION else _current_batch(rows, header.kind))


def _current_batch(rows: pa.RecordBatch, kind: BatchKind) -> pa.RecordBatch:
    current = as_current(pa.Table.from_batches([rows]), kind)
    assert current is not None
    return next(iter(current.to_batches()), empty_rows(kind))


def _header(metadata: dict[bytes, bytes], run_id: str) -> tuple[int, BatchHeader]:
    """With the schema version of the batch."""
    fields = {key.decode(): value.decode() for key, value in metadata.items()}
    version = fields.get(f"{_PREFIX}schema")
    if version not in {str(readable) for readable in SCHEMAS}:
        readable = ", ".join(map(str, SCHEMAS))
        raise BatchRefused(
            "schema_version",
            f"a batch has schema version {version!r}, and this program reads {readable}: run one version everywhere",
        )
    try:
        header = BatchHeader(
            run_id=fields[f"{_PREFIX}run_id"],
            worker_id=check_worker_id(fields[f"{_PREFIX}worker_id"]),
            seq=bounded_number(fields[f"{_PREFIX}seq"], 1, MAX_SEQ),
            kind=BatchKind(fields[f"{_PREFIX}kind"]),
            lost_rows=bounded_number(fields[f"{_PREFIX}lost_rows"], 0, MAX_BATCH_ROWS),
            announced=bounded_number(fields.get(f"{_PREFIX}announced", "0"), 0, MAX_SEQ),
        )
    except (KeyError, ValueError, StoreError) as exc:
        raise BatchRefused("bad_header", f"a batch's header is not usable: {exc}") from exc
    if header.run_id != run_id:
        raise BatchRefused("other_run", f"a batch of run {header.run_id!r} lies in the stream of run {run_id!r}")
    return int(version), header


def bounded_number(text: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and low <= int(text) <= high):
        raise ValueError(f"{text[:40]!r} is not a number between {low} and {high}")
    return int(text)


def check_rows(batch: str, rows: pa.RecordBatch) -> None:
    """What no schema says of rows from a network. ``batch`` is its name in a refusal."""
    if rows.num_rows > MAX_BATCH_ROWS:
        raise BatchRefused("too_large", f"{batch} has {rows.num_rows} rows")
    for index, field in enumerate(rows.schema):
        if not field.nullable and rows.column(index).null_count:
            raise BatchRefused("null_value", f"{batch} has no {field.name} in a row")
        if field.name.endswith("_ns"):
            _check_times(batch, field.name, rows.column(index))


def _check_times(batch: str, name: str, times: pa.Array[Any]) -> None:
    """Sums and differences of two of them stay within 64 bits."""
    low, high = (0, MAX_UNIX_NS) if name.endswith("_unix_ns") else (-MAX_SPAN_NS, MAX_SPAN_NS)
    # Untyped: the stubs know neither lists nor the pair.
    values: Any = times
    found: Any = pc.min_max(values.flatten() if pa.types.is_list(times.type) else values).as_py()
    if found["min"] is not None and not low <= found["min"] <= found["max"] <= high:
        raise BatchRefused("out_of_range", f"{batch} has a {name} from {found['min']} to {found['max']}")


def _check_worker(header: BatchHeader, rows: pa.RecordBatch) -> None:
    """A worker speaks for itself, and of outcomes that there are."""
    if not pc.all(pc.equal(rows.column("worker_id"), pa.scalar(header.worker_id)), min_count=0).as_py():
        raise BatchRefused("other_worker", f"batch {header.seq} of {header.worker_id!r} has rows of another worker")
    if header.kind is BatchKind.REQUESTS:
        known = pc.is_in(rows.column("outcome"), value_set=_OUTCOMES)
        if not pc.all(known, min_count=0).as_py():
            raise BatchRefused("unknown_outcome", f"batch {header.seq} of {header.worker_id!r} has an unknown outcome")
