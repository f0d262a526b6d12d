"""How a worker's records are shipped: sizes of batches, what may lie where, and how often to look."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ShipperConfig:
    worker_id: str
    """Names one life of one process: a worker that starts again is another one, since its batches count from 1."""
    spool_dir: Path
    batch_rows: int = 256
    batch_chunks: int = 16_384
    """Sealing so many takes a millisecond or two, for which the loop stands still."""
    batch_interval_ns: int = SECOND_NS
    memory_bytes: int = 64 << 20
    """Encoded batches held in memory; beyond it the oldest go to the spool."""
    stream_bytes: int = 32 << 20
    """Encoded batches of this worker in Redis that are not durable, but for one more: where the recorder is away
    or slow, Redis does not fill up, and the others wait here.
    """
    probe_after_ns: int = 5 * SECOND_NS
    """A batch that is not durable so long after it was sent is looked for in the stream."""
    clock_interval_ns: int = 30 * SECOND_NS
