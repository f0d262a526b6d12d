"""What was sampled beside the requests, cut to the run's window and put on the common clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vllm_locust.run.common_clock import ClockTrack
from vllm_locust.run.server_axes import ServerAxes
from vllm_locust.run.telemetry.server_scraper import is_scraper_of
from vllm_locust.store.clock_offset import ClockOffset
from vllm_locust.store.rundir import RunDirectory
from vllm_locust.store.telemetry_intake import TelemetryPart, telemetry_parts
from vllm_locust.store.telemetry_tables import write_telemetry
from vllm_locust.telemetry import TelemetryKind

MARGIN_NS: Final = 5_000_000_000
"""Before and after the window: what changes at its edges shows whole."""
_TIME: Final = "time_unix_ns"


class _Clocks:
    """Each source's distance from the common clock; a source that never measured it is taken at its word."""

    def __init__(self, parts: Sequence[TelemetryPart], axes: ServerAxes) -> None:
        measured: dict[str, dict[int, ClockOffset]] = {}
        for part in parts:
            for source, clocks in part.clocks.items():
                for one in clocks:
                    measured.setdefault(source, {})[one.measured_unix_ns] = axes.moved(one)
        self._tracks = {source: ClockTrack.of(list(found.values())) for source, found in measured.items()}

    def move(self, source: str, times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        track = self._tracks.get(source)
        return times if track is None else times + track.at(times)

    def as_json(self, source: str) -> dict[str, int | None]:
        track = self._tracks.get(source)
        return {
            "offset_ns": None if track is None else track.offset_ns[-1],
            "uncertainty_ns": None if track is None else track.uncertainty_ns,
        }


class _Watched:
    """Every GPU of which there was a row before the window's end, and since when."""

    def __init__(self) -> None:
        self._first_ns: dict[tuple[str, int, str], int] = {}

    def see(self, rows: pa.Table) -> None:
        found = rows.group_by(["host", "gpu_index", "gpu_uuid"]).aggregate([(_TIME, "min")]).to_pylist()
        for gpu in found:
            key = gpu["host"], gpu["gpu_index"], gpu["gpu_uuid"]
            first_ns = gpu[f"{_TIME}_min"]
            self._first_ns[key] = min(first_ns, self._first_ns.get(key, first_ns))

    def as_json(self) -> list[dict[str, Any]]:
        names = ("host", "gpu_index", "gpu_uuid")
        return [
            dict(zip(names, key, strict=True)) | {"first_unix_ns": first_ns}
            for key, first_ns in sorted(self._first_ns.items())
        ]


def merge_telemetry(run: Mapping[str, Any], run_dir: RunDirectory, axes: ServerAxes) -> dict[str, Any]:
    """Write the tables of what there was. For ``run.json``: ``telemetry``, or null where nothing was sampled."""
    parts = telemetry_parts(run_dir.telemetry_parts)
    window = run["window"]
    if not parts or window is None:
        return {"telemetry": None}
    clocks = _Clocks(parts, axes)
    rows_of: Counter[TelemetryKind] = Counter()
    watched = _Watched()
    for kind in TelemetryKind:

        def cut(source: str, rows: pa.Table, kind: TelemetryKind = kind) -> pa.Table:
            if kind is TelemetryKind.SERVER and not is_scraper_of(run["run_id"], source):
                return rows.slice(0, 0)
            times = clocks.move(source, rows.column(_TIME).to_numpy().astype(np.int64))
            inside = (times >= window["start_unix_ns"] - MARGIN_NS) & (times < window["end_unix_ns"] + MARGIN_NS)
            moved = rows.set_column(rows.schema.get_field_index(_TIME), rows.schema.field(_TIME), pa.array(times))
            if kind is TelemetryKind.GPU:
                watched.see(moved.filter(pa.array(times < window["end_unix_ns"])))
            return moved.filter(pa.array(inside))

        def count(rows: pa.Table, kind: TelemetryKind = kind) -> None:
            rows_of[kind] += rows.num_rows

        write_telemetry(parts, kind, run_dir.telemetry_parquet(kind), cut, count)
    return {
        "telemetry": {
            "rows": {kind.value: rows_of[kind] for kind in TelemetryKind if rows_of[kind]},
            "gpus": watched.as_json(),
            "sources": [_source_json(source, parts, clocks) for source in _sources(parts)],
        }
    }


def _sources(parts: Sequence[TelemetryPart]) -> list[str]:
    return sorted({batch.source for part in parts for batch in part.batches})


def _source_json(source: str, parts: Sequence[TelemetryPart], clocks: _Clocks) -> dict[str, Any]:
    """``batches_missing``: numbered by the source, and not here, of those between the first and the last."""
    kinds = {part.kind for part in parts if any(batch.source == source for batch in part.batches)}
    numbers = {batch.seq for part in parts for batch in part.batches if batch.source == source}
    return {
        "source": source,
        "kinds": sorted(kind.value for kind in kinds),
        "batches": len(numbers),
        "batches_missing": max(numbers) - min(numbers) + 1 - len(numbers),
        **clocks.as_json(source),
    }
