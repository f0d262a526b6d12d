"""The common clock of a run, which is the Redis server's: how far each worker's is from it, and rows moved to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vllm_locust.run.server_axes import ServerAxes
from vllm_locust.store.clock_offset import ClockOffset
from vllm_locust.store.telemetry_store import parse_clock
from vllm_locust.worker_message import read_last_words

_COMMON_ALREADY = frozenset({"scheduled_unix_ns"})
"""T0 plus an arrival's offset, both the same for all workers."""


def shift_ns(measured: ClockOffset) -> int:
    """What puts a time of the measured clock on the common one. An offset within its own uncertainty is none."""
    return measured.offset_ns if abs(measured.offset_ns) > measured.uncertainty_ns else 0


@dataclass(frozen=True, slots=True)
class ClockTrack:
    """One worker's distance from the common clock over time, along the worker's own axis (``clock.WallAxis``)."""

    measured_unix_ns: tuple[int, ...]
    offset_ns: tuple[int, ...]
    uncertainty_ns: int

    @classmethod
    def of(cls, measured: Sequence[ClockOffset]) -> Self:
        """Measurements much less certain than the best are left out; what all say within their doubt is no offset."""
        best_ns = min(one.uncertainty_ns for one in measured)
        good = sorted((one.measured_unix_ns, one.offset_ns) for one in measured if one.uncertainty_ns <= 4 * best_ns)
        none = all(abs(one.offset_ns) <= one.uncertainty_ns for one in measured)
        return cls(tuple(at for at, _ in good), tuple(0 if none else offset for _, offset in good), best_ns)

    def at(self, times_unix_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The offset at each time, on a straight line between two measurements."""
        first_ns = self.measured_unix_ns[0]
        since_ns = (times_unix_ns - first_ns).astype(np.float64)
        known_ns = [float(at - first_ns) for at in self.measured_unix_ns]
        drift_ns = [float(offset - self.offset_ns[0]) for offset in self.offset_ns]
        return self.offset_ns[0] + np.rint(np.interp(since_ns, known_ns, drift_ns)).astype(np.int64)


def _moved_ns(last_words: str) -> list[int]:
    """How far a worker's wall clock was set; nothing where these are no last words."""
    try:
        return [abs(int(read_last_words(json.loads(last_words))["wall_clock_moved_ns"]))]
    except (ValueError, RecursionError):
        return []


@dataclass(frozen=True, slots=True)
class WorkerClocks:
    """How far each worker's wall clock is from the common one."""

    tracks: Mapping[str, ClockTrack]
    step_max_ns: int | None
    axes: ServerAxes = field(default_factory=lambda: ServerAxes({}))
    """Of the Redis servers by whose clocks it was measured."""

    @classmethod
    def from_control(cls, control: Mapping[str, str]) -> Self:
        """From what the workers published: their clocks as measured, and how far each was set while they ran."""
        measured: dict[str, list[ClockOffset]] = {}
        moved_ns = []
        for name, text in control.items():
            kind, _, worker_id = name.partition(":")
            if kind == "clock":
                # Every worker may write there: what is no measurement is none.
                offsets = [offset for line in text.splitlines() if (offset := parse_clock(line.encode())) is not None]
                measured |= {worker_id: offsets} if offsets else {}
            elif kind == "flushed":
                moved_ns += _moved_ns(text)
        axes = ServerAxes.of(measured.values())
        tracks = {
            worker_id: ClockTrack.of([axes.moved(offset) for offset in offsets])
            for worker_id, offsets in measured.items()
        }
        return cls(tracks, max(moved_ns, default=None), axes)

    def as_json(self) -> dict[str, Any]:
        return {
            "offset_ns": {worker: track.offset_ns[-1] for worker, track in sorted(self.tracks.items())},
            "uncertainty_ns": {worker: track.uncertainty_ns for worker, track in sorted(self.tracks.items())},
            "measurements": {worker: len(track.offset_ns) for worker, track in sorted(self.tracks.items())},
            "redis_ahead_ns": dict(sorted(self.axes.ahead_ns.items())),
            "uncertainty_max_ns": max((track.uncertainty_ns for track in self.tracks.values()), default=None),
            "step_max_ns": self.step_max_ns,
        }

    def move(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows with every measured ``*_unix_ns`` column moved from its worker's clock to the common one."""
        if not any(any(track.offset_ns) for track in self.tracks.values()):
            return rows
        workers = np.asarray(rows.column("worker_id").to_pylist(), dtype=object)
        for index, name in enumerate(rows.schema.names):
            if name.endswith("_unix_ns") and name not in _COMMON_ALREADY:
                column = rows.column(index)
                times = column.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
                for worker_id, track in self.tracks.items():
                    mine = workers == worker_id
                    times[mine] += track.at(times[mine])
                moved = pa.array(times, mask=column.is_null().to_numpy(zero_copy_only=False))
                rows = rows.set_column(index, rows.schema.field(index), moved)
        return rows
