"""Callbacks at monotonic times, to a few hundredths of a millisecond; the event loop's own timers round to one."""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import os
from collections.abc import Callable

from vllm_locust import clock

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_NS_PER_S = 1_000_000_000
_CALLS_PER_WAKE = 128
"""After that many the loop serves its sockets before it goes on."""


class _TimeSpec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("it_interval", _TimeSpec), ("it_value", _TimeSpec))


class DeadlineTimer:
    """A heap of deadlines behind one Linux timerfd. Equal deadlines are called in the order in which they were set."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._spec = _TimerSpec()
        self._spec_reference = ctypes.byref(self._spec)
        self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._set = 0
        self._armed_ns: int | None = None
        loop.add_reader(self._fd, self._fire)

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> None:
        self._set += 1
        heapq.heappush(self._heap, (when_ns, self._set, callback))
        if self._armed_ns is None or when_ns < self._armed_ns:
            self._arm(when_ns)

    def call_in(self, seconds: float, callback: Callable[[], None]) -> None:
        self.call_at(clock.monotonic_ns() + round(seconds * _NS_PER_S), callback)

    def close(self) -> None:
        self._heap.clear()
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _fire(self) -> None:
        heap = self._heap
        self._armed_ns = 0  # a callback that sets a deadline must not arm the timer: that is done below
        for _ in range(_CALLS_PER_WAKE):
            if not heap or heap[0][0] > clock.monotonic_ns():
                break
            heapq.heappop(heap)[2]()
        self._arm(heap[0][0] if heap else None)

    def _arm(self, when_ns: int | None) -> None:
        """Arming again also clears an expiry that was not read, so none is ever read."""
        self._armed_ns = when_ns
        value = self._spec.it_value
        value.tv_sec, value.tv_nsec = (0, 0) if when_ns is None else divmod(max(when_ns, 1), _NS_PER_S)
        self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, self._spec_reference, None)
