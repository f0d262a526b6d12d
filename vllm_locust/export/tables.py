"""Results as plain tables: the stages as CSV, the requests as JSON lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq

from vllm_locust.export.headline import few_samples_text, figures, settings
from vllm_locust.export.spreadsheet import table

_ROWS = 1024


def stages_csv(run: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """A line for each stage: the run's settings, the stage, its figures."""
    rows = [
        {
            **settings(run, summary),
            "stage": stage["stage"],
            "stage_name": stage["name"],
            "stage_kind": stage["stage_kind"],
            "stage_users": stage["users"],
            "length_s": stage["length_s"],
            **figures(stage),
            "few_samples": few_samples_text(stage),
        }
        for stage in summary["stages"]
    ]
    return table(list(rows[0]) if rows else ["run_id"], rows)


def request_lines(requests: Path) -> Iterator[bytes]:
    """``requests.parquet`` as JSON, a line for each request, with the names and units of its columns."""
    with pq.ParquetFile(requests) as file:
        for batch in file.iter_batches(batch_size=_ROWS):
            for row in batch.to_pylist():
                yield orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
