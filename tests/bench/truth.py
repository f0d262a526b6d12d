"""The truth server as a process, and its log: when each request was read and each token really sent."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tests.bench.build import program
from tests.bench.placement import Placement

Nanoseconds = npt.NDArray[np.int64]

_MAGIC = 0x3148545552544C56
_STATES = ("running", "finished", "aborted")


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the server does with a request that does not say otherwise. The gap is per token."""

    tokens: int = 250
    gap_us: int = 20_000
    ttft_us: int = 50_000
    mode: str = "phases"
    events_per_write: int = 1
    event_bytes: int = 0

    @property
    def request_s(self) -> float:
        return (self.ttft_us + (self.tokens - 1) * self.gap_us) / 1e6

    def flags(self) -> list[str]:
        return [
            f"--tokens={self.tokens}",
            f"--gap-us={self.gap_us}",
            f"--ttft-us={self.ttft_us}",
            f"--mode={self.mode}",
            f"--events-per-write={self.events_per_write}",
            f"--event-bytes={self.event_bytes}",
        ]


@dataclass(frozen=True, slots=True)
class TrueRequest:
    """Monotonic times of one request. ``sent_ns`` has one entry per token, taken right before its send()."""

    request_id: str
    serial: int
    state: str
    read_ns: int
    sent_ns: Nanoseconds
    after_ns: Nanoseconds
    late_ns: Nanoseconds
    tokens_planned: int


@dataclass(frozen=True, slots=True)
class TruthLog:
    requests: list[TrueRequest]
    unix_minus_mono_ns: int
    clock_moved_ns: int
    """By how much the wall clock moved against the monotonic one during the run."""

    def tokens_between(self, start_ns: int, end_ns: int) -> int:
        return sum(
            int(np.searchsorted(r.sent_ns, end_ns) - np.searchsorted(r.sent_ns, start_ns)) for r in self.requests
        )

    def lateness_ns(self, start_ns: int, end_ns: int) -> Nanoseconds:
        parts = [r.late_ns[(r.sent_ns >= start_ns) & (r.sent_ns < end_ns)] for r in self.requests]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def read_log(path: Path) -> TruthLog:
    raw = path.read_bytes()
    head = np.frombuffer(raw, "<i8", 8)
    if int(head[0]) != _MAGIC or int(head[1]) != 1:
        raise ValueError(f"{path} is not a log of this truth server: take one that it wrote itself")
    at, requests = 64, []
    for _ in range(int(head[2])):
        row = np.frombuffer(raw, "<i8", 10, at)
        serial, read_ns, _, first_ns, gap_ns, tokens, per_write, writes, state, id_len = (int(v) for v in row)
        at += 80
        request_id = raw[at : at + id_len].decode("ascii")
        at += (id_len + 7) // 8 * 8
        before = np.frombuffer(raw, "<i8", writes, at)
        after = np.frombuffer(raw, "<i8", writes, at + 8 * writes)
        at += 16 * writes
        deadline = first_ns + np.arange(writes, dtype=np.int64) * gap_ns * per_write
        sent = min(tokens, writes * per_write)
        requests.append(
            TrueRequest(
                request_id=request_id,
                serial=serial,
                state=_STATES[state],
                read_ns=read_ns,
                sent_ns=np.repeat(before, per_write)[:sent],
                after_ns=np.repeat(after, per_write)[:sent],
                late_ns=np.repeat(np.maximum(before - deadline, 0), per_write)[:sent],
                tokens_planned=tokens,
            )
        )
    return TruthLog(requests, (int(head[3]) + int(head[4])) // 2, int(head[4]) - int(head[3]))


class TruthServer:
    """A context: the server listens inside it, on its own core; afterwards ``log`` is complete."""

    def __init__(self, schedule: Schedule, work: Path, placement: Placement, model: str = "bench") -> None:
        self.schedule = schedule
        self.log_path = work / "truth.bin"
        self._placement = placement
        self._model = model

    def __enter__(self) -> Self:
        flags = [*self.schedule.flags(), f"--log={self.log_path}", f"--model={self._model}"]
        argv = self._placement.server_argv([str(program("truth_server")), *flags])
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline().split()
        if len(line) != 2 or line[0] != "READY":
            raise RuntimeError(f"the truth server did not start: {' '.join(argv)}")
        self.port = int(line[1])
        self.pid = self._process.pid
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.communicate()
        if kind is None and self._process.returncode != 0:
            raise RuntimeError(f"the truth server ended with exit code {self._process.returncode}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stats(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/stats", timeout=5) as answer:
            stats: dict[str, Any] = json.load(answer)
        return stats

    def log(self) -> TruthLog:
        return read_log(self.log_path)
