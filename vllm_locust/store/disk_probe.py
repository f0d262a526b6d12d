"""How much space a directory has, and how long its disk takes to keep something for good."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from statistics import median_low
from typing import Final

from vllm_locust import clock
from vllm_locust.checkup.host import DiskFacts

_WRITES: Final = 5
_BYTES: Final = 1 << 20


def disk_facts(directory: Path) -> DiskFacts:
    """Of ``directory``, or of the nearest one above it that is there. Raises OSError where it cannot be written to."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    with tempfile.NamedTemporaryFile(dir=place, prefix=".vllm-locust-doctor-") as file:
        times_ns = [_write_ns(file.fileno()) for _ in range(_WRITES)]
    return DiskFacts(str(place), shutil.disk_usage(place).free, median_low(times_ns))


def _write_ns(descriptor: int) -> int:
    began_ns = clock.monotonic_ns()
    left = memoryview(os.urandom(_BYTES))
    while left:
        left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)
    return clock.monotonic_ns() - began_ns
