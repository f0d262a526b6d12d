"""Telemetry parts of a run into one Parquet file for each kind, part by part, in bounded memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vllm_locust.errors import StoreError
from vllm_locust.store.durable_file import atomic_path
from vllm_locust.store.telemetry_intake import TelemetryPart, read_telemetry_rows
from vllm_locust.store.telemetry_schema import telemetry_schema
from vllm_locust.telemetry import TelemetryKind

Arrange = Callable[[str, pa.Table], pa.Table]
"""From the rows of one source those that the run is about, at their times on the common clock."""


def write_telemetry(
    parts: Sequence[TelemetryPart],
    kind: TelemetryKind,
    out: Path,
    arrange: Arrange,
    look: Callable[[pa.Table], None],
) -> None:
    """Write ``out``, whole or not at all; nothing where no part is of that kind. Rows are in order of time within what
    came together, which is some seconds. ``look`` is shown all that is written.
    """
    chosen = [part for part in parts if part.kind is kind]
    if not chosen:
        return
    schema = telemetry_schema(kind)
    try:
        with (
            atomic_path(out) as temporary,
            pq.ParquetWriter(temporary, schema, compression="zstd", compression_level=1) as writer,
        ):
            for part in chosen:
                rows = _in_order(pa.concat_tables([schema.empty_table(), *_arranged(part, arrange)]))
                if rows.num_rows:
                    look(rows)
                    writer.write_table(rows)
    except OSError as exc:
        raise StoreError(f"{out} cannot be written: {exc.strerror or exc}") from exc


def _arranged(part: TelemetryPart, arrange: Arrange) -> Iterator[pa.Table]:
    try:
        rows = read_telemetry_rows(part)
    except StoreError as error:
        sys.stderr.write(f"vllm-locust: {error}; it is left out\n")
        return
    begin = 0
    for batch in part.batches:
        yield arrange(batch.source, rows.slice(begin, batch.rows))
        begin += batch.rows


def _in_order(rows: pa.Table) -> pa.Table:
    keys = [name for name in rows.schema.names if name in ("time_unix_ns", "host", "gpu_index", "target", "metric")]
    return rows.sort_by([(name, "ascending") for name in keys])
