"""Durations as people write them: ``500ms``, ``2s``, ``1m30s``."""

from __future__ import annotations

import re
from typing import Final

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ns|us|ms|s|m|h|)")
UNIT_NS: Final = {
    "ns": 1,
    "us": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}
MAX_DURATION_NS: Final = 3_650 * 86_400_000_000_000
"""Ten years: beyond lies a slip of the keyboard, and further on what no timer and no Redis takes."""


def bounded_duration_ns(duration_ns: float, text: str) -> int:
    """Raises ValueError where it is longer than any duration here can be."""
    if not duration_ns <= MAX_DURATION_NS:
        raise ValueError(f"{text[:60]!r} is longer than ten years; write a shorter time")
    return round(duration_ns)


def parse_duration_ns(text: str) -> int:
    """``500ms``, ``2s``, ``1m``, ``1m30s``; a plain number is seconds. Raises ValueError, also above ten years."""
    compact = text.strip().replace(" ", "")
    parts = list(_DURATION.finditer(compact))
    if (
        len(compact) > 40
        or not parts
        or "".join(part[0] for part in parts) != compact
        or (len(parts) > 1 and any(not p[2] for p in parts))
    ):
        raise ValueError(f"{text[:60]!r} is not a duration; write 500ms, 2s, 1m or a number of seconds")
    return bounded_duration_ns(sum(round(float(part[1]) * UNIT_NS[part[2]]) for part in parts), text)


def seconds(value_ns: float | None) -> float | None:
    """From nanoseconds; what is not known stays so."""
    return None if value_ns is None else value_ns / 1e9
