"""The collector as a process beside loads on the GPUs of this host: what it published, phase by phase."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from statistics import fmean
from typing import Any

from vllm_locust import clock
from vllm_locust.store.embedded import start_embedded
from vllm_locust.store.redis_url import redis_options
from vllm_locust.store.telemetry_schema import decode_telemetry
from vllm_locust.store.telemetry_store import TelemetryStore
from vllm_locust.telemetry import TelemetryKind

ROOT = Path(__file__).parents[2]
PUBLISHED_S = 2.5
"""A row is in Redis so long after it was sampled."""
_STREAMS = ("gpu", "host")
Row = Mapping[str, Any]


@dataclass
class Phase:
    """What was sampled between two moments."""

    name: str
    start_unix_ns: int
    end_unix_ns: int
    gpu: list[Row] = field(default_factory=list)
    processes: list[Row] = field(default_factory=list)
    host: list[Row] = field(default_factory=list)

    def take(self, kind: TelemetryKind, row: Row) -> None:
        if self.start_unix_ns <= row["time_unix_ns"] < self.end_unix_ns:
            rows = {TelemetryKind.GPU: self.gpu, TelemetryKind.GPU_PROCESSES: self.processes}
            rows.get(kind, self.host).append(row)

    def values(self, column: str, uuid: str) -> list[float]:
        return [row[column] for row in self.gpu if row["gpu_uuid"] == uuid and row[column] is not None]

    def mean(self, column: str, uuid: str) -> float | None:
        values = self.values(column, uuid)
        return fmean(values) if values else None

    @property
    def uuids(self) -> list[str]:
        return sorted({row["gpu_uuid"] for row in self.gpu})


class ProcessEnded(Exception):
    """A process that should go on has ended, or has said nothing for too long."""


class Lines:
    """What a process prints, line by line, with a limit on how long each is waited for."""

    def __init__(self, pipe: Any, kept: list[str] | None = None) -> None:
        self._queue: Queue[str | None] = Queue()
        self._kept = kept
        threading.Thread(target=self._read, args=(pipe,), daemon=True).start()

    def _read(self, pipe: Any) -> None:
        for line in pipe:
            if self._kept is not None:
                self._kept.append(line)
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def until(self, word: str, timeout_s: float) -> str:
        """The first line that has ``word`` in it."""
        deadline_ns = clock.monotonic_ns() + round(timeout_s * 1e9)
        while True:
            try:
                line = self._queue.get(timeout=max(0.01, (deadline_ns - clock.monotonic_ns()) / 1e9))
            except Empty:
                raise ProcessEnded(f"no {word} within {timeout_s:g} s") from None
            if line is None:
                raise ProcessEnded(f"it ended before it said {word}")
            if word in line:
                return line


class GpuLoad:
    """The process of ``gpu_load``, with everything in memory."""

    def __init__(self, *, dry: bool = False, timeout_s: float = 240.0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.live.gpu_load", *(["--dry"] if dry else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self._lines = Lines(self._process.stdout)
        try:
            _, kinds, self.what = self._lines.until("LOADED", timeout_s).split(maxsplit=2)
        except ProcessEnded:
            self.stop()
            raise
        self.kinds = tuple(kinds.split(","))

    def start(self, kind: str, seconds: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind} {seconds}\n")
        self._process.stdin.flush()
        self._lines.until(f"READY {kind}", 10.0)

    def await_end(self, kind: str, timeout_s: float) -> int:
        """How many rounds it did."""
        return int(self._lines.until(f"DONE {kind}", timeout_s).split()[-1])

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Collected:
    """A collector that samples into an embedded Valkey of its own, and what is read of that."""

    def __init__(self, url: str, process: subprocess.Popen[str]) -> None:
        self.url = url
        self._process = process
        self._said: list[str] = []
        self._lines = Lines(process.stderr, self._said)
        self._store = TelemetryStore(redis_options(url))
        self._after = dict.fromkeys(_STREAMS, "0-0")

    def await_start(self) -> None:
        self._lines.until("Ctrl-C ends it", 30.0)

    def fill(self, phase: Phase) -> Phase:
        """With all rows of its time, which must lie after those that were read before."""
        clock.sleep(PUBLISHED_S)
        while entries := self._store.read_telemetry(self._after, count=100):
            for entry in entries:
                self._after[entry.stream] = entry.entry_id
                batch = decode_telemetry(entry.payload or b"")
                for row in batch.rows.to_pylist():
                    phase.take(batch.header.kind, row)
        return phase

    def end(self) -> str:
        """What it said."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        finally:
            self._process.kill()
        clock.sleep(0.2)
        return "".join(self._said)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._store.close()


@contextmanager
def collector(*module: str) -> Iterator[Collected]:
    """The real one; or another, named by its module and what it is given behind the address of the Valkey."""
    valkey = start_embedded()
    real = ("vllm_locust", "collect", "--gpus", "all", "--redis-url", valkey.url)
    name, *arguments = (module[0], valkey.url, *module[1:]) if module else real
    process = subprocess.Popen([sys.executable, "-m", name, *arguments], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    collected = Collected(valkey.url, process)
    try:
        collected.await_start()
        yield collected
    finally:
        collected.close()
        valkey.stop()


def spend(collected: Collected, load: GpuLoad | None, kind: str, seconds: float) -> Phase:
    """So long under one load; ``idle`` is none."""
    if load is not None and kind != "idle":
        load.start(kind, seconds + 1.0)
        clock.sleep(0.5)
    start_ns = clock.unix_ns()
    clock.sleep(seconds)
    phase = Phase(kind, start_ns, clock.unix_ns())
    if load is not None and kind != "idle":
        load.await_end(kind, seconds + 30)
    return collected.fill(phase)
