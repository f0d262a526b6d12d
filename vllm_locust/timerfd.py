"""A Linux timer that an event loop can watch: event loops' own timers round to a millisecond, this one does not."""

from __future__ import annotations

import ctypes
import os

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_NS_PER_S = 1_000_000_000


class _TimeSpec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("it_interval", _TimeSpec), ("it_value", _TimeSpec))


class TimerFd:
    """``fd`` becomes readable when the time for which it was armed has come, and stays so until it is armed again."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._spec = _TimerSpec()
        self._spec_reference = ctypes.byref(self._spec)
        self.fd: int = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def arm(self, when_ns: int | None) -> None:
        """Expire at this time of ``clock.monotonic_ns``, at once where it has passed, never for None.

        Arming again also clears an expiry that was not read, so none is ever read.
        """
        value = self._spec.it_value
        value.tv_sec, value.tv_nsec = (0, 0) if when_ns is None else divmod(max(when_ns, 1), _NS_PER_S)
        self._libc.timerfd_settime(self.fd, _TFD_TIMER_ABSTIME, self._spec_reference, None)

    def close(self) -> None:
        os.close(self.fd)
