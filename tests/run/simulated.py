"""The simulated server and Locust as processes, for tests of whole runs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from vllm_locust.arrival import Schedule

ROOT = Path(__file__).parents[2]
CHAT = str(ROOT / "locustfiles" / "chat.py")
OPEN_LOOP = str(ROOT / "locustfiles" / "open_loop.py")
TRACE_REPLAY = str(ROOT / "locustfiles" / "trace_replay.py")
FAST = ("--first-token-ms", "5", "--token-interval-ms", "4")
"""A server without a queue, so that a run of a few seconds has hundreds of requests."""


@dataclass(frozen=True)
class SimServer:
    url: str
    truth_log: Path
    process: subprocess.Popen[str]

    def truth(self) -> list[dict[str, Any]]:
        """What was really sent, of every request that has ended."""
        return [json.loads(line) for line in self.truth_log.read_text(encoding="utf-8").splitlines()]

    def stop(self) -> None:
        _stop(self.process)


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        process.wait(timeout=20)


@contextmanager
def simserver(directory: Path, *flags: str, on: Sequence[str] = (), **environment: str) -> Iterator[SimServer]:
    """``on`` stands before the command: where it is to run."""
    truth_log = directory / "truth.jsonl"
    truth_log.touch()
    command = [*on, sys.executable, "-m", "vllm_locust", "simserver", "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--truth-log", str(truth_log), *flags],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
        cwd=directory,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("READY "), line
        yield SimServer(line.split()[1].removesuffix("/v1"), truth_log, process)
    finally:
        _stop(process)
        process.stdout.close()


@dataclass
class LocustRun:
    """A finished run of Locust: what it printed and what it wrote."""

    exit_code: int
    output: str
    run_dir: Path
    workers: list[LocustRun] = field(default_factory=list)

    @property
    def worker_outputs(self) -> list[str]:
        return [worker.output for worker in self.workers]

    def json(self, name: str) -> Any:
        text = (self.run_dir / name).read_text(encoding="utf-8")
        return json.loads(text, parse_constant=_refuse)

    @property
    def summary(self) -> Any:
        return self.json("summary.json")

    def requests(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = pq.read_table(self.run_dir / "requests.parquet").to_pylist()
        return rows


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is not strict JSON")


def environment(**extra: str) -> dict[str, str]:
    """Without what the developer's own shell may have set, and without a process for the server's metrics, which only
    costs time where a test does not look at them.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_LOCUST_", "LOCUST_", "OPENAI_"))}
    return kept | {"VLLM_LOCUST_METRICS_URL": "none"} | extra


def processes(count: int) -> tuple[str, ...]:
    """Flags for ``--processes`` with a port of their own, so that two runs on one machine do not meet."""
    port = str(free_port())
    return (
        "--processes",
        str(count),
        "--master-bind-host",
        "127.0.0.1",
        "--master-bind-port",
        port,
        "--master-port",
        port,
    )


def start_locust(
    directory: Path, url: str | None, *flags: str, locustfile: str = CHAT, on: Sequence[str] = (), **extra: str
) -> subprocess.Popen[str]:
    host = [] if url is None else ["--host", url]
    return subprocess.Popen(
        [*on, sys.executable, "-m", "locust", "-f", locustfile, *host, *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=directory,
        env=environment(**extra),
        start_new_session=True,
    )


def end_of(process: subprocess.Popen[str], directory: Path, timeout_s: float = 90) -> LocustRun:
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"Locust did not end within {timeout_s} s:\n{output}") from None
    return LocustRun(process.returncode, output, directory / "run")


def run_locust(directory: Path, url: str | None, *flags: str, locustfile: str = CHAT, **extra: str) -> LocustRun:
    """A headless run to its end, its results in ``directory/run``."""
    common = ("--headless", "--only-summary", "--run-dir", "run")
    return end_of(start_locust(directory, url, *common, *flags, locustfile=locustfile, **extra), directory)


class Distributed:
    """A master, and workers that are started and killed one by one."""

    def __init__(self, directory: Path, url: str, workers: int, *flags: str, locustfile: str = OPEN_LOOP) -> None:
        self._locustfile = locustfile
        self._directory = directory
        self._port = str(free_port())
        bind = ("--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", self._port)
        common = ("--headless", "--only-summary", "--run-dir", "run", "--expect-workers", str(workers))
        self.master = start_locust(directory, url, *bind, *common, *flags, locustfile=self._locustfile)
        self.workers: list[subprocess.Popen[str]] = []
        for _ in range(workers):
            self.add_worker()

    def add_worker(self) -> None:
        flags = ("--worker", "--master-host", "127.0.0.1", "--master-port", self._port)
        self.workers.append(start_locust(self._directory, None, *flags, locustfile=self._locustfile))

    def end(self) -> LocustRun:
        """The run, when the master and every worker have ended."""
        try:
            run = end_of(self.master, self._directory)
            run.workers = [end_of(worker, self._directory, 20) for worker in self.workers]
        finally:
            for process in (self.master, *self.workers):
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
        return run


def run_distributed(
    directory: Path, url: str, workers: int, flags: Sequence[str], *, locustfile: str = CHAT
) -> LocustRun:
    """A headless run with a master and worker processes of their own, as on many hosts."""
    run = Distributed(directory, url, workers, *flags, locustfile=locustfile).end()
    assert (run.run_dir / "summary.json").exists(), run.output
    assert [one.exit_code for one in run.workers] == [0] * workers, run.worker_outputs
    return run


def planned_unix_ns(run: LocustRun) -> list[int]:
    """Recomputed from what run.json says of the schedule: when each arrival before the window's end was due."""
    described = run.json("run.json")
    plan, window = described["schedule"], described["window"]
    offsets_ns = Schedule.from_json(plan).offsets_ns(window["end_unix_ns"] - plan["t0_unix_ns"])
    return [plan["t0_unix_ns"] + int(offset_ns) for offset_ns in offsets_ns]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for_text(path: Path, minimum_lines: int, timeout_s: float = 30) -> None:
    """Until a log has so many lines: until so many requests have ended."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if path.exists() and path.read_bytes().count(b"\n") >= minimum_lines:
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} did not get {minimum_lines} lines within {timeout_s} s")


def wait_for_web(web: str, load: subprocess.Popen[str]) -> None:
    for _ in range(200):
        assert load.poll() is None
        try:
            get(web)
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
        else:
            return
    raise AssertionError("the web UI did not come up")


def get(url: str, data: bytes | None = None, timeout_s: float = 60) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=timeout_s) as answer:
        body: bytes = answer.read()
        return body
