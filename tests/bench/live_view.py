"""What the web UI's live view costs the master: reading snapshots that come once a second, and what is made of them.

``python -m tests.bench.live_view --workers 50`` prints a line (JSON): CPU milliseconds for each second of a run, which
at one look a second are tenths of a percent of a core. Snapshots are as large as those of a worker that has read
thousands of streams; the telemetry of eight GPUs at 10 Hz comes through a real Valkey. Locust is imported: the process
is patched.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import locust  # noqa: F401 - it patches the process, and must do so before others have made their sockets
import numpy as np
import orjson

from tests.store.servers import Server
from vllm_locust import clock
from vllm_locust.aggregate import HEALTH, HISTOGRAMS, RunAggregate, Snapshot, Snapshots
from vllm_locust.config import RunConfig, Target
from vllm_locust.outcome import Outcome
from vllm_locust.run.web.exposition import exposition
from vllm_locust.run.web.live_run import LiveRun
from vllm_locust.run.web.locust_tab import tables
from vllm_locust.store.clock_offset import measure_clock_offset
from vllm_locust.store.redis_url import redis_options
from vllm_locust.store.telemetry_schema import TelemetryHeader, encode_telemetry, telemetry_rows
from vllm_locust.store.telemetry_store import TelemetryStore
from vllm_locust.telemetry import TelemetryKind

_GPUS, _GPU_HZ = 8, 10
_SPREAD = {"ttft": 0.4, "e2e": 0.5, "itl": 0.5, "chunk_gap": 0.5}


class _Workers:
    """Each grows by 20 requests of 128 tokens a second."""

    def __init__(self, count: int) -> None:
        self._rng = np.random.default_rng(1)
        self._aggregates = [RunAggregate() for _ in range(count)]
        for aggregate in self._aggregates:
            self._grow(aggregate, 2_000)

    def _grow(self, aggregate: RunAggregate, requests: int) -> None:
        for name in HISTOGRAMS:
            samples = requests * (128 if name in ("itl", "chunk_gap") else 1)
            values = self._rng.lognormal(17, _SPREAD.get(name, 0.3), samples).astype(np.int64)
            aggregate.histograms[name].record_many(values)
        aggregate.sent += requests
        aggregate.finished[Outcome.OK] = aggregate.finished.get(Outcome.OK, 0) + requests
        aggregate.output_tokens += 128 * requests

    def messages(self, sequence: int) -> list[dict[str, Any]]:
        health = dict.fromkeys(HEALTH, 0.25)
        for aggregate in self._aggregates:
            self._grow(aggregate, 20)
        return [
            aggregate.to_message(f"host_{number:032x}", sequence, health=health)
            for number, aggregate in enumerate(self._aggregates)
        ]


def _publish_gpus(store: TelemetryStore, sequence: int, offset: Any) -> None:
    now_ns = clock.unix_ns()
    rows: list[dict[str, object]] = [
        {"time_unix_ns": now_ns, "host": "h", "gpu_index": gpu, "gpu_uuid": f"GPU-{gpu}", "utilization": 0.9}
        for gpu in range(_GPUS)
        for _ in range(_GPU_HZ)
    ]
    header = TelemetryHeader("h-1", sequence, TelemetryKind.GPU)
    store.add_telemetry(
        [(TelemetryKind.GPU, encode_telemetry(header, telemetry_rows(TelemetryKind.GPU, rows)))], offset
    )


def _controller(workers: int, redis_url: str) -> Any:
    """What the live view asks of a run's controller."""
    config = RunConfig(targets=(Target.parse("http://h:1"),))
    named = SimpleNamespace(model="m", name="w")
    return SimpleNamespace(
        run_id="bench",
        checked=SimpleNamespace(config=config, server=named, workload=named, metrics_pages=()),
        redis=redis_options(redis_url),
        standing={"phase": "window", "finishing": False, "users": workers, "left_s": None},
        workers=SimpleNamespace(ids=[f"host_{number:032x}" for number in range(workers)], away=[]),
    )


def measure(workers: int, seconds: int) -> dict[str, float]:
    """Mean CPU milliseconds per second of a run, by what they were spent on."""
    spent: dict[str, int] = {}

    def timed(what: str, call: Callable[[], object]) -> None:
        begun_ns = clock.process_cpu_ns()
        call()
        spent[what] = spent.get(what, 0) + clock.process_cpu_ns() - begun_ns

    valkey, snapshots, made = Server(), Snapshots(), _Workers(workers)
    store = TelemetryStore(redis_options(valkey.url))
    live = LiveRun(SimpleNamespace(has_workers=True, worker_ids=list))  # type: ignore[arg-type]
    offset = _offset(store)
    live.begin(_controller(workers, valkey.url), snapshots)
    course = live._course
    assert course is not None

    def receive() -> None:
        for message in messages:
            snapshots.offer(Snapshot.from_message(message))

    def look() -> None:
        course.look()
        live._told = None

    for second in range(1, seconds + 1):
        messages = made.messages(second)
        _publish_gpus(store, second, offset)
        timed("snapshots_read", receive)
        timed("live_view", look)
        timed(
            "first_viewer", lambda: orjson.dumps({**live.stats(), "history": live.history("bench", course.point["n"])})
        )
        timed("locust_tab", lambda: orjson.dumps(tables(live.stats())))
        timed("prometheus", lambda: exposition(live.stats(), live.merged))
    assert len(course.gpu_table) == _GPUS, "the GPUs' telemetry was not read"
    store.close()
    valkey.close()
    return {what: round(ns / 1e6 / seconds, 3) for what, ns in spent.items()}


def _offset(store: TelemetryStore) -> Any:
    return measure_clock_offset(store.server_time_unix_ns, store.server_run_id(), unix_ns=clock.unix_ns)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.live_view", description=__doc__)
    parser.add_argument("--workers", type=int, default=50)
    parser.add_argument("--seconds", type=int, default=30)
    args = parser.parse_args(argv)
    print(json.dumps({"workers": args.workers} | measure(args.workers, args.seconds)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
