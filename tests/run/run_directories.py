"""Run directories as a merge writes them, with latencies that a test chooses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tests.report.rows import BASE, SCHEMA, interval, request
from vllm_locust.config import RunConfig, Target
from vllm_locust.report.summary import summarize
from vllm_locust.store.finalize import requests_schema
from vllm_locust.store.schema import BatchKind, schema_of

CONFIG = RunConfig(targets=(Target.parse("http://server:8000"),), slos=("ttft<=2s",), max_failures=1.0)


def write_run(
    directory: Path,
    ttft_s: npt.NDArray[np.float64],
    *,
    length_s: float = 100.0,
    failed: Sequence[int] = (),
    schedule: str | None = None,
    stages: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
    verdict: str = "valid",
    **run_keys: Any,
) -> Path:
    """Requests at even times; each has three chunks, 0.1 s apart. ``schedule``: the fingerprint of an open loop's.
    ``stages``: names, of equal length.
    """
    rows = []
    for number, ttft in enumerate(ttft_s.tolist()):
        sent = 10 + number * length_s / len(ttft_s)
        stage = number * max(1, len(stages)) // len(ttft_s)
        outcome = "http_error" if number in failed else "ok"
        chunks = None if number in failed else [ttft, ttft + 0.1, ttft + 0.2]
        rows.append(
            request(sent, chunks, None if chunks is None else [1, 1, 1], outcome=outcome, prompt=10, stage=stage)
            | {"arrival": None if schedule is None else number}
        )
    directory.mkdir(parents=True)
    table = pa.Table.from_pylist(rows, schema=SCHEMA.append(pa.field("arrival", pa.int64())))
    pq.write_table(_completed(table), directory / "requests.parquet")
    pq.write_table(schema_of(BatchKind.HEALTH).empty_table(), directory / "workers.parquet")
    run = _run_json(directory.name, length_s, schedule, config or {}, tags or {})
    run["stages"] = [
        {"stage": place, "name": name, **interval(10 + place * share, 10 + (place + 1) * share)}
        for share in [length_s / max(1, len(stages))]
        for place, name in enumerate(stages)
    ]
    run |= run_keys
    summary = summarize(run, directory / "requests.parquet")
    summary["verdict"] = {"status": verdict, "reasons": summary["verdict"]["reasons"]}
    for name, content in (("run", run), ("summary", summary)):
        (directory / f"{name}.json").write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    return directory


def _run_json(
    run_id: str, length_s: float, schedule: str | None, config: Mapping[str, Any], tags: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "schema": 1,
        "run_id": run_id,
        "run_name": None,
        "tags": dict(tags),
        "command": ["locust"],
        "versions": {"vllm_locust": "0.1.0", "locust": "2.47.0", "python": "3.12", "kernel": "6"},
        "hosts": {"master": "h1"},
        "config": replace(CONFIG, **config).to_json(),
        "token_detail": True,
        "server": {"model": "m", "max_model_len": 4096, "is_vllm": True, "version": "0.20"},
        "workload": {"name": "sharegpt", "fingerprint": "f", "filters": {}, "warnings": [], "token_count_method": "x"},
        "started_unix_ns": BASE,
        "window": interval(10, 10 + length_s),
        "stages": [],
        "schedule": None if schedule is None else _schedule(schedule),
        "shares": [],
        "users": 8 if schedule is None else None,
        "workers": {"expected": 1, "ids": [], "missing": [], "flushed": {}},
        "stopped_early": None,
    }


def _schedule(fingerprint: str) -> dict[str, Any]:
    return {"fingerprint": fingerprint, "process": "trace", "t0_unix_ns": BASE, "warmup_ns": 0, "shares": 1}


def _completed(table: pa.Table) -> pa.Table:
    """With every column that a merge writes; null where a test says nothing of it."""
    columns = {
        field.name: table[field.name].cast(field.type)
        if field.name in table.column_names
        else pa.nulls(len(table), field.type)
        for field in requests_schema()
    }
    return pa.table(columns)
