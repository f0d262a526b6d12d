"""Which phase and which stage a request belongs to: a matter of when it was due, not of when it ended.

A request belongs by its scheduled time, else by the time it was sent. Intervals are half open: their end is not in
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt


class Phase(StrEnum):
    WARMUP = "warmup"
    WINDOW = "window"
    DRAIN = "drain"


PHASES: Final = tuple(Phase)


def belonging_time(
    scheduled_unix_ns: npt.NDArray[np.int64], is_scheduled: npt.NDArray[np.bool_], sent_unix_ns: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The time by which a request belongs to a phase and a stage."""
    return np.where(is_scheduled, scheduled_unix_ns, sent_unix_ns)


def assign_phase(
    belongs_unix_ns: npt.NDArray[np.int64], window_start_unix_ns: int | None, window_end_unix_ns: int | None
) -> npt.NDArray[np.int8]:
    """Indices into ``PHASES``. A window that never began (None) leaves everything in the warm-up; one without an end
    is open.
    """
    if window_start_unix_ns is None:
        return np.zeros(len(belongs_unix_ns), dtype=np.int8)
    phase = (belongs_unix_ns >= window_start_unix_ns).astype(np.int8)
    if window_end_unix_ns is not None:
        phase[belongs_unix_ns >= max(window_start_unix_ns, window_end_unix_ns)] = PHASES.index(Phase.DRAIN)
    return phase


def interval_index(
    times_unix_ns: npt.NDArray[np.int64], starts_unix_ns: Sequence[int], ends_unix_ns: Sequence[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """For each time the index of the interval that holds it, and whether one does (elsewhere the index means nothing).

    Intervals are in order and do not overlap; gaps between them are allowed.
    """
    starts, ends = np.asarray(starts_unix_ns, dtype=np.int64), np.asarray(ends_unix_ns, dtype=np.int64)
    if np.any(starts > ends) or np.any(starts[1:] < ends[:-1]):
        raise ValueError("stages overlap or are out of order: give each a start at or after the end of the one before")
    if not len(starts):
        return np.zeros(len(times_unix_ns), dtype=np.int64), np.zeros(len(times_unix_ns), dtype=np.bool_)
    index = np.searchsorted(starts, times_unix_ns, side="right") - 1
    inside = (index >= 0) & (times_unix_ns < ends[index])
    return np.maximum(index, 0), inside
