"""One process at a time: a lock that is gone with its holder, however that one ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from vllm_locust.errors import StoreError


def try_lock(path: Path) -> int | None:
    """The descriptor that holds the lock until it is closed; None where another process has it. Raises ``StoreError``
    where the file cannot be made.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise StoreError(f"the directory {path.parent} cannot be used: {exc.strerror}") from exc
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as exc:
        os.close(descriptor)
        raise StoreError(f"{path} cannot be locked: {exc.strerror}; use a directory on another file system") from exc
    return descriptor
