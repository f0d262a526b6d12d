"""Real servers for the store's tests: Valkey, or a Redis that is named, on a unix socket. A test may kill, empty and
start it again.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from vllm_locust import clock
from vllm_locust.errors import StoreError
from vllm_locust.outcome import Outcome
from vllm_locust.record import HealthSample, RequestRecord
from vllm_locust.store.embedded import server_binary
from vllm_locust.store.redis_store import RunStore
from vllm_locust.store.redis_url import redis_options


class Server:
    """A Valkey that keeps its socket path over restarts and forgets its data."""

    def __init__(self, *options: str, binary: Path | str | None = None) -> None:
        self._binary = binary or server_binary()
        self._dir = Path(tempfile.mkdtemp(prefix="vl-test-"))
        self._socket = self._dir / "s"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"
        self.start()

    def start(self) -> None:
        arguments = ["--port", "0", "--unixsocket", str(self._socket), "--dir", str(self._dir), "--save", ""]
        self._process = subprocess.Popen(
            [self._binary, *arguments, *self._options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(self._answers)

    def _answers(self) -> bool:
        """Its socket is there a moment before it listens on it."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            return connection.connect_ex(str(self._socket)) == 0

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._socket.unlink(missing_ok=True)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._dir)

    def store(self, run_id: str) -> RunStore:
        return RunStore(redis_options(self.url, timeout_s=1.0), run_id)

    def command(self, *command: object) -> object:
        store = self.store("command")
        try:
            return self.command_as(store, *command)
        finally:
            store.close()

    @staticmethod
    def command_as(store: RunStore, *command: object) -> object:
        return store._do("obey", *command)


def wait_until(condition: object, timeout_s: float = 10.0) -> None:
    assert callable(condition)
    deadline_ns = clock.monotonic_ns() + round(timeout_s * 1e9)
    while True:
        try:
            if condition():
                return
        except StoreError:
            pass
        assert clock.monotonic_ns() < deadline_ns, "waited in vain"
        clock.sleep(0.01)


def in_s(seconds: float) -> int:
    return clock.monotonic_ns() + round(seconds * 1e9)


def request(number: int, worker_id: str = "w1", chunks: int = 3) -> RequestRecord:
    return RequestRecord(
        request_id=f"{worker_id}/{number}",
        worker_id=worker_id,
        host="host",
        user_id=number,
        target="http://127.0.0.1:8000",
        task="chat",
        transport="kernel",
        streamed=True,
        sent_unix_ns=1_700_000_000_000_000_000 + number,
        outcome=Outcome.OK,
        chunk_ns=[10_000_000 * (index + 1) + (number * 7919 + index * 104_729) % 999_983 for index in range(chunks)],
        chunk_tokens=[1] * chunks,
    )


def health(number: int, worker_id: str = "w1") -> HealthSample:
    return HealthSample(
        time_unix_ns=number,
        host="host",
        worker_id=worker_id,
        in_flight=number,
        cpu_fraction=0.25,
        run_delay_ns=None,
        loop_lag_ns=1,
        receive_lag_p99_ns=None,
        receive_lag_max_ns=None,
        schedule_lag_max_ns=None,
        gc_pause_ns=0,
        open_fds=9,
        rss_bytes=1,
        spooled_batches=0,
    )
