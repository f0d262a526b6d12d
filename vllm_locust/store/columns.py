"""Records gathered into columns as they come, so that a batch costs well under a microsecond per token.

The lists of a record are copied into flat machine integers at once, and the record can be let go; the scalar fields
wait as one tuple per record and are turned around when the batch is sealed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import fields
from numbers import Integral, Real
from operator import attrgetter
from typing import Any

import pyarrow as pa

from vllm_locust.errors import StoreError
from vllm_locust.record import ArrivalRecord, HealthSample, RequestRecord
from vllm_locust.store.schema import BatchKind, schema_of

_LISTS = ("chunk_ns", "chunk_tokens", "chunk_width_ns")
_SCALARS = tuple(field.name for field in fields(RequestRecord) if field.name not in _LISTS)
_HEALTH = tuple(field.name for field in fields(HealthSample))
_ARRIVAL = tuple(field.name for field in fields(ArrivalRecord))
_scalars_of = attrgetter(*_SCALARS)
_health_of = attrgetter(*_HEALTH)
_arrival_of = attrgetter(*_ARRIVAL)


class _ListColumn:
    """Lists of integers end to end, with offsets; an absent list is null."""

    def __init__(self, typecode: str) -> None:
        self._values = array(typecode)
        self._offsets = array("i", [0])
        self._absent = bytearray()

    def __len__(self) -> int:
        return len(self._values)

    def append(self, values: list[int] | None) -> bool:
        """Add one row. False when a value does not fit the column: the row is then null."""
        fits = True
        if values is not None:
            try:
                self._values.fromlist(values)
            except (OverflowError, TypeError):
                values, fits = None, False
        self._offsets.append(len(self._values))
        self._absent.append(values is None)
        return fits

    def to_arrow(self, data_type: pa.DataType) -> pa.Array[Any]:
        assert isinstance(data_type, pa.ListType)
        values = pa.Array.from_buffers(data_type.value_type, len(self._values), [None, pa.py_buffer(self._values)])
        rows = len(self._absent)
        offsets = pa.py_buffer(self._offsets)
        present = pa.array([not absent for absent in self._absent]).buffers()[1]
        return pa.Array.from_buffers(data_type, rows, [present, offsets], children=[values])


def _storable(value: object, data_type: pa.DataType) -> object:
    """``value`` as it can be stored: a lone surrogate becomes '?', a number among texts its digits, and what the column
    cannot hold at all null.
    """
    if pa.types.is_string(data_type):
        if isinstance(value, str):
            return value.encode("utf-8", "replace").decode()
        return str(value) if isinstance(value, Real) else None
    if pa.types.is_boolean(data_type):
        return value if isinstance(value, bool) else None
    if pa.types.is_floating(data_type):
        return float(value) if isinstance(value, Real) else None
    return value if isinstance(value, Integral) and -(1 << 63) <= int(value) < 1 << 63 else None


def storable_column(values: Sequence[object], field: pa.Field[Any]) -> tuple[pa.Array[Any], int]:
    """A column and how many of its values had to be changed: what a server sends need not be storable."""
    changed = 0
    # UnicodeEncodeError and ArrowInvalid are ValueErrors, ArrowTypeError is a TypeError.
    try:
        column = pa.array(values, field.type)
    except (ValueError, TypeError, OverflowError):
        stored = [_storable(value, field.type) for value in values]
        changed = sum(new is not old and new != old for new, old in zip(stored, values, strict=True))
        column = pa.array(stored, field.type)
    return _checked(column, field), changed


def _checked(column: pa.Array[Any], field: pa.Field[Any]) -> pa.Array[Any]:
    if column.null_count and not field.nullable:
        raise StoreError(f"{column.null_count} records have no usable {field.name}, which every record must have")
    return column


class RequestColumns:
    """Request records on their way into one batch."""

    def __init__(self) -> None:
        self._rows: list[tuple[Any, ...]] = []
        self._chunk_ns = _ListColumn("q")
        self._chunk_tokens = _ListColumn("i")
        self._chunk_width_ns = _ListColumn("q")
        self.unstorable_values = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def chunks(self) -> int:
        return len(self._chunk_ns)

    def append(self, record: RequestRecord) -> None:
        self._chunk_ns.append(record.chunk_ns)
        if not self._chunk_tokens.append(record.chunk_tokens):
            self.unstorable_values += 1
        self._chunk_width_ns.append(record.chunk_width_ns)
        self._rows.append(_scalars_of(record))

    def to_arrow(self) -> pa.RecordBatch:
        schema = schema_of(BatchKind.REQUESTS)
        columns = dict(zip(_SCALARS, zip(*self._rows, strict=True), strict=True))
        arrays = {name: self._scalar(columns[name], schema.field(name)) for name in _SCALARS}
        lists = zip(_LISTS, (self._chunk_ns, self._chunk_tokens, self._chunk_width_ns), strict=True)
        for name, column in lists:
            field = schema.field(name)
            arrays[name] = _checked(column.to_arrow(field.type), field)
        return pa.RecordBatch.from_arrays([arrays[name] for name in schema.names], schema=schema)

    def _scalar(self, values: Sequence[object], field: pa.Field[Any]) -> pa.Array[Any]:
        column, changed = storable_column(values, field)
        self.unstorable_values += changed
        return column


def health_to_arrow(samples: Sequence[HealthSample]) -> pa.RecordBatch:
    return _to_arrow(BatchKind.HEALTH, map(_health_of, samples))


def arrivals_to_arrow(records: Sequence[ArrivalRecord]) -> pa.RecordBatch:
    return _to_arrow(BatchKind.ARRIVALS, map(_arrival_of, records))


def _to_arrow(kind: BatchKind, rows: Iterable[tuple[object, ...]]) -> pa.RecordBatch:
    """Rows whose values are in the order of the schema."""
    schema = schema_of(kind)
    columns = zip(*rows, strict=True)
    arrays = [storable_column(values, field)[0] for field, values in zip(schema, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
