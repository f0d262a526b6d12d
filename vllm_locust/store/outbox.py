"""A worker's batches between their making and their being durable: what is where, and in how much memory.

Batches leave at the front, in order, once the recorder has said that they are on disk. Until then each is held in
memory, in the spool, or, where the spool could not be written and memory is full, only as the number of its lost
rows. Not synchronised: its owner holds a lock around every call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_locust.store.schema import BatchKind


@dataclass(slots=True, eq=False)
class PendingBatch:
    seq: int
    kind: BatchKind
    rows: int
    nbytes: int
    payload: bytes | None
    spool_position: int | None = None
    entry_id: str | None = None
    """Its place in the stream; None while it has to be sent, or sent again."""


class Outbox:
    def __init__(self) -> None:
        self._batches: deque[PendingBatch] = deque()
        self.last_seq = 0
        self.durable_seq = 0
        self.memory_bytes = 0
        self.sent_bytes = 0
        """What lies in a stream and is not durable yet."""
        self.spooled = 0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def oldest(self) -> PendingBatch | None:
        return self._batches[0] if self._batches else None

    def add(self, kind: BatchKind, rows: int, payload: bytes) -> None:
        self.last_seq += 1
        self._batches.append(PendingBatch(self.last_seq, kind, rows, len(payload), payload))
        self.memory_bytes += len(payload)

    def confirm(self, durable_seq: int) -> bool:
        """Let go of all up to ``durable_seq``. True if that was news; what is beyond ``last_seq`` is not believed."""
        if not self.durable_seq < durable_seq <= self.last_seq:
            return False
        self.durable_seq = durable_seq
        while self._batches and self._batches[0].seq <= durable_seq:
            batch = self._batches.popleft()
            self.memory_bytes -= len(batch.payload or b"")
            self.spooled -= batch.spool_position is not None
            self.sent_bytes -= batch.nbytes if batch.entry_id is not None else 0
        return True

    def unsent(self, max_bytes: int) -> list[PendingBatch]:
        """The next batches to send, the oldest first: one, and what else is within ``max_bytes``."""
        chosen: list[PendingBatch] = []
        size = 0
        for batch in self._batches:
            if batch.entry_id is None:
                size += batch.nbytes
                if chosen and size > max_bytes:
                    break
                chosen.append(batch)
        return chosen

    def mark_sent(self, batch: PendingBatch, entry_id: str) -> None:
        """One confirmed meanwhile is not counted any more."""
        if batch.seq > self.durable_seq:
            self.sent_bytes += batch.nbytes
        batch.entry_id = entry_id

    def resend_all(self) -> None:
        for batch in self._batches:
            batch.entry_id = None
        self.sent_bytes = 0

    def in_memory(self) -> list[PendingBatch]:
        return [batch for batch in self._batches if batch.payload is not None and batch.spool_position is None]

    def mark_spooled(self, batches: Iterable[PendingBatch], positions: Iterable[int]) -> None:
        """The batches lie in the spool now and need no memory. One confirmed meanwhile is not counted any more."""
        for batch, position in zip(batches, positions, strict=True):
            if batch.seq > self.durable_seq:
                self.memory_bytes -= len(batch.payload or b"")
                self.spooled += 1
            batch.spool_position, batch.payload = position, None

    def replace(self, batch: PendingBatch, payload: bytes) -> None:
        """Hold ``payload`` in the place of a batch whose rows are lost."""
        self.memory_bytes += len(payload) - len(batch.payload or b"")
        self.spooled -= batch.spool_position is not None
        self.sent_bytes -= batch.nbytes if batch.entry_id is not None else 0
        batch.nbytes = len(payload)
        batch.payload, batch.entry_id, batch.spool_position = payload, None, None
