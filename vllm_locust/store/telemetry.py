"""The sampling side of the telemetry streams: takes rows without blocking, and sends them as numbered batches.

One thread does all that can wait. It keeps the batches of the last minutes, also those that were sent: a Redis that
turns out to be another one than before (a restart, a failover) is sent them again, and whoever reads them knows by
their numbers what it has.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_locust import clock
from vllm_locust.errors import StoreError
from vllm_locust.store.clock_offset import ClockOffset, measure_clock_offset
from vllm_locust.store.schema import check_worker_id
from vllm_locust.store.telemetry_schema import TelemetryHeader, encode_telemetry, telemetry_rows
from vllm_locust.store.telemetry_store import TelemetryStore
from vllm_locust.telemetry import Row, TelemetryKind

logger = logging.getLogger(__name__)

SECOND_NS = 1_000_000_000
_RETRY_FIRST_NS = SECOND_NS // 5
_RETRY_LAST_NS = 5 * SECOND_NS
_SEND_BATCHES = 64
_HOST_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherConfig:
    source: str
    """Names one life of one process, see ``new_source``: its batches count from 1."""
    batch_interval_ns: int = SECOND_NS
    keep_ns: int = 600 * SECOND_NS
    """How long a batch can be sent again, or waits for a Redis that is away."""
    memory_bytes: int = 64 << 20
    """Encoded batches held in memory; beyond it the oldest are given up."""
    clock_interval_ns: int = 30 * SECOND_NS


def new_source(host: str) -> str:
    return f"{host[:_HOST_CHARS]}-{os.getpid()}-{os.urandom(4).hex()}"


@dataclass(slots=True, eq=False)
class _KeptBatch:
    kind: TelemetryKind
    made_ns: int
    payload: bytes
    sent: bool = False


class TelemetryPublisher:
    """A ``TelemetrySink`` over a ``TelemetryStore``. ``unix_ns`` is the axis on which the rows' times lie: its distance
    from the server's clock travels with each batch.
    """

    def __init__(
        self, store: TelemetryStore, config: PublisherConfig, *, unix_ns: Callable[[], int] = clock.unix_ns
    ) -> None:
        check_worker_id(config.source)
        self._store = store
        self._config = config
        self._unix_ns = unix_ns
        self._lock = threading.Lock()
        self._rows: dict[TelemetryKind, list[Row]] = {}
        self._kept: deque[_KeptBatch] = deque()
        self._kept_bytes = 0
        self._last_seq = 0
        self._server_run_id: str | None = None
        self._clock: ClockOffset | None = None
        self._clock_due_ns = 0
        self._retry_at_ns = 0
        self._retry_ns = _RETRY_FIRST_NS
        self.last_error: str | None = None
        self.lost_batches = 0
        """Given up before they could be sent, or not storable."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry-publisher", daemon=True)
        self._thread.start()

    def put(self, kind: TelemetryKind, rows: Sequence[Row]) -> None:
        with self._lock:
            self._rows.setdefault(kind, []).extend(rows)

    def close(self) -> None:
        """Send what is left, once, and stop."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        ending = False
        while not ending:
            ending = self._closing.wait(self._config.batch_interval_ns / SECOND_NS)
            try:
                self._turn(ending=ending)
            except Exception as exc:  # noqa: BLE001 - whatever it was: a collector that publishes no more is useless
                self._try_later(f"telemetry cannot be published: {type(exc).__name__}: {exc}")

    def _turn(self, *, ending: bool) -> None:
        self._seal()
        now_ns = clock.monotonic_ns()
        self._forget(now_ns)
        if now_ns < self._retry_at_ns and not ending:
            return
        try:
            self._exchange(now_ns)
        except StoreError as exc:
            self._try_later(str(exc))
            return
        if self.last_error is not None:
            logger.warning("Telemetry is published again")
        self._retry_ns, self.last_error = _RETRY_FIRST_NS, None

    def _try_later(self, error: str) -> None:
        if error != self.last_error:
            logger.warning("%s; what is sampled meanwhile is kept for a while", error)
        self.last_error = error
        self._retry_at_ns = clock.monotonic_ns() + self._retry_ns
        self._retry_ns = min(2 * self._retry_ns, _RETRY_LAST_NS)

    def _seal(self) -> None:
        """Turn what has gathered into batches."""
        with self._lock:
            gathered, self._rows = self._rows, {}
        now_ns = clock.monotonic_ns()
        for kind, rows in gathered.items():
            self._last_seq += 1
            header = TelemetryHeader(self._config.source, self._last_seq, kind)
            try:
                payload = encode_telemetry(header, telemetry_rows(kind, rows))
            except Exception:  # a value that nothing foresaw must not take the batches after it along
                logger.exception("%d rows of %s cannot be stored and are lost", len(rows), kind)
                self.lost_batches += 1
                continue
            self._kept.append(_KeptBatch(kind, now_ns, payload))
            self._kept_bytes += len(payload)

    def _forget(self, now_ns: int) -> None:
        while self._kept and (
            now_ns - self._kept[0].made_ns > self._config.keep_ns or self._kept_bytes > self._config.memory_bytes
        ):
            batch = self._kept.popleft()
            self._kept_bytes -= len(batch.payload)
            self.lost_batches += not batch.sent

    def _exchange(self, now_ns: int) -> None:
        server_run_id = self._store.server_run_id()
        if server_run_id != self._server_run_id:
            for batch in self._kept:
                batch.sent = False
            self._clock_due_ns = 0
            self._server_run_id = server_run_id
        if self._clock is None or now_ns >= self._clock_due_ns:
            self._clock = measure_clock_offset(self._store.server_time_unix_ns, server_run_id, unix_ns=self._unix_ns)
            self._clock_due_ns = now_ns + self._config.clock_interval_ns
        waiting = [batch for batch in self._kept if not batch.sent]
        for first in range(0, len(waiting), _SEND_BATCHES):
            self._send(waiting[first : first + _SEND_BATCHES], self._clock)

    def _send(self, batches: Sequence[_KeptBatch], offset: ClockOffset) -> None:
        replies = self._store.add_telemetry([(batch.kind, batch.payload) for batch in batches], offset)
        for batch, refusal in zip(batches, replies, strict=True):
            batch.sent = refusal is None
        if refused := next(filter(None, replies), None):
            raise refused
