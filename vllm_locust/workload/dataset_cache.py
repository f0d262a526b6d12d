"""Tables that take long to build, kept as Arrow files: built once per machine, then mapped into every process."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc

from vllm_locust.errors import WorkloadError
from vllm_locust.workload.table_metadata import METADATA_KEY, TableMetadata

Batches = Generator[pa.RecordBatch, None, TableMetadata]
"""The parts of a table, and at the end what is known only when all of them were made."""

_FORMAT = 1
"""Raised whenever a table's columns or the way they are built change."""
_KEPT_FILES = 64


def default_cache_dir() -> Path:
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "vllm-locust"
    try:
        return Path.home() / ".cache" / "vllm-locust"
    except RuntimeError:
        raise WorkloadError(
            "there is no directory for the workload cache, since this user has no home; set XDG_CACHE_HOME"
        ) from None


def cache_key(*parts: object) -> str:
    return hashlib.sha256(json.dumps([_FORMAT, *parts], default=str).encode()).hexdigest()[:32]


def file_identity(path: Path) -> tuple[str, int, int]:
    """What tells one version of a file from another without reading it."""
    stat = path.stat()
    return str(path.resolve()), stat.st_size, stat.st_mtime_ns


class DatasetCache:
    """A private directory of Arrow files. Processes that ask for the same table wait for the one that builds it."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or default_cache_dir()

    def table(self, name: str, key: str, schema: pa.Schema, build: Callable[[], Batches]) -> pa.Table:
        """The table of this key, mapped from its file; ``build`` runs only where the file is not there yet.

        Its parts are written as they come, so that a large table is never held in memory.
        """
        path = self._directory / f"{name}-{key}.arrow"
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._directory.stat().st_uid != os.geteuid():
                raise PermissionError(f"{self._directory} belongs to another user")
            with self._lock(key):
                found = _open(path)
                if found is None:
                    self._write(path, schema, build())
                    found = _open(path)
        except OSError as error:
            raise WorkloadError(
                f"the workload cache {self._directory} cannot be used ({error}); set XDG_CACHE_HOME to a directory of "
                "yours with free space"
            ) from None
        if found is None:
            raise WorkloadError(f"the workload cache file {path} cannot be read back; check the disk, then remove it")
        return found

    @contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        # Lock files are never removed, so their number is bounded by the two digits.
        descriptor = os.open(self._directory / f"{key[:2]}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _write(self, path: Path, schema: pa.Schema, batches: Batches) -> None:
        self._make_room()
        descriptor, temporary = tempfile.mkstemp(dir=self._directory, prefix=".building-")
        try:
            with os.fdopen(descriptor, "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                metadata = _write_all(batches, writer.write_batch)
                # The schema stands at the front of the file, so what is known last goes with an empty last batch.
                last = pa.RecordBatch.from_pylist([], schema)
                writer.write_batch(last, custom_metadata={METADATA_KEY: metadata.to_json()})
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _make_room(self) -> None:
        """Remove the files that were not used for longest. A process that maps one keeps it until it ends."""
        files = sorted(self._directory.glob("*.arrow"), key=_last_used_ns)
        for path in files[: max(0, len(files) - _KEPT_FILES + 1)]:
            path.unlink(missing_ok=True)


def _last_used_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _write_all(batches: Batches, write: Callable[[pa.RecordBatch], None]) -> TableMetadata:
    while True:
        try:
            write(next(batches))
        except StopIteration as end:
            metadata: TableMetadata = end.value
            return metadata


def _open(path: Path) -> pa.Table | None:
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path), "r"))
        _, custom = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
        if not custom:
            return None
        table = reader.read_all().replace_schema_metadata(dict(custom))
        os.utime(path)
    except (FileNotFoundError, pa.ArrowInvalid):
        return None
    return table
