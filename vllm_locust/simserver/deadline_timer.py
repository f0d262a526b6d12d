"""Callbacks at monotonic times, to a few hundredths of a millisecond; the event loop's own timers round to one."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

from vllm_locust import clock
from vllm_locust.timerfd import TimerFd

_NS_PER_S = 1_000_000_000
_CALLS_PER_WAKE = 128
"""After that many the loop serves its sockets before it goes on."""


class DeadlineTimer:
    """A heap of deadlines behind one Linux timerfd. Equal deadlines are called in the order in which they were set."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer = TimerFd()
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._set = 0
        self._armed_ns: int | None = None
        loop.add_reader(self._timer.fd, self._fire)

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> None:
        self._set += 1
        heapq.heappush(self._heap, (when_ns, self._set, callback))
        if self._armed_ns is None or when_ns < self._armed_ns:
            self._arm(when_ns)

    def call_in(self, seconds: float, callback: Callable[[], None]) -> None:
        self.call_at(clock.monotonic_ns() + round(seconds * _NS_PER_S), callback)

    def close(self) -> None:
        self._heap.clear()
        self._loop.remove_reader(self._timer.fd)
        self._timer.close()

    def _fire(self) -> None:
        heap = self._heap
        self._armed_ns = 0  # a callback that sets a deadline must not arm the timer: that is done below
        for _ in range(_CALLS_PER_WAKE):
            if not heap or heap[0][0] > clock.monotonic_ns():
                break
            heapq.heappop(heap)[2]()
        self._arm(heap[0][0] if heap else None)

    def _arm(self, when_ns: int | None) -> None:
        self._armed_ns = when_ns
        self._timer.arm(when_ns)
