"""All parts of a run into one Parquet file, ordered by worker and batch number, in bounded memory.

The order and the bytes depend only on the batches, not on which part they came in or how often the merge ran. Memory
is bounded by sorting outside: the order is known from the parts' metadata, so it is cut into stretches of a bounded
size, and each stretch is gathered in one pass over the parts that hold a piece of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from vllm_locust.errors import StoreError
from vllm_locust.store.durable_file import atomic_path
from vllm_locust.store.parts import (
    Part,
    PartBatch,
    list_parts,
    parquet_writer_options,
    read_part_rows,
    sorted_batches,
)
from vllm_locust.store.schema import BatchKind, empty_rows, schema_of

_MERGE_COLUMNS_AFTER: Final = {"stage": "streamed", "phase": "stage", "good": "retry_wait_ns"}


def _requests_order() -> list[str]:
    names = list(schema_of(BatchKind.REQUESTS).names)
    for name, before in _MERGE_COLUMNS_AFTER.items():
        names.insert(names.index(before) + 1, name)
    return names


REQUESTS_PARQUET_ORDER: Final = tuple(_requests_order())
"""The columns of ``requests.parquet``; ``stage``, ``phase`` and ``good`` come from the merge, any other follows."""

_MERGE_TYPES: Final = {"stage": pa.int32(), "phase": pa.string(), "good": pa.bool_()}


def requests_schema() -> pa.Schema:
    """Of ``requests.parquet``, whatever else is in it."""
    own = schema_of(BatchKind.REQUESTS)
    types = {field.name: field.type for field in own} | _MERGE_TYPES
    return pa.schema([pa.field(name, types[name]) for name in REQUESTS_PARQUET_ORDER])


def refuse_fewer_rows(parts_dir: Path, tables: Mapping[BatchKind, Path]) -> None:
    """Raises ``StoreError`` where a table that was merged before holds more than the parts do now: some are gone, and
    what only the table holds must not be lost with them.
    """
    parts = list_parts(parts_dir) if parts_dir.is_dir() else []
    for kind, table in tables.items():
        held = sum(batch.rows for batch, _, _ in sorted_batches([part for part in parts if part.kind is kind]))
        try:
            before = pq.read_metadata(table).num_rows if table.is_file() else 0
        except (OSError, pa.ArrowException):
            continue  # it holds nothing that can be read, and is made anew
        if held < before:
            raise StoreError(
                f"{table} holds {before:,} rows, and the parts in {parts_dir} only {held:,}: a merge would lose "
                f"{before - held:,}; put the missing part files back; to merge what is left all the same, move "
                f"{table.name} away first"
            )


AddColumns = Callable[[pa.RecordBatch], pa.RecordBatch]
_PASS_BYTES: Final = 512 << 20
_ROW_GROUP_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class FinalizeReport:
    rows: int
    batches: int
    lost_rows: int


def no_columns(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows


def finalize(
    parts_dir: Path,
    kind: BatchKind,
    out: Path,
    add_columns: AddColumns = no_columns,
    *,
    pass_bytes: int = _PASS_BYTES,
    row_group_bytes: int = _ROW_GROUP_BYTES,
) -> FinalizeReport:
    """Write ``out``, whole or not at all. ``add_columns`` gets record batches in order, and must keep their rows."""
    parts = [part for part in list_parts(parts_dir) if part.kind is kind] if parts_dir.is_dir() else []
    entries = list(sorted_batches(parts))
    empty = add_columns(empty_rows(kind))
    names = _ordered(empty.schema.names) if kind is BatchKind.REQUESTS else empty.schema.names
    schema = empty.select(names).schema
    try:
        written = _write(out, schema, _row_groups(parts, entries, pass_bytes, row_group_bytes), add_columns)
    except OSError as exc:
        raise StoreError(f"{out} cannot be written: {exc.strerror or exc}") from exc
    return FinalizeReport(written, len(entries), sum(batch.lost_rows for batch, _, _ in entries))


def read_rows(parts_dir: Path, kind: BatchKind) -> pa.Table:
    """All rows of a kind of which there are few, in the same order."""
    parts = [part for part in list_parts(parts_dir) if part.kind is kind] if parts_dir.is_dir() else []
    groups = _row_groups(parts, list(sorted_batches(parts)), _PASS_BYTES, _ROW_GROUP_BYTES)
    return pa.Table.from_batches(groups, schema=schema_of(kind))


def write_table(out: Path, rows: pa.Table) -> None:
    """Whole or not at all."""
    try:
        with atomic_path(out) as temporary:
            pq.write_table(rows, temporary, **parquet_writer_options(rows.schema))
    except OSError as exc:
        raise StoreError(f"{out} cannot be written: {exc.strerror or exc}") from exc


def _write(out: Path, schema: pa.Schema, row_groups: Iterator[pa.RecordBatch], add_columns: AddColumns) -> int:
    written = 0
    with atomic_path(out) as temporary, pq.ParquetWriter(temporary, schema, **parquet_writer_options(schema)) as writer:
        for rows in row_groups:
            extended = add_columns(rows)
            if extended.num_rows != rows.num_rows:
                raise StoreError(f"the columns for {out.name} came with {extended.num_rows} rows for {rows.num_rows}")
            writer.write_batch(extended.select(schema.names).cast(schema), row_group_size=max(1, rows.num_rows))
            written += rows.num_rows
    return written


def _ordered(names: Iterable[str]) -> list[str]:
    rank = {name: index for index, name in enumerate(REQUESTS_PARQUET_ORDER)}
    return sorted(names, key=lambda name: rank.get(name, len(rank)))


_Entry = tuple[PartBatch, int, int]


def _row_groups(
    parts: list[Part], entries: list[_Entry], pass_bytes: int, row_group_bytes: int
) -> Iterator[pa.RecordBatch]:
    """Row groups are cut first, by the batches alone, and a pass holds whole ones: the cuts never depend on memory."""
    groups = _cut([entry for entry in entries if entry[0].rows], row_group_bytes)
    pass_of_groups: list[list[_Entry]] = []
    size = 0
    for group in groups:
        pass_of_groups.append(group)
        size += sum(entry[0].nbytes for entry in group)
        if size >= pass_bytes:
            yield from _gather(parts, pass_of_groups)
            pass_of_groups, size = [], 0
    yield from _gather(parts, pass_of_groups)


def _cut(entries: list[_Entry], limit_bytes: int) -> Iterator[list[_Entry]]:
    group: list[_Entry] = []
    size = 0
    for entry in entries:
        group.append(entry)
        size += entry[0].nbytes
        if size >= limit_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group


def _gather(parts: list[Part], groups: list[list[_Entry]]) -> Iterator[pa.RecordBatch]:
    """One pass over the parts that hold a piece of these row groups."""
    wanted = sorted(
        (index, begin, batch.rows, group_index, place)
        for group_index, group in enumerate(groups)
        for place, (batch, index, begin) in enumerate(group)
    )
    pieces: list[list[pa.Table | None]] = [[None] * len(group) for group in groups]
    for index, in_part in groupby(wanted, key=lambda piece: piece[0]):
        rows = read_part_rows(parts[index])
        for _, begin, count, group_index, place in in_part:
            # A copy: a slice would keep the whole part alive.
            pieces[group_index][place] = rows.take(pa.array(range(begin, begin + count), pa.int64()))
    for group_pieces in pieces:
        table = pa.concat_tables([piece for piece in group_pieces if piece is not None]).combine_chunks()
        group_pieces.clear()
        yield from table.to_batches()
