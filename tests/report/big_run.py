"""A run of any size as rows: stages, workers, engines, GPUs and failures, with any names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tests.report.rows import BASE, HEALTH_SCHEMA, SCHEMA, SECOND, interval
from tests.report.test_server_numbers import SCHEMA as SERVER_SCHEMA
from vllm_locust.report.charts.chart_data import chart_data
from vllm_locust.report.html import render_html
from vllm_locust.report.summary import Measured, measure
from vllm_locust.store.telemetry_schema import telemetry_schema
from vllm_locust.telemetry import TelemetryKind

BATCH = 1000
OUTCOMES = ("ok", "http_error", "timeout_first_token", "disconnected")


@dataclass(frozen=True, kw_only=True)
class Size:
    requests: int = 400
    tokens: int = 20
    length_s: int = 60
    stages: int = 3
    gpus: int = 2
    engines: int = 1
    workers: int = 2
    name: str = "stage"
    error: str = "overloaded"


def described(size: Size) -> dict[str, Any]:
    """``run.json``."""
    edges = np.linspace(0, size.length_s, size.stages + 1).tolist()
    stages = [
        {
            "stage": n,
            "name": f"{size.name} {n}",
            "stage_kind": "hold",
            "offered_rps": float(n + 1),
            **interval(edges[n], edges[n + 1]),
        }
        for n in range(size.stages)
    ]
    config = {"slos": ["ttft<=1s"], "max_failures": 1.0, "model": size.name}
    return {
        "run_id": "run-1",
        "run_name": size.name,
        "tags": {size.name: size.error},
        "command": ["locust", size.name],
        "config": config,
        "window": interval(0, size.length_s),
        "stages": stages,
    }


def requests(size: Size) -> Iterator[pa.RecordBatch]:
    """Sent evenly from 5 s before the window to 5 s after it; one in twenty of the window's fails."""
    rng = np.random.default_rng(1)
    sent_s = np.linspace(-5, size.length_s + 5, size.requests, endpoint=False)
    for first in range(0, size.requests, BATCH):
        sent = sent_s[first : first + BATCH]
        n = len(sent)
        stage = np.clip(sent / size.length_s * size.stages, 0, size.stages - 1).astype(int)
        inside = (sent >= 0) & (sent < size.length_s)
        ok = ~((np.arange(first, first + n) % 20 == 7) & inside)
        outcome = np.where(ok, OUTCOMES[0], np.array(OUTCOMES[1:])[np.arange(n) % 3])
        gaps = rng.lognormal(-4, 0.5, (n, size.tokens))
        gaps[:, 0] = rng.lognormal(-2, 0.6, n) * (1 + stage)
        arrivals = np.cumsum((gaps * SECOND).astype(np.int64), axis=1)
        offsets = np.arange(0, (n + 1) * size.tokens, size.tokens, dtype=np.int32)
        phase = np.where(inside, "window", np.where(sent < 0, "warmup", "drain"))
        sent_ns = BASE + (sent * SECOND).astype(np.int64)
        columns: dict[str, Any] = {
            "request_id": [f"r{first + i}" for i in range(n)],
            "worker_id": [f"w{i % size.workers}" for i in range(n)],
            "host": ["h1"] * n,
            "streamed": [True] * n,
            "stage": pa.array(stage, mask=~inside),
            "phase": phase,
            "sent_unix_ns": sent_ns,
            "scheduled_unix_ns": sent_ns - 1000,
            "schedule_lag_ns": np.full(n, 1000),
            "slot_wait_ns": np.zeros(n, dtype=np.int64),
            "ttft_ns": arrivals[:, 0],
            "e2e_ns": pa.array(arrivals[:, -1], mask=~ok),
            "done_ns": pa.array(arrivals[:, -1], mask=~ok),
            "chunk_ns": _lists(offsets, arrivals.ravel()),
            "chunk_tokens": _lists(offsets, np.ones(n * size.tokens, dtype=np.int32)),
            "prompt_tokens": rng.integers(1, 8000, n),
            "output_tokens": np.full(n, size.tokens),
            "token_source": ["usage"] * n,
            "stamp_source": ["kernel"] * n,
            "coalesced": np.zeros(n, dtype=np.int64),
            "outcome": outcome,
            "error": pa.array([size.error] * n, mask=ok),
            "attempts": np.ones(n, dtype=np.int64),
        }
        yield _table(columns, SCHEMA, n)


def _lists(offsets: Any, values: Any) -> Any:
    lists: Any = pa.ListArray  # whose stubs know no numpy arrays
    return lists.from_arrays(pa.array(offsets), pa.array(values))


def _table(columns: dict[str, Any], schema: pa.Schema, n: int) -> pa.RecordBatch:
    arrays = [
        pa.array(columns[field.name]).cast(field.type) if field.name in columns else pa.nulls(n, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def gpus(size: Size) -> Iterator[pa.RecordBatch]:
    """Each GPU once a second."""
    seconds = np.arange(-5, size.length_s + 5)
    n = len(seconds)
    for index in range(size.gpus):
        busy = (np.sin(seconds / 9 + index) + 1) / 2
        columns: dict[str, Any] = {
            "time_unix_ns": BASE + seconds * SECOND,
            "host": [size.name] * n,
            "gpu_index": [index] * n,
            "gpu_uuid": [f"GPU-{index}"] * n,
            "gpu_name": ["NVIDIA H200"] * n,
            "utilization": np.minimum(1, busy + 0.3),
            "sm_activity": busy,
            "tensor_activity": busy / 3,
            "dram_activity": busy / 2,
            "power_w": 300 + 300 * busy,
            "memory_used_bytes": np.full(n, 60 << 30),
            "memory_total_bytes": np.full(n, 80 << 30),
        }
        yield _table(columns, telemetry_schema(TelemetryKind.GPU), n)


def server(size: Size) -> Iterator[pa.RecordBatch]:
    seconds = np.arange(-5, size.length_s + 5)
    told = {
        "requests_running": 8 + seconds % 3,
        "requests_waiting": seconds % 5,
        "kv_cache_usage": (seconds % 50) / 50,
        "prompt_tokens_total": 1000 * (seconds + 5),
        "generation_tokens_total": 500 * (seconds + 5),
    }
    n = len(seconds)
    for engine in [None, *map(str, range(size.engines))]:
        for metric, values in ({"up": np.ones(n)} if engine is None else told).items():
            columns: dict[str, Any] = {
                "time_unix_ns": BASE + seconds * SECOND,
                "target": ["http://a:8000"] * n,
                "engine": pa.array([engine] * n, pa.string()),
                "metric": [metric] * n,
                "value": values.astype(np.float64),
            }
            yield _table(columns, SERVER_SCHEMA, n)


def workers(size: Size) -> Iterator[pa.RecordBatch]:
    seconds = np.arange(-5, size.length_s + 5)
    n = len(seconds)
    for index in range(size.workers):
        columns: dict[str, Any] = {
            "time_unix_ns": BASE + seconds * SECOND,
            "host": ["h1"] * n,
            "worker_id": [f"{size.name} w{index}"] * n,
            "in_flight": np.ones(n, dtype=np.int64),
            "cpu_fraction": 0.1 + 0.05 * index + (seconds % 10) / 50,
            "run_delay_ns": np.full(n, 1_000_000),
            "loop_lag_ns": np.full(n, 500_000),
            "receive_lag_p99_ns": np.full(n, 30_000),
            "receive_lag_max_ns": np.full(n, 90_000),
            "gc_pause_ns": np.zeros(n, dtype=np.int64),
            "open_fds": np.full(n, 40),
            "rss_bytes": np.full(n, 100_000_000),
            "spooled_batches": np.zeros(n, dtype=np.int64),
        }
        yield _table(columns, HEALTH_SCHEMA, n)


def measured(size: Size) -> tuple[Measured, dict[str, Any]]:
    """With the data of its charts."""
    rows, health = list(requests(size)), list(workers(size))
    found = measure(described(size), rows, workers=health, server=list(server(size)), gpu=list(gpus(size)))
    charts = chart_data(found, rows, health)
    assert charts is not None
    return found, charts


def page(size: Size) -> str:
    found, charts = measured(size)
    return render_html(found.summary, described(size), charts)
