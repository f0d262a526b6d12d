"""The recorder: a process of its own that moves a run's batches from Redis to part files while the run goes on.

Started by exec, with its configuration as one line of JSON on standard input. For each batch, in this order: it is on
disk and synced, the ``durable`` hash says so, it is trimmed from its stream. Killed at any point it loses nothing and
doubles nothing: when it starts again it reads from its own files what it has. The line ``finish SECONDS`` or a
SIGTERM makes it drain the streams and end; when its parent is gone without a word it goes on until the streams have
been silent for a while.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_locust import clock
from vllm_locust.errors import StoreError, VllmLocustError
from vllm_locust.store.intake import PART_BYTES, Intake, RecorderReport
from vllm_locust.store.redis_store import RunStore, StreamEntry
from vllm_locust.store.redis_url import redis_options
from vllm_locust.store.rundir import RunDirectory, read_json, write_json
from vllm_locust.store.schema import BatchKind
from vllm_locust.store.telemetry_recorder import TelemetryRecorder
from vllm_locust.store.telemetry_store import TelemetryStore

SECOND_NS = 1_000_000_000
_BEGIN = dict.fromkeys(BatchKind, "0-0")
_READ_COUNT = 32
_MANY_PARTS = 600
_BLOCK_MS = 100
_RETRY_S = 0.25
_GIVE_UP_NS = 10 * SECOND_NS
"""At the end: neither Redis nor the disk has been of use for so long. What is not drained is for a merge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderConfig:
    run_id: str
    redis_url: str
    redis_password_file: str | None = None
    part_age_ns: int = SECOND_NS
    """How long a batch waits for others before they become a part; three times as long in a run of many parts."""
    orphan_silence_ns: int = 15 * SECOND_NS
    """After the parent has gone: end when no batch has come for so long."""
    control_interval_ns: int = 5 * SECOND_NS
    telemetry_from_unix_ns: int = 0
    """Telemetry that was published before this time of the server is not the run's."""


class Recorder:
    def __init__(
        self, config: RecorderConfig, run_dir: RunDirectory, store: RunStore, telemetry: TelemetryRecorder
    ) -> None:
        self._config = config
        self._telemetry = telemetry
        self._run_dir = run_dir
        self._store = store
        self._intake = Intake(run_dir, config.run_id)
        self._after = dict(_BEGIN)
        self._to_trim: dict[BatchKind, list[str]] = {kind: [] for kind in BatchKind}
        self._server_run_id: str | None = None
        self._server_checked_ns = 0
        self._published: dict[str, int] = {}
        self._control: dict[str, str] = {}
        self._control_read_ns = 0
        self._error: str | None = None
        self._told: set[str] = set()
        """Since the last turn without an error: two that take turns are told once each."""

    def turn(self, *, finishing: bool = False) -> bool:
        """One round: read, write when it is time, publish, trim. True when nothing was left to read or to write."""
        now_ns = clock.monotonic_ns()
        try:
            if now_ns - self._server_checked_ns >= SECOND_NS:
                self._check_server(now_ns)
            full = self._intake.nbytes >= PART_BYTES
            idle = not full and not self._read(block_ms=0 if finishing else _BLOCK_MS)
            if self._is_time(idle=idle, finishing=finishing):
                self._intake.write()
            self._publish()
            self._trim()
            self._keep_control(now_ns, finishing=finishing)
            complete = self._telemetry.turn(finishing=finishing)
        except (StoreError, OSError) as exc:
            self._fail(exc)
            return False
        self._error = None
        self._told.clear()
        return idle and complete and not len(self._intake)

    @property
    def failing(self) -> bool:
        return self._error is not None

    @property
    def last_batch_ns(self) -> int:
        return self._intake.last_batch_ns

    def report(self, *, drained: bool) -> RecorderReport:
        return self._intake.report(drained=drained, error=self._error)

    def close(self) -> None:
        self._intake.close()
        self._telemetry.close()

    def _check_server(self, now_ns: int) -> None:
        """Another server than before is read from its beginning; one whose data is gone is told what is durable."""
        server_run_id = self._store.run_id_of_server()
        if server_run_id != self._server_run_id:
            self._after = dict(_BEGIN)
            self._telemetry.restart(self._config.telemetry_from_unix_ns if self._server_run_id is None else 0)
            self._server_run_id = server_run_id
            for entry_ids in self._to_trim.values():
                entry_ids.clear()
        there = self._store.durable()
        if any(there.get(worker_id, 0) < seq for worker_id, seq in self._published.items()):
            self._published = {}
        self._server_checked_ns = now_ns

    def _read(self, block_ms: int) -> list[StreamEntry]:
        entries = self._store.read_batches(self._after, block_ms=block_ms, count=_READ_COUNT)
        for entry in entries:
            self._after[entry.kind] = entry.entry_id
            self._to_trim[entry.kind].append(entry.entry_id)
            self._intake.take(entry.payload)
        return entries

    def _is_time(self, *, idle: bool, finishing: bool) -> bool:
        age_ns = self._config.part_age_ns * (1 if self._intake.parts.number < _MANY_PARTS else 3)
        late = clock.monotonic_ns() - self._intake.since_ns >= age_ns
        return late or self._intake.nbytes >= PART_BYTES or (finishing and idle)

    def _publish(self) -> None:
        durable = self._intake.parts.durable()
        news = {worker_id: seq for worker_id, seq in durable.items() if self._published.get(worker_id) != seq}
        if not news:
            return
        try:
            self._store.publish_durable(news)
            self._published |= news
        except StoreError:
            # A full Redis refuses the hash, but not the trimming that makes it less full.
            self._trim()
            raise

    def _trim(self) -> None:
        """Take out of the streams what was read, unless some of it waits to be written."""
        if len(self._intake):
            return
        for kind, entry_ids in self._to_trim.items():
            if entry_ids:
                self._store.delete_entries(kind, entry_ids)
                entry_ids.clear()

    def _keep_control(self, now_ns: int, *, finishing: bool) -> None:
        """The control fields on disk: a merge after Redis has gone still knows the run's clocks and times."""
        if not finishing and now_ns - self._control_read_ns < self._config.control_interval_ns:
            return
        self._control_read_ns = now_ns
        control = self._control | self._store.read_control()
        if control != self._control:
            write_json(self._run_dir.control_json, control)
            self._control = control

    def _fail(self, exc: Exception) -> None:
        message = str(exc) if isinstance(exc, StoreError) else f"{self._run_dir.parts} cannot be written: {exc}"
        if message not in self._told:
            print(f"recorder: {message}", file=sys.stderr, flush=True)
            self._told.add(message)
        self._error = message
        # The connection may have been to a server that is no more: what was read is known, so reading again is safe.
        self._server_checked_ns = 0


class _Orders:
    """What the parent wants: read from standard input, from signals, and from its being there at all."""

    def __init__(self) -> None:
        self.deadline_ns: int | None = None
        self.orphaned = False
        self._parent = os.getppid()
        self._buffer = b""
        self._selector: selectors.BaseSelector | None = selectors.DefaultSelector()
        os.set_blocking(sys.stdin.fileno(), False)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        signal.signal(signal.SIGTERM, lambda *_: self._finish(60.0))
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def first_line(self) -> str:
        while b"\n" not in self._buffer and not self.orphaned:
            self.look(1.0)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def look(self, timeout_s: float = 0.0) -> None:
        self.orphaned = self.orphaned or os.getppid() != self._parent
        if self._selector is None or not self._selector.select(timeout_s):
            return
        data = os.read(sys.stdin.fileno(), 65536)
        self._buffer += data
        if not data:
            self._selector.close()
            self._selector, self.orphaned = None, True

    def take(self) -> None:
        self.look()
        line, found, rest = self._buffer.partition(b"\n")
        if found:
            self._buffer = rest
            word, _, seconds = line.decode().partition(" ")
            if word == "finish":
                self._finish(float(seconds))

    def _finish(self, seconds: float) -> None:
        if self.deadline_ns is None:
            self.deadline_ns = clock.monotonic_ns() + round(seconds * SECOND_NS)


def _record(recorder: Recorder, config: RecorderConfig, orders: _Orders) -> bool:
    """Until the end is ordered and reached, or cannot be reached. Whether everything was drained."""
    useful_ns = clock.monotonic_ns()
    while True:
        orders.take()
        now_ns = clock.monotonic_ns()
        silent = now_ns - recorder.last_batch_ns > config.orphan_silence_ns
        finishing = orders.deadline_ns is not None or (orders.orphaned and silent)
        drained = recorder.turn(finishing=finishing)
        if not finishing or not recorder.failing:
            useful_ns = clock.monotonic_ns()
        given_up = now_ns - useful_ns > _GIVE_UP_NS
        if finishing and (drained or given_up or orders.deadline_ns is None or now_ns >= orders.deadline_ns):
            return drained
        if not drained and recorder.failing:
            clock.sleep(_RETRY_S)


def _refused_before(run_dir: RunDirectory) -> Counter[str]:
    """By earlier recorders of the run: a batch that cannot be read is nowhere once it is trimmed."""
    return Counter(read_json(run_dir.recorder_json)["refused"]) if run_dir.recorder_json.is_file() else Counter()


def main() -> int:
    orders = _Orders()
    try:
        raw: dict[str, Any] = json.loads(orders.first_line() or "{}")
        run_dir = RunDirectory(Path(raw.pop("run_dir")))
        config = RecorderConfig(**raw)
        password_file = None if config.redis_password_file is None else Path(config.redis_password_file)
        options = redis_options(config.redis_url, password_file)
        store = RunStore(options, config.run_id)
        recorder = Recorder(config, run_dir, store, TelemetryRecorder(run_dir.telemetry_parts, TelemetryStore(options)))
        refused_before = _refused_before(run_dir)
    except (VllmLocustError, OSError, KeyError, TypeError, ValueError) as exc:
        print(f"recorder: {exc}", file=sys.stderr, flush=True)
        return exc.exit_code if isinstance(exc, VllmLocustError) else 1
    report = asdict(recorder.report(drained=_record(recorder, config, orders)))
    report["refused"] = dict(Counter(report["refused"]) + refused_before)
    recorder.close()
    store.close()
    status = 0 if report["drained"] else 1
    try:
        write_json(run_dir.recorder_json, report)
    except StoreError as exc:
        print(f"recorder: {exc}", file=sys.stderr, flush=True)
        status = 1
    # To the parent too, since the disk may be what failed; and the parent may be gone.
    with suppress(BrokenPipeError):
        print(json.dumps(report), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
