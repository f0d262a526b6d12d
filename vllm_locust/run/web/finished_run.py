"""The last finished run: its headline figures, and its files for download."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from vllm_locust.errors import StoreError
from vllm_locust.store.rundir import RunDirectory, read_json
from vllm_locust.telemetry import TelemetryKind

_METRICS: Final = ("ttft", "ttft_from_schedule", "tpot", "itl", "chunk_gap", "e2e", "schedule_lag")
_FIGURES: Final = ("n", "mean", "p50", "p90", "p95", "p99", "p99_9", "max")
_NUMBERS: Final = (
    *("name", "stage_kind", "length_s", "offered_rps", "achieved_rps", "requests_per_s"),
    *("input_tokens_per_s", "output_tokens_per_s", "goodput_rps", "good_fraction", "failed_fraction"),
)


@dataclass(frozen=True, slots=True)
class FinishedRun:
    result: dict[str, Any]
    """As ``/llm/stats.json`` tells it."""
    files: Mapping[str, Path]
    """All that may be downloaded, by name: a request's text is looked up here and never becomes a path."""

    @classmethod
    def read(cls, directory: RunDirectory, exit_code: int) -> FinishedRun:
        files = {path.name: path for path in _candidates(directory) if path.is_file()}
        result: dict[str, Any] = {
            "directory": str(directory.path),
            "exit_code": exit_code,
            "files": {name: path.stat().st_size for name, path in files.items()},
            "fault": None,
        }
        try:
            summary = read_json(directory.summary_json)
        except StoreError as error:
            return cls(result | {"fault": f"the run has no results: {error}"}, files)
        return cls(result | _headline(summary), files)

    def archive(self) -> IO[bytes]:
        """All files in one zip, as an open file that is gone when closed. Tables are packed already."""
        file = tempfile.TemporaryFile()  # noqa: SIM115 - whoever sends it closes it
        with zipfile.ZipFile(file, "w") as archive:
            for name, path in self.files.items():
                packed = path.suffix == ".parquet"
                archive.write(path, name, zipfile.ZIP_STORED if packed else zipfile.ZIP_DEFLATED)
        file.seek(0)
        return file


def _candidates(directory: RunDirectory) -> list[Path]:
    return [
        directory.report_html,
        directory.report_txt,
        directory.summary_json,
        directory.run_json,
        directory.requests_parquet,
        directory.arrivals_parquet,
        directory.workers_parquet,
        *(directory.telemetry_parquet(kind) for kind in TelemetryKind),
        directory.capacity_json,
    ]


def _headline(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "run_id": summary["run_id"],
        "verdict": summary["verdict"],
        "slo": summary["slo"],
        "all_phases": summary["totals"]["all_phases"],
        "totals": _part(summary["totals"]),
        "stages": [_part(stage) for stage in summary["stages"]],
    }


def _part(numbers: Mapping[str, Any]) -> dict[str, Any]:
    part = {name: numbers.get(name) for name in _NUMBERS} | {"requests": numbers["requests"]}
    for metric in _METRICS:
        block = numbers[f"{metric}_s"]
        part[f"{metric}_s"] = None if block is None else {name: block[name] for name in _FIGURES}
    return part
