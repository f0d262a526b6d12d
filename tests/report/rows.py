"""Requests and runs in whole seconds, as ``requests.parquet`` and ``run.json`` hold them."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

SECOND: Final = 1_000_000_000
BASE: Final = 1_800_000_000 * SECOND
"""Second 0 of these tests."""

_NS = pa.int64()
_REQUEST_TYPES: dict[str, pa.DataType] = {
    "request_id": pa.string(),
    "worker_id": pa.string(),
    "host": pa.string(),
    "streamed": pa.bool_(),
    "stage": pa.int32(),
    "phase": pa.dictionary(pa.int8(), pa.string()),
    "scheduled_unix_ns": _NS,
    "sent_unix_ns": _NS,
    "connect_ns": _NS,
    "ttft_ns": _NS,
    "ttft_answer_ns": _NS,
    "e2e_ns": _NS,
    "done_ns": _NS,
    "schedule_lag_ns": _NS,
    "slot_wait_ns": _NS,
    "receive_lag_max_ns": _NS,
    "chunk_ns": pa.list_(_NS),
    "chunk_tokens": pa.list_(pa.int32()),
    "chunk_width_ns": pa.list_(_NS),
    "prompt_tokens": _NS,
    "prompt_tokens_planned": _NS,
    "output_tokens": _NS,
    "token_source": pa.string(),
    "stamp_source": pa.string(),
    "coalesced": _NS,
    "outcome": pa.string(),
    "http_status": _NS,
    "error": pa.string(),
    "attempts": _NS,
}
_HEALTH_TYPES: dict[str, pa.DataType] = {
    "time_unix_ns": _NS,
    "host": pa.string(),
    "worker_id": pa.string(),
    "in_flight": _NS,
    "cpu_fraction": pa.float64(),
    "run_delay_ns": _NS,
    "loop_lag_ns": _NS,
    "receive_lag_p99_ns": _NS,
    "receive_lag_max_ns": _NS,
    "schedule_lag_max_ns": _NS,
    "gc_pause_ns": _NS,
    "open_fds": _NS,
    "rss_bytes": _NS,
    "spooled_batches": _NS,
}
SCHEMA: Final = pa.schema(_REQUEST_TYPES)
HEALTH_SCHEMA: Final = pa.schema(_HEALTH_TYPES)


def ns(seconds: float) -> int:
    return round(seconds * SECOND)


def request(
    sent: float,
    chunks: list[float] | None = None,
    tokens: list[int] | None = None,
    *,
    phase: str = "window",
    stage: int | None = 0,
    scheduled: float | None = None,
    slot_wait: float = 0,
    outcome: str = "ok",
    prompt: int | None = None,
    **columns: Any,
) -> dict[str, Any]:
    """Times in seconds; ``chunks`` after ``sent``."""
    arrivals = [ns(chunk) for chunk in chunks or []]
    ok = outcome == "ok"
    return {
        "request_id": f"r{sent}",
        "worker_id": "w1",
        "host": "h1",
        "streamed": True,
        "stage": stage if phase == "window" else None,
        "phase": phase,
        "scheduled_unix_ns": None if scheduled is None else BASE + ns(scheduled),
        "sent_unix_ns": BASE + ns(sent),
        "ttft_ns": arrivals[0] if arrivals else None,
        "e2e_ns": arrivals[-1] if arrivals and ok else None,
        "done_ns": arrivals[-1] if arrivals and ok else None,
        "schedule_lag_ns": None if scheduled is None else ns(sent) - ns(scheduled),
        "slot_wait_ns": None if scheduled is None else ns(slot_wait),
        "chunk_ns": arrivals,
        "chunk_tokens": tokens,
        "prompt_tokens": prompt,
        "output_tokens": None if tokens is None else sum(tokens),
        "token_source": None if tokens is None else "usage",
        "stamp_source": "kernel",
        "coalesced": 0,
        "outcome": outcome,
        "attempts": 1,
        **columns,
    }


def batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def health(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=HEALTH_SCHEMA)


def health_row(at: float, **columns: Any) -> dict[str, Any]:
    return {
        "time_unix_ns": BASE + ns(at),
        "host": "h1",
        "worker_id": "w1",
        "in_flight": 1,
        "cpu_fraction": 0.25,
        "run_delay_ns": 1_000_000,
        "loop_lag_ns": 2_000_000,
        "receive_lag_p99_ns": 30_000,
        "receive_lag_max_ns": 90_000,
        "schedule_lag_max_ns": None,
        "gc_pause_ns": 0,
        "open_fds": 40,
        "rss_bytes": 100_000_000,
        "spooled_batches": 0,
        **columns,
    }


def interval(start: float, end: float) -> dict[str, int]:
    return {"start_unix_ns": BASE + ns(start), "end_unix_ns": BASE + ns(end)}


def run(start: float = 10, end: float = 20, slos: tuple[str, ...] = (), **keys: Any) -> dict[str, Any]:
    return {
        "run_id": "run-1",
        "config": {"slos": list(slos), "max_failures": 1.0},
        "window": interval(start, end),
        **keys,
    }


MIXED: Final = [
    request(8, [1, 3, 5], [1, 1, 1], phase="warmup", prompt=7),
    request(10, [1, 2, 4], [1, 2, 1], prompt=10),
    request(12, [2, 3], [1, 1], prompt=20),
    request(15, outcome="http_error", http_status=503, error="overloaded"),
    request(18, [1, 4], [1, 1], prompt=30),
    request(20, phase="drain", outcome="censored"),
]
"""One request before the window of 10 s to 20 s, four in it, one after it."""
