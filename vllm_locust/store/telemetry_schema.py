"""Batches of telemetry: framed and checked like those of a run, but of no run, and numbered by their source.

A source is one life of one collector. Its numbers count over all kinds, so that whoever joins in the middle knows
from the first number on what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from vllm_locust.errors import StoreError
from vllm_locust.store.columns import storable_column
from vllm_locust.store.schema import (
    MAX_SEQ,
    BatchRefused,
    bounded_number,
    check_rows,
    check_worker_id,
    decompress_stream,
    pack_rows,
)
from vllm_locust.telemetry import COLUMNS, ColumnType, Row, TelemetryKind

TELEMETRY_SCHEMA_VERSION: Final = 1

_PREFIX = "vllm_locust.telemetry."
_ARROW: Final[dict[ColumnType, pa.DataType]] = {
    ColumnType.INT: pa.int64(),
    ColumnType.FLOAT: pa.float64(),
    ColumnType.TEXT: pa.string(),
    ColumnType.TEXTS: pa.list_(pa.field("element", pa.string(), nullable=False)),
}
TELEMETRY_SCHEMAS: Final[dict[int, dict[TelemetryKind, pa.Schema]]] = {
    1: {
        kind: pa.schema([pa.field(one.name, _ARROW[one.type], nullable=not one.required) for one in columns])
        for kind, columns in COLUMNS.items()
    }
}
"""Every schema version that a reader accepts."""


def telemetry_schema(kind: TelemetryKind) -> pa.Schema:
    return TELEMETRY_SCHEMAS[TELEMETRY_SCHEMA_VERSION][kind]


@dataclass(frozen=True, slots=True)
class TelemetryHeader:
    source: str
    seq: int
    kind: TelemetryKind


@dataclass(frozen=True, slots=True)
class TelemetryBatch:
    header: TelemetryHeader
    rows: pa.RecordBatch


def telemetry_rows(kind: TelemetryKind, rows: Sequence[Row]) -> pa.RecordBatch:
    """Absent keys are null. Raises ``StoreError`` where a row lacks what every row must have."""
    schema = telemetry_schema(kind)
    arrays: list[pa.Array[Any]] = [storable_column([row.get(field.name) for row in rows], field)[0] for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def encode_telemetry(header: TelemetryHeader, rows: pa.RecordBatch) -> bytes:
    metadata = {
        f"{_PREFIX}schema": str(TELEMETRY_SCHEMA_VERSION),
        f"{_PREFIX}source": header.source,
        f"{_PREFIX}seq": str(header.seq),
        f"{_PREFIX}kind": header.kind.value,
    }
    return pack_rows(rows, metadata)


def decode_telemetry(payload: bytes) -> TelemetryBatch:
    """Read one batch, or raise ``BatchRefused``."""
    try:
        with pa.ipc.open_stream(decompress_stream(payload)) as reader:
            header = _header(reader.schema.metadata or {})
            if not reader.schema.equals(telemetry_schema(header.kind), check_metadata=False):
                raise BatchRefused("schema_mismatch", f"batch {header.seq} of {header.source!r} has other columns")
            rows = reader.read_next_batch()
            rows.validate(full=True)
    except (pa.ArrowException, OSError, EOFError, StopIteration, MemoryError, UnicodeDecodeError) as exc:
        raise BatchRefused("unreadable", f"a batch of {len(payload)} bytes is not an Arrow stream: {exc}") from exc
    check_rows(f"batch {header.seq} of {header.source!r}", rows)
    return TelemetryBatch(header, rows.replace_schema_metadata(None))


def _header(metadata: dict[bytes, bytes]) -> TelemetryHeader:
    fields = {key.decode(): value.decode() for key, value in metadata.items()}
    version = fields.get(f"{_PREFIX}schema")
    if version not in {str(readable) for readable in TELEMETRY_SCHEMAS}:
        readable = ", ".join(map(str, TELEMETRY_SCHEMAS))
        raise BatchRefused(
            "schema_version",
            f"a batch of telemetry has schema version {version!r}, and this program reads {readable}: run one version "
            "everywhere",
        )
    try:
        return TelemetryHeader(
            source=check_worker_id(fields[f"{_PREFIX}source"]),
            seq=bounded_number(fields[f"{_PREFIX}seq"], 1, MAX_SEQ),
            kind=TelemetryKind(fields[f"{_PREFIX}kind"]),
        )
    except (KeyError, ValueError, StoreError) as exc:
        raise BatchRefused("bad_header", f"a telemetry batch's header is not usable: {exc}") from exc
