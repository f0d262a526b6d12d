"""What a large run costs after the tokens have come: snapshots on the master, the recorder, the merge.

Each claim has a bound in ``README.md``; a claim is measured on what workers would have sent, made beforehand.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.bench.placement import usage
from tests.bench.synthetic_run import RUN_ID, Shape, workers_of, write_run
from tests.store.servers import Server
from vllm_locust.aggregate import COUNTERS, HISTOGRAMS, KEPT_STAGES, RunAggregate, Snapshot, Snapshots
from vllm_locust.outcome import Outcome
from vllm_locust.store.recorder import RecorderConfig
from vllm_locust.store.recorder_process import start_recorder
from vllm_locust.store.redis_store import RunStore
from vllm_locust.store.rundir import RunDirectory
from vllm_locust.store.schema import BatchKind, encode_batch

WORKERS: Final = 1000
STREAMS: Final = 1000
ROUND_LIMIT_S: Final = 1.0
RECORDER_LIMIT_TOKENS_PER_S: Final = 1e6
MERGE_TOKENS: Final = 100_000_000
MERGE_LIMIT_BYTES: Final = 4 << 30
_TYPICAL_NS: Final = {"ttft": 8e7, "ttft_from_schedule": 9e7, "e2e": 4e9, "receive_lag": 5e4, "generator_lag": 2e5}
_GAP_NS: Final = 2e7
_DIFFERENT_WORKERS: Final = 20
_ROUNDS: Final = 3
_RECORDER_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Claim:
    case: str
    what: str
    bound: str
    measured: str
    cpu_s: float
    wall_s: float
    peak_rss_bytes: int | None
    holds: bool


def snapshots() -> Iterator[Claim]:
    """A round: every worker's newest snapshot is read, checked and kept; the run and each stage are merged once."""
    random = np.random.default_rng(1)
    made = [_aggregates(random) for _ in range(_DIFFERENT_WORKERS)]
    best: tuple[float, float] | None = None
    for number in range(_ROUNDS):
        messages = [
            made[worker % len(made)][0].to_message(f"worker-{worker}", number, made[worker % len(made)][1])
            for worker in range(WORKERS)
        ]
        began, cpu_began = time.monotonic(), time.process_time()
        _round(messages)
        took = time.process_time() - cpu_began, time.monotonic() - began
        best = took if best is None else min(best, took)
    assert best is not None
    yield Claim(
        case="snapshots",
        what=f"a round of snapshots of {WORKERS:,} workers × {STREAMS:,} streams, {KEPT_STAGES} stages each",
        bound=f"< {ROUND_LIMIT_S:g} s on one core",
        measured=f"{best[0]:.2f} s",
        cpu_s=best[0],
        wall_s=best[1],
        peak_rss_bytes=None,
        holds=best[0] < ROUND_LIMIT_S,
    )


def _round(messages: list[dict[str, Any]]) -> None:
    newest = Snapshots()
    for message in messages:
        newest.offer(Snapshot.from_message(message))
    merged = newest.merged()
    stages = [newest.of_stage(stage) for stage in range(KEPT_STAGES)]
    if merged.histograms["itl"].n != sum(stage.histograms["itl"].n for stage in stages if stage is not None):
        raise RuntimeError("the stages are not the whole")


def _aggregates(random: np.random.Generator) -> tuple[RunAggregate, dict[int, RunAggregate]]:
    """The whole and its stages, of a worker whose streams have had ten requests each and seen every outcome."""
    stages = {stage: _aggregate(random) for stage in range(KEPT_STAGES)}
    return RunAggregate.union(list(stages.values())), stages


def _aggregate(random: np.random.Generator) -> RunAggregate:
    aggregate = RunAggregate(finished={outcome: int(random.integers(1, 10**6)) for outcome in Outcome})
    for name in HISTOGRAMS:
        typical_ns = _TYPICAL_NS.get(name, _GAP_NS)
        aggregate.histograms[name].record_many(random.lognormal(np.log(typical_ns), 0.5, 10 * STREAMS).astype(np.int64))
    for name in COUNTERS:
        setattr(aggregate, name, int(random.integers(1, 10**9)))
    return aggregate


def recorder(work: Path, tokens: int = 20_000_000) -> Iterator[Claim]:
    """From its start to the moment when all of a full stream is on disk, synced, and said to be so."""
    server = Server()
    try:
        store = server.store(RUN_ID)
        workers, payload_bytes = workers_of(RUN_ID, 1e6), 0
        per_round = Shape().workers * Shape().rows * Shape().tokens
        rounds = -(-tokens // per_round)
        for _ in range(rounds):
            payloads = [encode_batch(batch.header, batch.rows) for batch in (worker.next_batch() for worker in workers)]
            payload_bytes += sum(map(len, payloads))
            store.add_batches([(BatchKind.REQUESTS, payload) for payload in payloads])
        run_dir = RunDirectory.create(work / "recorder")
        began = time.monotonic()
        process = start_recorder(RecorderConfig(run_id=RUN_ID, redis_url=server.url), run_dir)
        try:
            _await_durable(store, len(workers) * rounds)
            wall_s = time.monotonic() - began
            used, peak = usage([process.pid]), _peak_rss_bytes(process.pid)
            report = process.finish(60.0)
        finally:
            process.kill()
            store.close()
    finally:
        server.close()
        shutil.rmtree(work / "recorder", ignore_errors=True)
    made = rounds * per_round
    if report.rows * Shape().tokens != made:
        raise RuntimeError(f"{report.rows} requests are on disk, not {made // Shape().tokens}")
    cpu_s = sum(used.cpu_ns.values()) / 1e9
    yield Claim(
        case="recorder",
        what=f"{made / 1e6:.0f} M tokens ({payload_bytes / made:.1f} bytes each) from Valkey to disk, start included",
        bound=f"≥ {RECORDER_LIMIT_TOKENS_PER_S / 1e6:g} M tokens/s",
        measured=f"{made / wall_s / 1e6:.1f} M tokens/s",
        cpu_s=cpu_s,
        wall_s=wall_s,
        peak_rss_bytes=peak,
        holds=made / wall_s >= RECORDER_LIMIT_TOKENS_PER_S,
    )


def _await_durable(store: RunStore, batches: int) -> None:
    deadline = time.monotonic() + _RECORDER_S
    while sum(store.durable().values()) < batches:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{batches} batches were not durable within {_RECORDER_S:.0f} s")
        time.sleep(0.02)


def _peak_rss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def merge(work: Path, tokens: int = MERGE_TOKENS) -> Iterator[Claim]:
    """``vllm-locust merge`` of a run directory as the recorder leaves it, in a process of its own."""
    run_dir = RunDirectory(work / "merge" / "run")
    try:
        written = write_run(run_dir, tokens)
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm_locust", "merge", str(run_dir.path)], stdout=subprocess.DEVNULL
        )
        _, status, spent = os.wait4(process.pid, 0)
        wall_s = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, 4) or not run_dir.report_html.is_file():
            raise RuntimeError(f"the merge ended with exit code {process.returncode}")
    finally:
        shutil.rmtree(work / "merge", ignore_errors=True)
    peak = spent.ru_maxrss << 10
    yield Claim(
        case="merge",
        what=f"merge of {written.tokens / 1e6:.0f} M tokens, {written.requests:,} requests, {written.parts:,} parts",
        bound=f"≤ {MERGE_LIMIT_BYTES >> 30} GiB",
        measured=f"{peak / 2**30:.2f} GiB",
        cpu_s=spent.ru_utime + spent.ru_stime,
        wall_s=wall_s,
        peak_rss_bytes=peak,
        holds=peak <= MERGE_LIMIT_BYTES,
    )


CASES: Final[dict[str, Callable[[Path], Iterator[Claim]]]] = {
    "snapshots": lambda _: snapshots(),
    "recorder": recorder,
    "merge": merge,
}


def cells(claim: Claim) -> list[str]:
    peak = "–" if claim.peak_rss_bytes is None else f"{claim.peak_rss_bytes / 2**20:,.0f} MiB"
    measured = claim.measured if claim.holds else f"**{claim.measured}: missed**"
    return [claim.what, claim.bound, measured, f"{claim.cpu_s:.2f} s", f"{claim.wall_s:.2f} s", peak]
