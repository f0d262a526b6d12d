"""A master, workers on two client hosts, a Redis and a simulated server, each on its host, and the books of both ends:
what the server has really seen against what the run has on record.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.faults.network import Network
from tests.run.simulated import (
    CHAT,
    LocustRun,
    SimServer,
    end_of,
    environment,
    simserver,
    start_locust,
    wait_for_text,
)

SERVER_PORT = 8000
STREAMS = ("--first-token-ms", "20", "--token-interval-ms", "20")
"""With 20 tokens an answer takes 400 ms."""
SHORT = ("--max-tokens", "20", "--force-length")
_COMMON = ("--headless", "--only-summary", "--run-dir", "run")


@contextmanager
def server_host(network: Network, directory: Path, *flags: str) -> Iterator[SimServer]:
    host = network["server"]
    listen = ("--host", "0.0.0.0", "--port", str(SERVER_PORT))
    with simserver(directory, *(flags or STREAMS), *listen, on=host.on()) as server:
        yield replace(server, url=f"http://{host.address}:{SERVER_PORT}")


class Cluster:
    """One run over many hosts. Each client host has a disk of its own, so that what a worker spools is not where the
    master is.
    """

    def __init__(self, network: Network, directory: Path, url: str, *flags: str, locustfile: str = CHAT) -> None:
        self.network = network
        self.directory = directory
        self._locustfile = locustfile
        bind = ("--master", "--expect-workers", "2")
        on = network["master"].on()
        self.master = start_locust(directory, url, *bind, *_COMMON, *flags, locustfile=locustfile, on=on)
        self.workers: dict[str, subprocess.Popen[str]] = {}

    def start_worker(self, name: str, *flags: str, **extra: str) -> None:
        """On the client host of that name."""
        host = self.network[name]
        on = host.on((self.disk(name), self.directory / "run"))
        to_master = ("--worker", "--master-host", self.network["master"].control_address)
        self.workers[name] = start_locust(
            self.directory, None, *to_master, *flags, locustfile=self._locustfile, on=on, **extra
        )

    def start_workers(self) -> None:
        for name in ("client1", "client2"):
            self.start_worker(name)

    def disk(self, name: str) -> Path:
        """What the host has in the place of the run directory."""
        return self.directory / f"disk-of-{name}"

    def end(self, timeout_s: float = 90) -> LocustRun:
        """Of the master; then every worker's must come too."""
        try:
            run = end_of(self.master, self.directory, timeout_s)
            run.workers = [end_of(worker, self.directory, 45) for worker in self.workers.values()]
        finally:
            self.kill_all()
        return run

    def kill_all(self) -> None:
        for process in (self.master, *self.workers.values()):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def merge(self, *arguments: str) -> LocustRun:
        """``vllm-locust merge`` on the master's host."""
        command = [*self.network["master"].on(), sys.executable, "-m", "vllm_locust", "merge", *arguments]
        told = subprocess.run(
            command,
            cwd=self.directory,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        return LocustRun(told.returncode, told.stdout + told.stderr, self.directory / "run")

    def recorder_pid(self) -> int:
        """Of the process beside the master that drains Redis."""
        for child in Path(f"/proc/{self.master.pid}/task/{self.master.pid}/children").read_text().split():
            if b"vllm_locust.store.recorder" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        raise AssertionError("the master has no recorder")


@contextmanager
def cluster(network: Network, directory: Path, url: str, *flags: str, locustfile: str = CHAT) -> Iterator[Cluster]:
    run = Cluster(network, directory, url, *flags, locustfile=locustfile)
    try:
        yield run
    finally:
        run.kill_all()


@dataclass(frozen=True)
class Books:
    """Both ends of a run, by request id."""

    truth: dict[str, dict[str, Any]]
    rows: dict[str, dict[str, Any]]

    @property
    def lost(self) -> set[str]:
        """Requests that the server has seen and the run has not on record."""
        return self.truth.keys() - self.rows.keys()


def books(run: LocustRun, server: SimServer) -> Books:
    """Raises where a request is on record twice, or was answered well without the server knowing of it."""
    server.stop()
    seen, rows = server.truth(), run.requests()
    twice = [name for name, times in Counter(row["request_id"] for row in rows).items() if times > 1]
    assert not twice, f"{len(twice)} requests are on record twice"
    truth = {row["request_id"]: row for row in seen}
    assert len(truth) == len(seen), "the server saw a request id twice"
    by_id = {row["request_id"]: row for row in rows}
    invented = [row for name, row in by_id.items() if name not in truth and row["outcome"] == "ok"]
    assert not invented, f"{len(invented)} requests that the server never saw are on record as ok"
    for name, row in by_id.items():
        if row["outcome"] == "ok":
            assert row["output_tokens"] == truth[name]["output_tokens"]
            assert len(row["chunk_ns"]) == len(truth[name]["chunk_before_ns"])
    assert len(rows) > 50, run.output
    return Books(truth, by_id)


def codes(run: LocustRun) -> set[str]:
    return {reason["code"] for reason in run.summary["verdict"]["reasons"]}


def chunk_errors_ms(books_: Books, names: set[str]) -> list[float]:
    """How far each chunk's recorded time is from when the server sent it; both are on this machine's clock."""
    errors = []
    for name in names:
        row, truth = books_.rows[name], books_.truth[name]
        distance_ns = truth["received_unix_ns"] - truth["received_mono_ns"] - row["sent_unix_ns"]
        pairs = zip(row["chunk_ns"], truth["chunk_before_ns"], strict=True)
        errors += [abs(at - before - distance_ns) / 1e6 for at, before in pairs]
    return errors


def wait_for_requests(server: SimServer, more: int, timeout_s: float = 60) -> None:
    """Until so many more requests have ended at the server."""
    wait_for_text(server.truth_log, len(server.truth()) + more, timeout_s)


def seconds_since(begin: float) -> float:
    return time.monotonic() - begin
