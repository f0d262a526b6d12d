"""Files that are there whole or not at all, and directories that remember them after a power cut."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

GOOD_COPY: Final = "put a good copy in its place"
MOVE_AWAY: Final = f"{GOOD_COPY}, or move it away: the rest merges, and what it held counts as lost"
"""What to do with a damaged part or spool."""
_told: set[Path] = set()


def fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_regular_file(path: Path) -> bool:
    """Whether it can be read to its end. Anything else, such as a pipe, is told once, and left alone."""
    regular = path.is_file()
    if not regular and path not in _told:
        _told.add(path)
        print(f"vllm-locust: {path} is left out: it is no regular file", file=sys.stderr, flush=True)
    return regular


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary neighbour to write to: on leaving it is synced and becomes ``path``, or is gone after an error.

    A link stays, and what it points to is replaced. What is no regular file, such as a device or a pipe, is written as
    it is.
    """
    path = path.resolve()
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        descriptor = os.open(temporary, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)
