"""The worker's side of the store: takes records without blocking, sends numbered batches, and keeps each until it is
durable.

One background task does all that can wait: it seals batches about once a second, sends them, learns what is durable,
and spools to disk when Redis cannot take them. An XADD confirms nothing, so a batch goes only when the recorder has
published it in the ``durable`` hash; a Redis that was emptied, replaced or trimmed by others is sent everything else
again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pyarrow as pa

from vllm_locust import clock
from vllm_locust.errors import StoreError
from vllm_locust.record import ArrivalRecord, FlushReport, HealthSample, RequestRecord
from vllm_locust.store.clock_offset import ClockOffset, measure_clock_offset
from vllm_locust.store.columns import RequestColumns, arrivals_to_arrow, health_to_arrow
from vllm_locust.store.outbox import Outbox, PendingBatch
from vllm_locust.store.redis_store import RunStore
from vllm_locust.store.schema import BatchHeader, BatchKind, check_worker_id, empty_rows, encode_batch
from vllm_locust.store.shipper_config import SECOND_NS, ShipperConfig
from vllm_locust.store.spool import Spool, spool_path

logger = logging.getLogger(__name__)

_RETRY_FIRST_NS = SECOND_NS // 5
_RETRY_LAST_NS = 5 * SECOND_NS
_SEND_BYTES = 4 << 20
_SEND_BYTES_LEAST = 64 << 10
"""Of one exchange: the less, the slower the way to Redis is, so that it ends within the client's time limit."""
_FLUSH_POLL_S = 0.1
_GIVE_UP_NS = 10 * SECOND_NS
"""In a flush: Redis has been away for so long, and what is left is better on the disk."""
_CLOCK_OFFSETS_AT_MOST = 64
"""Beyond it every second one is dropped: a drift is as plain from measurements that lie further apart."""
_WORTH_GIVING_UP_BYTES = 16 << 10
"""An empty batch in the place of a lost one has some kilobytes itself."""


def start_thread(task: Callable[[], None]) -> None:
    """A thread; in a process patched by gevent, a greenlet."""
    threading.Thread(target=task, name="record-shipper", daemon=True).start()


def call_directly(blocking: Callable[[], None]) -> None:
    blocking()


class Shipper:
    """A ``RecordSink`` over one run's ``RunStore``.

    ``spawn`` starts the background task. ``offload`` runs one call that waits for the disk: a gevent process gives its
    thread pool, so that a slow fsync does not stop the loop. ``unix_ns`` is the axis on which the records' wall-clock
    times lie: its distance from the server's clock is what is measured and published.
    """

    def __init__(
        self,
        store: RunStore,
        config: ShipperConfig,
        *,
        spawn: Callable[[Callable[[], None]], object] = start_thread,
        offload: Callable[[Callable[[], None]], object] = call_directly,
        unix_ns: Callable[[], int] = clock.unix_ns,
    ) -> None:
        self._unix_ns = unix_ns
        check_worker_id(config.worker_id)
        self._store = store
        self._config = config
        self._offload = offload
        self._lock = threading.Lock()
        self._spool_lock = threading.Lock()
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._closing = False
        self._columns = RequestColumns()
        self._health: list[HealthSample] = []
        self._arrivals: list[ArrivalRecord] = []
        self._outbox = Outbox()
        self._spool = Spool(spool_path(config.spool_dir, store.run_id, config.worker_id))
        self._requests = self._announced = 0
        self._unstorable_values = 0
        self._server_run_id: str | None = None
        self._clock_offsets: list[ClockOffset] = []
        self._clock_due_ns = 0
        self._sealed_ns = clock.monotonic_ns()
        self._retry_at_ns = 0
        self._retry_ns = _RETRY_FIRST_NS
        self._send_bytes = _SEND_BYTES
        self._probe_at_ns = 0
        self._probe_ns = config.probe_after_ns
        self._trouble_told = self._spool_refused = False
        self._trouble_seq = self._lost_before = 0
        self.last_error: str | None = None
        self.lost_rows = 0
        # The first use of the encoder loads code for some 50 ms: better now than between two tokens.
        self._encode(1, BatchKind.REQUESTS, empty_rows(BatchKind.REQUESTS))
        spawn(self._run)

    # The record sink

    def announce_request(self) -> None:
        self._announced += 1

    def put_request(self, record: RequestRecord) -> None:
        with self._lock:
            self._columns.append(record)
            self._requests += 1
            rows, chunks = len(self._columns), self._columns.chunks
            if rows >= 4 * self._config.batch_rows or chunks >= 4 * self._config.batch_chunks:
                self._seal()
        if rows >= self._config.batch_rows or chunks >= self._config.batch_chunks:
            self._wake.set()

    def put_arrival(self, record: ArrivalRecord) -> None:
        with self._lock:
            self._arrivals.append(record)

    def put_health(self, sample: HealthSample) -> None:
        with self._lock:
            self._health.append(sample)

    @property
    def spooled_batches(self) -> int:
        return self._outbox.spooled

    @property
    def unstorable_values(self) -> int:
        """Values that no column could hold: a lone surrogate, a count beyond 64 bits."""
        return self._unstorable_values + self._columns.unstorable_values

    def flush(self, deadline_ns: int) -> FlushReport:
        with self._lock:
            self._seal()
            self._retry_at_ns = 0
            # Once more at the end: what lies between two measurements needs no guess about a drift.
            self._clock_due_ns = 0
            last_seq = self._outbox.last_seq
        useful_ns = clock.monotonic_ns()
        while self._outbox.durable_seq < last_seq and clock.monotonic_ns() < deadline_ns and not self._stopped.is_set():
            self._wake.set()
            self._stopped.wait(_FLUSH_POLL_S)
            if self.last_error is None:
                useful_ns = clock.monotonic_ns()
            if clock.monotonic_ns() - useful_ns > _GIVE_UP_NS:
                break
        if self._outbox.durable_seq < last_seq:
            self._spill()
        with self._lock:
            return FlushReport(
                worker_id=self._config.worker_id,
                last_seq=self._outbox.last_seq,
                durable_seq=self._outbox.durable_seq,
                requests=self._requests,
                spool_path=str(self._spool.path) if self._outbox.spooled else None,
                unstorable_values=self.unstorable_values,
            )

    def close(self) -> None:
        """Stop the background task. The spool file stays when it holds a batch that is not durable."""
        self._closing = True
        self._wake.set()
        self._stopped.wait()
        with self._spool_lock:
            self._spool.close(remove=not self._outbox.spooled)

    # The background task

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wake.wait(self._config.batch_interval_ns / SECOND_NS)
                self._wake.clear()
                try:
                    self._turn()
                except Exception as exc:  # noqa: BLE001 - whatever it was: a worker that ships no more loses all
                    self._fail(exc)
        finally:
            self._stopped.set()

    def _turn(self) -> None:
        now_ns = clock.monotonic_ns()
        with self._lock:
            full = len(self._columns) >= self._config.batch_rows or self._columns.chunks >= self._config.batch_chunks
            if full or now_ns - self._sealed_ns >= self._config.batch_interval_ns:
                self._seal()
        if now_ns >= self._retry_at_ns:
            try:
                self._exchange(now_ns)
                self._retry_ns, self.last_error = _RETRY_FIRST_NS, None
                self._tell_of_recovery()
            except StoreError as exc:
                self._try_later(str(exc))
        if self.last_error is not None or self._outbox.memory_bytes > self._config.memory_bytes:
            self._spill()

    def _tell_of_recovery(self) -> None:
        if not self._trouble_told or self._outbox.spooled or self._outbox.durable_seq < self._trouble_seq:
            return
        lost = self.lost_rows - self._lost_before
        but = f", but for {lost} rows, which are lost" if lost else ""
        logger.warning("What Redis did not take is on the recorder's disk now%s", but)
        self._trouble_told = False

    def _try_later(self, error: str) -> None:
        self._trouble_seq = self._outbox.last_seq
        if not self._trouble_told:
            self._lost_before = self.lost_rows
            logger.warning("%s; records are kept in %s until it can", error.rstrip("."), self._spool.path.parent)
            self._trouble_told = True
        self.last_error = error
        self._retry_at_ns = clock.monotonic_ns() + self._retry_ns
        self._retry_ns = min(2 * self._retry_ns, _RETRY_LAST_NS)
        self._send_bytes = max(self._send_bytes // 4, _SEND_BYTES_LEAST)

    def _fail(self, exc: Exception) -> None:
        """What no one foresaw: nothing is given up, and it is tried again like a Redis that is away."""
        error = f"records cannot be shipped: {type(exc).__name__}: {exc}"
        if error != self.last_error:
            logger.error("%s", error, exc_info=exc)
        self._try_later(error)

    def _exchange(self, now_ns: int) -> None:
        status = self._store.worker_status(self._config.worker_id)
        if self._server_run_id is None and status.durable_seq:
            raise StoreError(
                f"worker id {self._config.worker_id!r} has batches in run {self._store.run_id!r} already: "
                "a worker that starts again needs a new id"
            )
        with self._lock:
            if status.server_run_id != self._server_run_id:
                self._outbox.resend_all()
                self._clock_due_ns = 0
                self._server_run_id = status.server_run_id
            news = self._outbox.confirm(status.durable_seq)
            done = len(self._outbox) == 0
        if news:
            self._probe_ns = self._config.probe_after_ns
            self._probe_at_ns = now_ns + self._probe_ns
            if done:
                self._clear_spool()
        if now_ns >= self._clock_due_ns:
            self._measure_clock(status.server_run_id)
        self._probe_oldest(now_ns)
        self._send()

    def _send(self) -> None:
        """Some batches; where there are more, the next turn follows at once. So what comes meanwhile is sealed in time,
        and goes to the spool where memory is full, however long a replay takes.
        """
        with self._lock:
            room = self._config.stream_bytes - self._outbox.sent_bytes
            batches = self._outbox.unsent(min(room, self._send_bytes)) if room > 0 else []
        if not batches:
            return
        if batches[0] is self._outbox.oldest:
            self._probe_at_ns = clock.monotonic_ns() + self._probe_ns
        replies = self._store.add_batches([(batch.kind, self._payload(batch)) for batch in batches])
        refused = None
        with self._lock:
            for batch, reply in zip(batches, replies, strict=True):
                if isinstance(reply, StoreError):
                    refused = reply
                else:
                    self._outbox.mark_sent(batch, reply)
            more = self._outbox.unsent(1)
        if refused is not None:
            raise refused
        self._send_bytes = min(self._send_bytes + _SEND_BYTES_LEAST // 4, _SEND_BYTES)
        if more:
            self._wake.set()

    def _payload(self, batch: PendingBatch) -> bytes:
        payload = batch.payload
        if payload is not None:
            return payload
        assert batch.spool_position is not None
        try:
            with self._spool_lock:
                return self._spool.read(batch.spool_position)
        except OSError as exc:
            rows = batch.rows
            with self._lock:
                self._give_up_rows(batch)
            raise StoreError(f"a spooled batch of {rows} rows is lost: {exc}") from exc

    def _probe_oldest(self, now_ns: int) -> None:
        """A batch that is neither durable nor in its stream was lost there (FLUSHALL, a failover): send all again."""
        oldest = self._outbox.oldest
        if oldest is None or oldest.entry_id is None or now_ns < self._probe_at_ns:
            return
        self._probe_ns = min(2 * self._probe_ns, 60 * SECOND_NS)
        self._probe_at_ns = now_ns + self._probe_ns
        if self._store.has_entry(oldest.kind, oldest.entry_id):
            return
        # The recorder publishes before it trims, so this order of asking cannot mistake a durable batch for a lost one.
        status = self._store.worker_status(self._config.worker_id)
        with self._lock:
            self._outbox.confirm(status.durable_seq)
            if self._outbox.oldest is oldest:
                self._outbox.resend_all()

    def _measure_clock(self, server_run_id: str) -> None:
        offset = measure_clock_offset(self._store.server_time_unix_ns, server_run_id, unix_ns=self._unix_ns)
        self._clock_offsets.append(offset)
        if len(self._clock_offsets) > _CLOCK_OFFSETS_AT_MOST:
            del self._clock_offsets[1:-1:2]
        self._store.publish_clock(self._config.worker_id, self._clock_offsets)
        self._clock_due_ns = clock.monotonic_ns() + self._config.clock_interval_ns

    # Batches and the spool

    def _encode(self, seq: int, kind: BatchKind, rows: pa.RecordBatch, lost_rows: int = 0) -> bytes:
        header = BatchHeader(self._store.run_id, self._config.worker_id, seq, kind, lost_rows, self._announced)
        return encode_batch(header, rows)

    def _seal(self) -> None:
        """Turn what has gathered into batches. The caller holds the lock."""
        self._sealed_ns = clock.monotonic_ns()
        if len(self._columns):
            columns, self._columns = self._columns, RequestColumns()
            self._add(BatchKind.REQUESTS, len(columns), columns.to_arrow)
            self._unstorable_values += columns.unstorable_values
        if self._health:
            samples, self._health = self._health, []
            self._add(BatchKind.HEALTH, len(samples), lambda: health_to_arrow(samples))
        if self._arrivals:
            arrivals, self._arrivals = self._arrivals, []
            self._add(BatchKind.ARRIVALS, len(arrivals), lambda: arrivals_to_arrow(arrivals))

    def _add(self, kind: BatchKind, rows: int, to_arrow: Callable[[], pa.RecordBatch]) -> None:
        """One more batch; where it cannot be made, an empty one that says how many rows are lost."""
        seq = self._outbox.last_seq + 1
        try:
            payload = self._encode(seq, kind, to_arrow())
        except Exception:  # a value that nothing foresaw must not take the batches after it along
            logger.exception("%d rows of %s cannot be stored and are lost", rows, kind)
            payload = self._encode(seq, kind, empty_rows(kind), lost_rows=rows)
            self.lost_rows += rows if kind is BatchKind.REQUESTS else 0
            rows = 0
        self._outbox.add(kind, rows, payload)

    def _spill(self) -> None:
        """Move all that only memory holds to the spool."""
        with self._spool_lock:
            with self._lock:
                batches = self._outbox.in_memory()
                payloads = [batch.payload for batch in batches if batch.payload is not None]
            if not batches:
                return
            positions: list[int] = []
            try:
                self._offload(lambda: positions.extend(self._spool.append(payloads)))
            except OSError as exc:
                self.last_error = f"the spool {self._spool.path} cannot be written: {exc.strerror or exc}"
                if not self._spool_refused:
                    logger.error(
                        "%s; make room: beyond %d MiB in memory records are lost, and counted",
                        self.last_error,
                        self._config.memory_bytes >> 20,
                    )
                self._spool_refused = True
                self._bound_memory()
                return
            self._spool_refused = False
            with self._lock:
                self._outbox.mark_spooled(batches, positions)

    def _clear_spool(self) -> None:
        with self._spool_lock:
            if self._outbox.spooled:
                return
            try:
                self._offload(self._spool.clear)
            except OSError as exc:
                raise StoreError(f"the spool {self._spool.path} cannot be emptied: {exc.strerror or exc}") from exc

    def _bound_memory(self) -> None:
        """Neither Redis nor the disk takes a batch: the newest ones over the limit are given up, and counted."""
        with self._lock:
            for batch in reversed(self._outbox.in_memory()):
                if self._outbox.memory_bytes <= self._config.memory_bytes:
                    return
                if len(batch.payload or b"") > _WORTH_GIVING_UP_BYTES:
                    self._give_up_rows(batch)

    def _give_up_rows(self, batch: PendingBatch) -> None:
        """Leave an empty batch in the place of one whose rows can be kept nowhere. The caller holds the lock."""
        empty = empty_rows(batch.kind)
        self._outbox.replace(batch, self._encode(batch.seq, batch.kind, empty, lost_rows=batch.rows))
        if batch.kind is BatchKind.REQUESTS:
            self.lost_rows += batch.rows
        batch.rows = 0
