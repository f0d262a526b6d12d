"""Telemetry on its way from the streams to part files of one run: read from the run's start on, each batch once.

The streams belong to all runs: nothing is trimmed from them. A recorder that starts again reads them again from the
run's start, and knows from its own files what it has.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from vllm_locust import clock
from vllm_locust.errors import StoreError, one_line
from vllm_locust.store.clock_offset import ClockOffset
from vllm_locust.store.durable_file import atomic_path, is_regular_file
from vllm_locust.store.parts import WorkerLedger
from vllm_locust.store.schema import BatchRefused
from vllm_locust.store.telemetry_schema import TelemetryBatch, decode_telemetry, telemetry_schema
from vllm_locust.store.telemetry_store import STREAMS, TelemetryEntry, TelemetryStore, parse_clock
from vllm_locust.telemetry import TelemetryKind

SECOND_NS: Final = 1_000_000_000
_STREAM_NAMES: Final = tuple(sorted(set(STREAMS.values())))
_READ_COUNT: Final = 64
_READ_EVERY_NS: Final = SECOND_NS // 2
_PART_BYTES: Final = 16 << 20
_PART_AGE_NS: Final = 20 * SECOND_NS
_PART_FILE: Final = re.compile(r"(gpu|gpu_processes|host|server)-([0-9]{6,})\.parquet")
_LISTED: Final = b"vllm_locust.telemetry.batches"
_CLOCKS: Final = b"vllm_locust.telemetry.clocks"


@dataclass(frozen=True, slots=True)
class ListedBatch:
    source: str
    seq: int
    rows: int


@dataclass(frozen=True, slots=True)
class TelemetryPart:
    path: Path
    kind: TelemetryKind
    number: int
    batches: tuple[ListedBatch, ...]
    clocks: dict[str, tuple[ClockOffset, ...]]
    """What its sources had measured, as far as it came with these batches."""


def telemetry_parts(directory: Path) -> list[TelemetryPart]:
    """By number. Nothing where there was no telemetry. A run is whole without what is damaged of it: that is told, and
    left out.
    """
    paths = [path for path in directory.iterdir() if _PART_FILE.fullmatch(path.name)] if directory.is_dir() else []
    parts = []
    for path in filter(is_regular_file, paths):
        try:
            parts.append(_read_part(path))
        except StoreError as error:
            print(f"vllm-locust: {error}; it is left out", file=sys.stderr, flush=True)
    return sorted(parts, key=lambda part: (part.number, part.kind))


def read_telemetry_rows(part: TelemetryPart) -> pa.Table:
    try:
        return pq.read_table(part.path, schema=telemetry_schema(part.kind)).replace_schema_metadata(None)
    except (OSError, pa.ArrowException) as exc:
        raise StoreError(f"the part file {part.path} cannot be read: {one_line(exc)}") from exc


def _read_part(path: Path) -> TelemetryPart:
    match = _PART_FILE.fullmatch(path.name)
    assert match is not None
    try:
        metadata = pq.read_schema(path).metadata or {}
        batches = tuple(ListedBatch(*listed) for listed in json.loads(metadata[_LISTED]))
        clocks = {
            source: tuple(ClockOffset(**one) for one in measured)
            for source, measured in json.loads(metadata[_CLOCKS]).items()
        }
        return TelemetryPart(path, TelemetryKind(match[1]), int(match[2]), batches, clocks)
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError, AttributeError, RecursionError) as exc:
        raise StoreError(f"the part file {path} is damaged: {one_line(exc)}") from exc


@dataclass(frozen=True, slots=True)
class _Newest:
    server_unix_ns: int
    """The time of the newest row, on the server's clock."""
    heard_ns: int
    """When it came."""


class TelemetryIntake:
    """What one recorder takes in. Before the first ``restart`` it reads nothing."""

    def __init__(self, directory: Path, store: TelemetryStore) -> None:
        self._directory = directory
        self._store = store
        self._after: dict[str, str] = {}
        self._ledgers: dict[str, WorkerLedger] = {}
        self._gathered: list[TelemetryBatch] = []
        self._nbytes = 0
        self._since_ns = 0
        self._read_ns = 0
        self._clocks: dict[str, list[ClockOffset]] = {}
        self._refused: Counter[str] = Counter()
        self._number = 0
        self._newest: dict[tuple[str, str], _Newest] = {}
        """By source, and by GPU or host."""
        for part in telemetry_parts(directory):
            self._number = max(self._number, part.number)
            for batch in part.batches:
                self._ledgers.setdefault(batch.source, WorkerLedger()).add(batch.seq)

    def restart(self, from_unix_ns: int) -> None:
        """Read the streams from this time of the server on: its entries' ids begin with the time in milliseconds."""
        self._after = dict.fromkeys(_STREAM_NAMES, f"{from_unix_ns // 1_000_000}-0")

    def turn(self, *, finishing: bool = False) -> None:
        """Read what is there and write when it is time. Raises ``StoreError`` or ``OSError``; nothing is lost then."""
        now_ns = clock.monotonic_ns()
        if not finishing and now_ns - self._read_ns < _READ_EVERY_NS:
            return
        self._read_ns = now_ns
        while self._after and (entries := self._store.read_telemetry(self._after, count=_READ_COUNT)):
            for entry in entries:
                self._after[entry.stream] = entry.entry_id
                self._take(entry)
            if self._nbytes >= _PART_BYTES:
                self.write()
        if self._gathered and now_ns - self._since_ns >= _PART_AGE_NS:
            self.write()

    def is_complete_until(self, server_unix_ns: int, heard_since_ns: int) -> bool:
        """Whether there are rows up to this time of all who were heard of since then."""
        active = (newest for newest in self._newest.values() if newest.heard_ns >= heard_since_ns)
        return all(newest.server_unix_ns >= server_unix_ns for newest in active)

    def _take(self, entry: TelemetryEntry) -> None:
        try:
            if entry.payload is None:
                raise BatchRefused("unreadable", "an entry of a telemetry stream has no batch in it")
            batch = decode_telemetry(entry.payload)
        except BatchRefused as exc:
            if not self._refused[exc.reason]:
                print(f"recorder: telemetry: {exc}", file=sys.stderr, flush=True)
            self._refused[exc.reason] += 1
            return
        source = batch.header.source
        if not self._ledgers.setdefault(source, WorkerLedger()).add(batch.header.seq):
            return
        if not self._gathered:
            self._since_ns = clock.monotonic_ns()
        self._gathered.append(batch)
        self._nbytes += batch.rows.nbytes
        measured = None if entry.clock is None else parse_clock(entry.clock)
        known = self._clocks.setdefault(source, [])
        if measured is not None and measured not in known:
            known.append(measured)
        if known:
            self._note_newest(batch, known[-1].offset_ns)

    def _note_newest(self, batch: TelemetryBatch, offset_ns: int) -> None:
        """Of what goes on by itself. Whoever reads the servers' metrics for a run has ended when its recorder is told
        to, and processes come and go.
        """
        keys = {TelemetryKind.GPU: "gpu_uuid", TelemetryKind.HOST: "host"}
        if batch.header.kind in keys:
            rows = pa.Table.from_batches([batch.rows]).group_by(keys[batch.header.kind])
            for found in rows.aggregate([("time_unix_ns", "max")]).to_pylist():
                name = str(found[keys[batch.header.kind]])
                latest_unix_ns = int(found["time_unix_ns_max"]) + offset_ns
                self._newest[batch.header.source, name] = _Newest(latest_unix_ns, clock.monotonic_ns())

    def write(self) -> None:
        """Put what was taken on disk, a part for each kind. On ``OSError`` the rest is kept for the next time."""
        if not self._gathered:
            return
        self._number += 1
        self._directory.mkdir(parents=True, exist_ok=True)
        for kind in TelemetryKind:
            chosen = [batch for batch in self._gathered if batch.header.kind is kind]
            if chosen:
                self._write_part(self._directory / f"{kind.value}-{self._number:06}.parquet", kind, chosen)
                self._gathered = [batch for batch in self._gathered if batch.header.kind is not kind]
        self._nbytes = 0
        # The newest of each goes with the next part as well: it may have no measurement of its own.
        self._clocks = {source: measured[-1:] for source, measured in self._clocks.items()}

    def _write_part(self, path: Path, kind: TelemetryKind, batches: Sequence[TelemetryBatch]) -> None:
        schema = telemetry_schema(kind)
        listed = [[batch.header.source, batch.header.seq, batch.rows.num_rows] for batch in batches]
        sources = {batch.header.source for batch in batches}
        clocks = {
            source: [asdict(one) for one in measured] for source, measured in self._clocks.items() if source in sources
        }
        metadata = {_LISTED: json.dumps(listed).encode(), _CLOCKS: json.dumps(clocks).encode()}
        rows = pa.Table.from_batches([batch.rows for batch in batches], schema=schema)
        with atomic_path(path) as temporary:
            pq.write_table(rows.replace_schema_metadata(metadata), temporary, compression="zstd", compression_level=1)
