"""A worker's own condition, once a second: what could have moved the times that it reports."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable

import gevent
import numpy as np

from vllm_locust import clock
from vllm_locust.clock import WallAxis
from vllm_locust.load.transport import ReceiveLag
from vllm_locust.record import HealthSample

TICK_NS = 100_000_000
TICKS_PER_SAMPLE = 10


class GcPauses:
    """Total time spent in the garbage collector."""

    def __init__(self) -> None:
        self.total_ns = 0
        self._started_ns = 0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._started_ns = clock.monotonic_ns()
        else:
            self.total_ns += clock.monotonic_ns() - self._started_ns

    def close(self) -> None:
        gc.callbacks.remove(self._note)


class HealthSampler:
    """A greenlet that ticks ten times a second on fixed deadlines: how late a tick comes is the loop lag."""

    def __init__(
        self,
        worker_id: str,
        receive_lag: ReceiveLag,
        in_flight: Callable[[], int],
        schedule_lag_max_ns: Callable[[], int | None],
        spooled_batches: Callable[[], int],
        emit: Callable[[HealthSample], None],
        axis: WallAxis,
    ) -> None:
        self._axis = axis
        self._worker_id = worker_id
        self._host = socket.gethostname()
        self._receive_lag = receive_lag
        self._in_flight = in_flight
        self._schedule_lag_max_ns = schedule_lag_max_ns
        self._spooled_batches = spooled_batches
        self._emit = emit
        self._gc = GcPauses()
        self._greenlet = gevent.spawn(self._run)

    def close(self) -> None:
        self._greenlet.kill()
        self._gc.close()

    def _run(self) -> None:
        deadline_ns = clock.monotonic_ns()
        cpu_ns, gc_ns, delay_ns = clock.process_cpu_ns(), self._gc.total_ns, run_delay_ns()
        sampled_ns = deadline_ns
        while True:
            loop_lag_ns = 0
            for _ in range(TICKS_PER_SAMPLE):
                deadline_ns += TICK_NS
                gevent.sleep(max(0, deadline_ns - clock.monotonic_ns()) / 1e9)
                loop_lag_ns = max(loop_lag_ns, clock.monotonic_ns() - deadline_ns)
            now_ns = clock.monotonic_ns()
            deadline_ns = max(deadline_ns, now_ns - TICK_NS)
            new_cpu_ns, new_gc_ns, new_delay_ns = clock.process_cpu_ns(), self._gc.total_ns, run_delay_ns()
            lags_ns = self._receive_lag.take()
            self._emit(
                HealthSample(
                    time_unix_ns=self._axis.unix_ns(),
                    host=self._host,
                    worker_id=self._worker_id,
                    in_flight=self._in_flight(),
                    cpu_fraction=(new_cpu_ns - cpu_ns) / max(1, now_ns - sampled_ns),
                    run_delay_ns=None if new_delay_ns is None or delay_ns is None else new_delay_ns - delay_ns,
                    loop_lag_ns=loop_lag_ns,
                    receive_lag_p99_ns=int(np.percentile(lags_ns, 99, method="inverted_cdf")) if lags_ns else None,
                    receive_lag_max_ns=max(lags_ns, default=None),
                    schedule_lag_max_ns=self._schedule_lag_max_ns(),
                    gc_pause_ns=new_gc_ns - gc_ns,
                    open_fds=open_fds(),
                    rss_bytes=rss_bytes(),
                    spooled_batches=self._spooled_batches(),
                )
            )
            cpu_ns, gc_ns, delay_ns, sampled_ns = new_cpu_ns, new_gc_ns, new_delay_ns, now_ns


def run_delay_ns() -> int | None:
    """Time that this process's main thread was ready to run and had no core, since its start; None where not told."""
    try:
        with open("/proc/self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        return None


def open_fds() -> int | None:
    """None where it cannot be told: when descriptors have run out, for one, since looking takes one."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return None


def rss_bytes() -> int | None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
