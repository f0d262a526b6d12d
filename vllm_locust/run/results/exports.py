"""``vllm-locust report RUN --export …``: results in the forms that other programs read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_locust.errors import StoreError
from vllm_locust.export.openmetrics import openmetrics
from vllm_locust.export.tables import request_lines, stages_csv
from vllm_locust.export.trackers import to_mlflow, to_wandb
from vllm_locust.store.durable_file import atomic_path
from vllm_locust.store.rundir import RunDirectory, write_text


def export_run(run_dir: RunDirectory, run: Mapping[str, Any], summary: Mapping[str, Any], names: Sequence[str]) -> None:
    """Print where each went. Raises UsageError where a tracker's library is missing."""
    for name in dict.fromkeys(names):
        print(_exported(name, run_dir, run, summary))


def _exported(name: str, run_dir: RunDirectory, run: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    match name:
        case "csv":
            path = run_dir.path / "stages.csv"
            write_text(path, stages_csv(run, summary))
        case "jsonl":
            path = run_dir.path / "requests.jsonl"
            _write_lines(path, run_dir.requests_parquet)
        case "openmetrics":
            path = run_dir.path / "openmetrics.txt"
            write_text(path, openmetrics(run, summary))
        case "wandb":
            return to_wandb(run, summary, run_dir.path)
        case "mlflow":
            return to_mlflow(run, summary, [run_dir.summary_json, run_dir.run_json, run_dir.report_html])
        case _:
            raise KeyError(name)
    return f"{name}: {path}"


def _write_lines(path: Path, requests: Path) -> None:
    try:
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            file.writelines(request_lines(requests))
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error
