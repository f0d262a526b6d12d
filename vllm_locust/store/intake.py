"""What comes in, from Redis or from spools, on its way to disk: checked, taken once, gathered into parts, counted."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vllm_locust import clock
from vllm_locust.store.parts import PartStore
from vllm_locust.store.rundir import RunDirectory
from vllm_locust.store.schema import Batch, BatchRefused, decode_batch
from vllm_locust.store.spool import read_spool

PART_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderReport:
    """What is on disk. ``refused`` counts batches by the reason for which they could not be read."""

    run_id: str
    drained: bool
    """Whether nothing was left in Redis."""
    batches: int
    rows: int
    lost_rows: int
    duplicates: int
    refused: dict[str, int]
    durable: dict[str, int]
    highest: dict[str, int]
    worker_batches: dict[str, int]
    worker_rows: dict[str, int]
    worker_lost_rows: dict[str, int]
    worker_announced: dict[str, int]
    error: str | None
    restarts: int = 0


class Intake:
    """Batches of one run. ``take`` believes nothing, ``write`` makes what was taken durable."""

    def __init__(self, run_dir: RunDirectory, run_id: str) -> None:
        self._run_id = run_id
        self.parts = PartStore(run_dir.parts, run_id)
        self._gathered: dict[tuple[str, int], Batch] = {}
        self._duplicates = 0
        self._refused: Counter[str] = Counter()
        self.nbytes = 0
        self.since_ns = 0
        self.last_batch_ns = clock.monotonic_ns()

    def __len__(self) -> int:
        """Batches that are not on disk yet."""
        return len(self._gathered)

    def take(self, payload: bytes | None) -> None:
        try:
            if payload is None:
                raise BatchRefused("unreadable", "an entry of the stream has no batch in it")
            batch = decode_batch(payload, self._run_id)
        except BatchRefused as exc:
            if not self._refused[exc.reason]:
                print(f"recorder: {exc}", file=sys.stderr, flush=True)
            self._refused[exc.reason] += 1
            return
        identity = (batch.header.worker_id, batch.header.seq)
        if identity in self.parts or identity in self._gathered:
            self._duplicates += 1
            return
        self.last_batch_ns = clock.monotonic_ns()
        if not self._gathered:
            self.since_ns = self.last_batch_ns
        self._gathered[identity] = batch
        self.nbytes += batch.rows.nbytes

    def write(self) -> None:
        """Put what was taken on disk. On ``OSError`` it is kept for the next time."""
        if self._gathered:
            self.parts.write(list(self._gathered.values()))
            self._gathered.clear()
            self.nbytes = 0

    def absorb(self, spool: Path) -> None:
        """Take in the batches of a worker's spool."""
        for payload in read_spool(spool):
            self.take(payload)
            if self.nbytes >= PART_BYTES:
                self.write()
        self.write()

    def report(self, *, drained: bool, error: str | None) -> RecorderReport:
        workers = self.parts.workers
        return RecorderReport(
            run_id=self._run_id,
            drained=drained,
            batches=self.parts.batches,
            rows=self.parts.rows,
            lost_rows=sum(ledger.lost_rows for ledger in workers.values()),
            duplicates=self._duplicates,
            refused=dict(self._refused),
            durable=self.parts.durable(),
            highest={worker_id: ledger.highest for worker_id, ledger in workers.items()},
            worker_batches={worker_id: ledger.batches for worker_id, ledger in workers.items()},
            worker_rows={worker_id: ledger.rows for worker_id, ledger in workers.items()},
            worker_lost_rows={worker_id: ledger.lost_rows for worker_id, ledger in workers.items()},
            worker_announced={worker_id: ledger.announced for worker_id, ledger in workers.items()},
            error=error,
        )

    def close(self) -> None:
        self.parts.close()


def absorb_spools(run_dir: RunDirectory, run_id: str, spools: Sequence[Path]) -> RecorderReport:
    """Complete a run's parts from spools alone, where its Redis is no more. What was only in Redis stays missing."""
    intake = Intake(run_dir, run_id)
    try:
        for spool in spools:
            intake.absorb(spool)
        return intake.report(drained=False, error=None)
    finally:
        intake.close()
