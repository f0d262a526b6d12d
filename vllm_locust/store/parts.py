"""What a recorder has on disk: numbered part files, each whole or absent, and the ledger of the batches in them.

A part is a Parquet file ``<kind>-<number>.parquet``. Its metadata lists its batches in the order of its rows, so that a
recorder which starts again knows from the files alone what it has, and the merge can put batches in order.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from vllm_locust.errors import StoreError, one_line
from vllm_locust.store.durable_file import MOVE_AWAY, atomic_path, fsync_directory, is_regular_file
from vllm_locust.store.lock_file import try_lock
from vllm_locust.store.schema import Batch, BatchKind, as_current, schema_of

PART_NAMES: Final = {BatchKind.REQUESTS: "requests", BatchKind.HEALTH: "workers", BatchKind.ARRIVALS: "arrivals"}
_PART_FILE: Final = re.compile(r"(requests|workers|arrivals)-([0-9]{6,})\.parquet")
_LISTED: Final = b"vllm_locust.batches"
_RUN: Final = b"vllm_locust.run_id"


class PartsInUse(StoreError):
    """Another process holds the lock of the parts."""


@dataclass(frozen=True, slots=True)
class PartBatch:
    """One batch inside a part: its identity, how many rows it has and how many bytes they take in memory."""

    worker_id: str
    seq: int
    rows: int
    nbytes: int
    lost_rows: int
    announced: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    path: Path
    kind: BatchKind
    number: int
    run_id: str
    batches: tuple[PartBatch, ...]


@dataclass(slots=True)
class WorkerLedger:
    """Which batches of one worker are held: all up to ``contiguous``, and some beyond a gap."""

    contiguous: int = 0
    beyond: set[int] = field(default_factory=set)
    rows: int = 0
    lost_rows: int = 0
    announced: int = 0
    """The most requests that the worker is known to have begun."""

    def __contains__(self, seq: int) -> bool:
        return seq <= self.contiguous or seq in self.beyond

    def add(self, seq: int) -> bool:
        """False when it was there already."""
        if seq in self:
            return False
        self.beyond.add(seq)
        while self.contiguous + 1 in self.beyond:
            self.contiguous += 1
            self.beyond.remove(self.contiguous)
        return True

    @property
    def batches(self) -> int:
        return self.contiguous + len(self.beyond)

    @property
    def highest(self) -> int:
        return max(self.beyond, default=self.contiguous)


def parquet_writer_options(schema: pa.Schema) -> dict[str, Any]:
    """Rising integers are small as deltas, names repeat: half the size and twice the speed of the defaults."""
    lists = [f"{field.name}.list.element" for field in schema if pa.types.is_list(field.type)]
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": [field.name for field in schema if pa.types.is_string(field.type)],
        "column_encoding": dict.fromkeys(lists, "DELTA_BINARY_PACKED"),
        "write_statistics": [field.name for field in schema if not pa.types.is_list(field.type)],
    }


def write_part(path: Path, kind: BatchKind, run_id: str, batches: Sequence[Batch]) -> None:
    """Write one part durably: it has its name only once its bytes are on disk. Raises ``OSError``."""
    listed = [astuple(batch) for batch in _listed(batches)]
    metadata = {_LISTED: json.dumps(listed).encode(), _RUN: run_id.encode()}
    schema = schema_of(kind)
    rows = pa.Table.from_batches([batch.rows.replace_schema_metadata(None) for batch in batches], schema=schema)
    with atomic_path(path) as temporary:
        pq.write_table(rows.replace_schema_metadata(metadata), temporary, **parquet_writer_options(schema))


def read_part(path: Path) -> Part:
    match = _PART_FILE.fullmatch(path.name)
    assert match is not None
    kind = next(kind for kind, name in PART_NAMES.items() if name == match[1])
    try:
        metadata = pq.read_schema(path).metadata or {}
        batches = tuple(PartBatch(*listed) for listed in json.loads(metadata[_LISTED]))
        return Part(path, kind, int(match[2]), metadata[_RUN].decode(), batches)
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError, RecursionError) as exc:
        raise StoreError(f"the part file {path} is damaged: {_words(exc)}; {MOVE_AWAY}") from exc


def read_part_rows(part: Part) -> pa.Table:
    try:
        with pq.ParquetFile(part.path) as file:
            rows = as_current(file.read().replace_schema_metadata(None), part.kind)
    except (OSError, pa.ArrowException) as exc:
        raise StoreError(f"the part file {part.path} cannot be read: {one_line(exc)}; {MOVE_AWAY}") from exc
    if rows is None:
        raise StoreError(
            f"the part file {part.path} has other columns than this version's: merge it with the one that wrote it, "
            "or move it away: what it held counts as lost"
        )
    if rows.num_rows != sum(batch.rows for batch in part.batches):
        raise StoreError(f"the part file {part.path} does not hold the rows that it lists; {MOVE_AWAY}")
    return rows.combine_chunks()


def _words(exc: Exception) -> str:
    return f"it has no {exc}" if isinstance(exc, KeyError) else one_line(exc)


def list_parts(parts_dir: Path) -> list[Part]:
    """Every part, by number."""
    paths = [path for path in parts_dir.iterdir() if _PART_FILE.fullmatch(path.name) and is_regular_file(path)]
    return sorted(map(read_part, paths), key=lambda part: (part.number, part.kind))


class PartStore:
    """The parts directory of one run, owned by one process at a time."""

    def __init__(self, parts_dir: Path, run_id: str) -> None:
        self._dir = parts_dir
        self._run_id = run_id
        self.workers: dict[str, WorkerLedger] = {}
        self.batches = self.rows = 0
        self.number = 0
        self._lock = _lock(parts_dir)
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    def _load(self) -> None:
        for leftover in self._dir.rglob(".*.tmp"):
            leftover.unlink()
        for part in list_parts(self._dir):
            if part.run_id != self._run_id:
                raise StoreError(
                    f"{part.path} is of run {part.run_id!r}, not {self._run_id!r}: use another run directory"
                )
            self.number = max(self.number, part.number)
            self._enter(part.kind, part.batches)

    def __contains__(self, batch: tuple[str, int]) -> bool:
        worker_id, seq = batch
        return worker_id in self.workers and seq in self.workers[worker_id]

    def durable(self) -> dict[str, int]:
        return {worker_id: ledger.contiguous for worker_id, ledger in self.workers.items()}

    def write(self, batches: Sequence[Batch]) -> None:
        """Put batches on disk, one part per kind. On ``OSError`` a kind that was written before it is kept."""
        self.number += 1
        for kind in BatchKind:
            chosen = [batch for batch in batches if batch.header.kind is kind and self._is_new(batch)]
            if not chosen:
                continue
            path = self._dir / f"{PART_NAMES[kind]}-{self.number:06}.parquet"
            write_part(path, kind, self._run_id, chosen)
            self._enter(kind, _listed(chosen))

    def _is_new(self, batch: Batch) -> bool:
        return (batch.header.worker_id, batch.header.seq) not in self

    def _enter(self, kind: BatchKind, batches: Sequence[PartBatch]) -> None:
        for batch in batches:
            ledger = self.workers.setdefault(batch.worker_id, WorkerLedger())
            if not ledger.add(batch.seq):
                continue
            self.batches += 1
            ledger.announced = max(ledger.announced, batch.announced)
            if kind is BatchKind.REQUESTS:
                ledger.lost_rows += batch.lost_rows
                ledger.rows += batch.rows
                self.rows += batch.rows

    def close(self) -> None:
        os.close(self._lock)


def _listed(batches: Sequence[Batch]) -> list[PartBatch]:
    return [
        PartBatch(
            batch.header.worker_id,
            batch.header.seq,
            batch.rows.num_rows,
            batch.rows.nbytes,
            batch.header.lost_rows,
            batch.header.announced,
        )
        for batch in batches
    ]


def _lock(parts_dir: Path) -> int:
    """Held for the life of the process, and gone with it: two recorders in one directory would count twice."""
    try:
        parts_dir.mkdir(parents=True, exist_ok=True)
        fsync_directory(parts_dir.parent)
    except OSError as exc:
        raise StoreError(f"the directory {parts_dir} cannot be used: {exc.strerror}") from exc
    descriptor = try_lock(parts_dir / ".lock")
    if descriptor is None:
        raise PartsInUse(f"another recorder or merge is at work in {parts_dir}: wait until it ends")
    return descriptor


def sorted_batches(parts: Sequence[Part]) -> Iterator[tuple[PartBatch, int, int]]:
    """Each batch once, by worker and number: the batch, the index of its part, and where its rows begin in it."""
    entries = []
    for index, part in enumerate(parts):
        begin = 0
        for batch in part.batches:
            entries.append((batch, index, begin))
            begin += batch.rows
    entries.sort(key=lambda entry: (entry[0].worker_id, entry[0].seq, entry[1]))
    previous = None
    for entry in entries:
        identity = (entry[0].worker_id, entry[0].seq)
        if identity != previous:
            yield entry
        previous = identity
