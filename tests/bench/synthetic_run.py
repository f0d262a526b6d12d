"""Records as workers would have written them, made by the thousand: batches, and a whole run directory of them."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vllm_locust import __version__
from vllm_locust.config import RunConfig, Target
from vllm_locust.record import HealthSample
from vllm_locust.store.columns import health_to_arrow
from vllm_locust.store.parts import PART_NAMES, write_part
from vllm_locust.store.rundir import RunDirectory, write_json
from vllm_locust.store.schema import Batch, BatchHeader, BatchKind, schema_of

SECOND_NS: Final = 1_000_000_000
RUN_ID: Final = "synthetic"
_STAGES: Final = 3
T0_UNIX_NS: Final = 1_800_000_000 * SECOND_NS
GAP_NS: Final = 20_000_000
TTFT_NS: Final = 80_000_000
_ABSENT: Final = frozenset(
    {"conversation_id", "turn", "arrival", "scheduled_unix_ns", "connect_ns", "schedule_lag_ns", "slot_wait_ns"}
    | {"cached_prompt_tokens", "reasoning_tokens", "max_tokens", "error"}
)
_EQUAL: Final[dict[str, Any]] = {
    "host": "client-1",
    "target": "http://10.0.0.7:8000",
    "task": "chat",
    "transport": "kernel",
    "streamed": True,
    "token_source": "usage",
    "stamp_source": "kernel",
    "finish_reason": "stop",
    "outcome": "ok",
    "http_status": 200,
    "attempts": 1,
    "retry_wait_ns": 0,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """``workers`` with requests of ``tokens`` each, one token a chunk, ``rows`` of them in a batch."""

    workers: int = 10
    tokens: int = 200
    rows: int = 82
    """With 200 tokens as many as fill a batch."""
    coalesced: int = 3
    """Chunks of every tenth request that came with others in one read."""


class Worker:
    """One worker's batches, numbered from 1, with ``per_s`` requests sent each second."""

    def __init__(self, run_id: str, number: int, shape: Shape, per_s: float) -> None:
        self._run_id = run_id
        self.id = f"client-1_{number:032x}"
        self._shape = shape
        self._spacing_ns = round(SECOND_NS / per_s)
        self._random = np.random.default_rng(number)
        self._seq = self._requests = 0

    def next_batch(self) -> Batch:
        self._seq += 1
        first, rows = self._requests, self._shape.rows
        self._requests += rows
        values = self._columns(first, rows)
        arrays = []
        for field in schema_of(BatchKind.REQUESTS):
            if field.name in _ABSENT:
                arrays.append(pa.nulls(rows, field.type))
            elif field.name in _EQUAL:
                arrays.append(pa.repeat(pa.scalar(_EQUAL[field.name], field.type), rows))
            else:
                value = values[field.name]
                arrays.append(value if isinstance(value, pa.Array) else pa.array(value, field.type))
        header = BatchHeader(self._run_id, self.id, self._seq, BatchKind.REQUESTS)
        return Batch(header, pa.RecordBatch.from_arrays(arrays, schema=schema_of(BatchKind.REQUESTS)))

    def next_health(self, time_unix_ns: int) -> Batch:
        """A calm second."""
        self._seq += 1
        sample = HealthSample(
            time_unix_ns=time_unix_ns,
            host="client-1",
            worker_id=self.id,
            in_flight=100,
            cpu_fraction=0.5,
            run_delay_ns=2_000_000,
            loop_lag_ns=1_000_000,
            receive_lag_p99_ns=400_000,
            receive_lag_max_ns=900_000,
            schedule_lag_max_ns=None,
            gc_pause_ns=3_000_000,
            open_fds=120,
            rss_bytes=200 << 20,
            spooled_batches=0,
        )
        header = BatchHeader(self._run_id, self.id, self._seq, BatchKind.HEALTH)
        return Batch(header, health_to_arrow([sample]))

    def _columns(self, first: int, rows: int) -> dict[str, Any]:
        random, tokens = self._random, self._shape.tokens
        numbers = np.arange(first, first + rows)
        gaps = np.rint(GAP_NS * random.lognormal(0.0, 0.25, (rows, tokens))).astype(np.int64)
        gaps[:, 0] = np.rint(TTFT_NS * random.lognormal(0.0, 0.5, rows)).astype(np.int64)
        chunk_ns = np.cumsum(gaps, axis=1)
        last = chunk_ns[:, -1]
        coalesced = np.where(numbers % 10 == 0, self._shape.coalesced, 0)
        return {
            "request_id": [f"{self.id}/{number}" for number in numbers.tolist()],
            "response_id": [f"chatcmpl-{random.bytes(16).hex()}" for _ in range(rows)],
            "prompt_id": [f"sharegpt/{number}" for number in random.integers(0, 90_000, rows).tolist()],
            "worker_id": [self.id] * rows,
            "user_id": numbers % 1000,
            "sent_unix_ns": T0_UNIX_NS + numbers * self._spacing_ns + random.integers(0, self._spacing_ns, rows),
            "headers_ns": gaps[:, 0] - 1_000,
            "ttft_ns": chunk_ns[:, 0],
            "ttft_answer_ns": chunk_ns[:, 0],
            "e2e_ns": last,
            "done_ns": last + 50_000,
            "ended_ns": last + 50_000,
            "receive_lag_max_ns": random.integers(10_000, 900_000, rows),
            "chunk_ns": _lists(chunk_ns, pa.int64()),
            "chunk_tokens": _lists(np.ones((rows, tokens), dtype=np.int32), pa.int32()),
            "chunk_width_ns": self._widths(coalesced, gaps),
            "prompt_tokens": random.integers(10, 4_000, rows),
            "prompt_tokens_planned": random.integers(10, 4_000, rows),
            "output_tokens": np.full(rows, tokens),
            "coalesced": coalesced,
        }

    def _widths(self, coalesced: npt.NDArray[np.int64], gaps: npt.NDArray[np.int64]) -> pa.Array[Any]:
        """Null for a request whose chunks all have stamps of their own."""
        widths: list[npt.NDArray[np.int64] | None] = [None] * len(coalesced)
        for row in np.flatnonzero(coalesced).tolist():
            width = np.zeros(self._shape.tokens, dtype=np.int64)
            width[1 : 1 + coalesced[row]] = gaps[row, 1 : 1 + coalesced[row]]
            widths[row] = width
        spread: pa.Array[Any] = pa.array(widths, schema_of(BatchKind.REQUESTS).field("chunk_width_ns").type)
        return spread


def _lists(values: npt.NDArray[Any], element: pa.DataType) -> pa.Array[Any]:
    rows, length = values.shape
    offsets: Any = pa.array(np.arange(0, (rows + 1) * length, length, dtype=np.int32))
    of = pa.list_(pa.field("element", element, nullable=False))
    made: pa.Array[Any] = pa.ListArray.from_arrays(offsets, pa.array(values.ravel(), element), type=of)
    return made


def workers_of(run_id: str, tokens_per_s: float, shape: Shape = Shape()) -> list[Worker]:
    per_s = tokens_per_s / shape.tokens / shape.workers
    return [Worker(run_id, number, shape, per_s) for number in range(shape.workers)]


@dataclass(frozen=True, slots=True)
class Written:
    tokens: int
    requests: int
    parts: int


def write_run(
    run_dir: RunDirectory, tokens: int, shape: Shape = Shape(), *, tokens_per_s: float = 100_000.0
) -> Written:
    """A run directory as a recorder leaves it: one batch of each worker in each part, and a window in three stages."""
    run_dir.parts.mkdir(parents=True)
    workers = workers_of(RUN_ID, tokens_per_s, shape)
    in_part = shape.workers * shape.rows
    part_ns = round(in_part * shape.tokens / tokens_per_s * SECOND_NS)
    parts = -(-tokens // (in_part * shape.tokens))
    for number in range(1, parts + 1):
        for kind in (BatchKind.REQUESTS, BatchKind.HEALTH):
            at_unix_ns = T0_UNIX_NS + number * part_ns - SECOND_NS // 10
            made = [w.next_batch() if kind is BatchKind.REQUESTS else w.next_health(at_unix_ns) for w in workers]
            write_part(run_dir.parts / f"{PART_NAMES[kind]}-{number:06}.parquet", kind, RUN_ID, made)
    last_seq = {worker.id: 2 * parts for worker in workers}
    write_json(run_dir.run_json, _description(last_seq, parts * shape.rows, parts * part_ns))
    return Written(parts * in_part * shape.tokens, parts * in_part, parts)


def _description(last_seq: dict[str, int], requests: int, length_ns: int) -> dict[str, Any]:
    """``run.json`` of a run that has ended."""
    config = RunConfig(targets=(Target(scheme="http", host="10.0.0.7", port=8000),), workload="/nowhere.json")
    edges = [T0_UNIX_NS + length_ns * edge // _STAGES for edge in range(_STAGES + 1)]
    return {
        "schema": 1,
        "run_id": RUN_ID,
        "run_name": None,
        "tags": {},
        "command": ["locust"],
        "versions": {"vllm_locust": __version__},
        "hosts": {"master": socket.gethostname()},
        "config": config.to_json(),
        "token_detail": True,
        "server": {"model": "m", "max_model_len": None, "is_vllm": True, "version": "0.24.0"},
        "server_metrics": {"pages": []},
        "workload": {
            "name": "synthetic",
            "fingerprint": "none",
            "token_count_method": "none",
            "warnings": [],
            "filters": {},
        },
        "started_unix_ns": T0_UNIX_NS,
        "ended_unix_ns": edges[-1] + SECOND_NS,
        "stopped_early": None,
        "window": {"start_unix_ns": edges[0], "end_unix_ns": edges[-1]},
        "stages": [
            {
                "stage": i,
                "name": f"stage {i}",
                "stage_kind": "hold",
                "start_unix_ns": edges[i],
                "end_unix_ns": edges[i + 1],
            }
            for i in range(_STAGES)
        ],
        "schedule": None,
        "shares": [],
        "workers": {
            "expected": len(last_seq),
            "ids": list(last_seq),
            "missing": [],
            "finished": {},
            "flushed": {
                worker_id: {
                    "run_id": RUN_ID,
                    "worker_id": worker_id,
                    "wall_clock_moved_ns": 0,
                    "last_seq": seq,
                    "durable_seq": seq,
                    "requests": requests,
                    "spool_path": None,
                    "unstorable_values": 0,
                }
                for worker_id, seq in last_seq.items()
            },
        },
    }
