"""The common clock of a run, which is the Redis server's: how far each worker's is from it, and rows moved to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa


@dataclass(frozen=True, slots=True)
class WorkerClocks:
    """How far each worker's wall clock is from the common one."""

    offset_ns: Mapping[str, int]
    uncertainty_max_ns: int | None
    step_max_ns: int | None

    @classmethod
    def from_control(cls, control: Mapping[str, str]) -> Self:
        """From the clock fields that the workers published. An offset within its own uncertainty is none."""
        offsets, uncertainties, steps = {}, [], []
        for name, lines in control.items():
            if not name.startswith("clock:"):
                continue
            measured = [json.loads(line) for line in lines.splitlines()]
            if not measured:
                continue
            best = min(measured, key=lambda one: int(one["uncertainty_ns"]))
            offset_ns, uncertainty_ns = int(best["offset_ns"]), int(best["uncertainty_ns"])
            offsets[name.removeprefix("clock:")] = offset_ns if abs(offset_ns) > uncertainty_ns else 0
            uncertainties.append(uncertainty_ns)
            steps.append(_wall_step_ns(measured))
        return cls(offsets, max(uncertainties, default=None), max(steps, default=None))

    def as_json(self) -> dict[str, Any]:
        return {
            "offset_ns": dict(self.offset_ns),
            "uncertainty_max_ns": self.uncertainty_max_ns,
            "step_max_ns": self.step_max_ns,
        }

    def of(self, worker_ids: list[str | None]) -> npt.NDArray[np.int64]:
        return np.array([self.offset_ns.get(worker or "", 0) for worker in worker_ids], dtype=np.int64)

    def move(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows with every ``*_unix_ns`` column moved from its worker's clock to the common one."""
        if not any(self.offset_ns.values()):
            return rows
        offsets = self.of(rows.column("worker_id").to_pylist())
        for index, name in enumerate(rows.schema.names):
            if name.endswith("_unix_ns"):
                moved = pa.compute.add(rows.column(index), pa.array(offsets))
                rows = rows.set_column(index, rows.schema.field(index), moved)
        return rows


def _wall_step_ns(measured: list[dict[str, Any]]) -> int:
    """How far the wall clock ran away from the monotonic one between two measurements."""
    distances = [int(one["measured_unix_ns"]) - int(one["measured_monotonic_ns"]) for one in measured]
    return max((abs(after - before) for before, after in pairwise(distances)), default=0)
