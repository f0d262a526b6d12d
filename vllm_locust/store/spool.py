"""A worker's batches on its own disk, while Redis cannot take them.

The file is a magic line followed by frames: length and CRC-32 of the payload as two little-endian 32-bit numbers,
then the payload, which is a batch as it would have gone to Redis. A frame that was cut by a crash ends the file for a
reader.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from vllm_locust.errors import StoreError
from vllm_locust.store.durable_file import MOVE_AWAY, fsync_directory, is_regular_file
from vllm_locust.store.schema import MAX_BATCH_BYTES, check_run_id

_MAGIC: Final = b"vllm-locust spool 1\n"
_FRAME: Final = struct.Struct("<II")
_SUFFIX: Final = ".spool"


def spool_path(spool_dir: Path, run_id: str, worker_id: str) -> Path:
    """The worker's file. The worker id only colours the name: its digest makes it unique, and no character of it a
    path.
    """
    readable = re.sub(r"[^A-Za-z0-9_-]", "_", worker_id)[:64]
    digest = hashlib.sha256(worker_id.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return spool_dir / f"{check_run_id(run_id)}.{readable}-{digest}{_SUFFIX}"


def spools_of_run(spool_dir: Path, run_id: str) -> list[Path]:
    pattern = re.compile(re.escape(check_run_id(run_id)) + r"\.[A-Za-z0-9_-]+" + re.escape(_SUFFIX))
    named = (path for path in spool_dir.glob(f"*{_SUFFIX}") if pattern.fullmatch(path.name))
    return sorted(path for path in named if is_regular_file(path))


class Spool:
    """Appends batches and gives them back by position. Nothing is on disk until the first ``append``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._end = 0

    def append(self, payloads: Sequence[bytes]) -> list[int]:
        """Write and sync; the positions of the payloads. Raises ``OSError``, with the file as it was before."""
        descriptor = self._open()
        positions = []
        end = self._end
        try:
            for payload in payloads:
                positions.append(end)
                _write_all(descriptor, _FRAME.pack(len(payload), zlib.crc32(payload)) + payload, end)
                end += _FRAME.size + len(payload)
            os.fdatasync(descriptor)
        except OSError:
            os.ftruncate(descriptor, self._end)
            raise
        self._end = end
        return positions

    def read(self, position: int) -> bytes:
        assert self._descriptor is not None
        payload = _frame(self._descriptor, position)
        if payload is None:
            raise OSError(f"the spool {self.path} is damaged at byte {position}")
        return payload

    def clear(self) -> None:
        """Forget what was written, once all of it is durable elsewhere."""
        if self._descriptor is not None and self._end > len(_MAGIC):
            os.ftruncate(self._descriptor, len(_MAGIC))
            self._end = len(_MAGIC)

    def close(self, *, remove: bool) -> None:
        if self._descriptor is None:
            return
        os.close(self._descriptor)
        self._descriptor = None
        if remove:
            self.path.unlink(missing_ok=True)

    def _open(self) -> int:
        if self._descriptor is None:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self.path, flags, 0o600)
            try:
                _write_all(descriptor, _MAGIC, 0)
                fsync_directory(self.path.parent)
            except OSError:
                os.close(descriptor)
                self.path.unlink(missing_ok=True)
                raise
            self._descriptor, self._end = descriptor, len(_MAGIC)
        return self._descriptor


def read_spool(path: Path) -> Iterator[bytes]:
    """The payloads of a spool, up to its end or to the frame that a crash cut off."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        raise StoreError(f"the spool {path} cannot be read: {exc.strerror}; {MOVE_AWAY}") from exc
    try:
        if os.pread(descriptor, len(_MAGIC), 0) != _MAGIC:
            raise StoreError(
                f"{path} is no spool of this version: it does not begin with {_MAGIC.decode().strip()!r}; {MOVE_AWAY}"
            )
        position = len(_MAGIC)
        while (payload := _frame(descriptor, position)) is not None:
            yield payload
            position += _FRAME.size + len(payload)
    finally:
        os.close(descriptor)


def _frame(descriptor: int, position: int) -> bytes | None:
    head = os.pread(descriptor, _FRAME.size, position)
    if len(head) < _FRAME.size:
        return None
    length, checksum = _FRAME.unpack(head)
    if length > MAX_BATCH_BYTES:
        return None
    payload = os.pread(descriptor, length, position + _FRAME.size)
    return payload if len(payload) == length and zlib.crc32(payload) == checksum else None


def _write_all(descriptor: int, data: bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, position)
        view, position = view[written:], position + written
