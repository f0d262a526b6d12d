"""The recorder as its parent sees it: started, watched, started again when it dies, and told to finish."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable
from dataclasses import asdict, replace

from vllm_locust import clock
from vllm_locust.errors import StoreError
from vllm_locust.store.child_process import send_line, start_module
from vllm_locust.store.intake import RecorderReport
from vllm_locust.store.recorder import SECOND_NS, RecorderConfig
from vllm_locust.store.rundir import RunDirectory
from vllm_locust.store.shipper import start_thread

_MODULE = "vllm_locust.store.recorder"
_WATCH_S = 0.25
_WATCH_AT_MOST_S = 4.0
_RESTARTS_AT_MOST = 20
_GRACE_S = 10.0


class RecorderProcess:
    """Use ``start_recorder``."""

    def __init__(self, config: RecorderConfig, run_dir: RunDirectory) -> None:
        self._config = config
        self._run_dir = run_dir
        self._finishing = threading.Event()
        self._lock = threading.Lock()
        self.restarts = 0
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self) -> None:
        """Until ``finish``: start the recorder again whenever it has died. Its files tell it where it was."""
        while not self._finishing.wait(min(_WATCH_S * 2**self.restarts, _WATCH_AT_MOST_S)):
            self._revive()

    def finish(self, timeout_s: float) -> RecorderReport:
        """Drain the streams and end. Raises ``StoreError`` when no report comes; what is not drained is still in
        Redis.
        """
        self._finishing.set()
        deadline_ns = clock.monotonic_ns() + round(timeout_s * SECOND_NS)
        while True:
            left_s = max(0.0, (deadline_ns - clock.monotonic_ns()) / SECOND_NS)
            send_line(self._process, f"finish {left_s:.3f}")
            output = self._wait(left_s + _GRACE_S)
            if output:
                return replace(RecorderReport(**json.loads(output)), restarts=self.restarts)
            if not self._revive() or clock.monotonic_ns() >= deadline_ns:
                self.kill()
                raise StoreError(
                    f"the recorder of {self._run_dir.path} ended without a report (exit status "
                    f"{self._process.returncode}): see its messages above, then run vllm-locust merge"
                )

    def kill(self) -> None:
        self._finishing.set()
        self._process.kill()
        self._process.wait()
        self._close_pipes(self._process)

    def _start(self) -> subprocess.Popen[bytes]:
        return start_module(_MODULE, json.dumps(asdict(self._config) | {"run_dir": str(self._run_dir.path)}))

    def _revive(self) -> bool:
        with self._lock:
            if self._process.poll() is None or self.restarts >= _RESTARTS_AT_MOST:
                return False
            self._close_pipes(self._process)
            self.restarts += 1
            self._process = self._start()
            return True

    def _wait(self, timeout_s: float) -> bytes:
        """All that the recorder writes to its standard output, which is its report, or nothing."""
        try:
            output, _ = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return b""
        return output

    @staticmethod
    def _close_pipes(process: subprocess.Popen[bytes]) -> None:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()


def start_recorder(
    config: RecorderConfig,
    run_dir: RunDirectory,
    *,
    spawn: Callable[[Callable[[], None]], object] = start_thread,
) -> RecorderProcess:
    """Start the recorder and its watch, which in a gevent process is a greenlet, as threads are patched."""
    recorder = RecorderProcess(config, run_dir)
    spawn(recorder.watch)
    return recorder
