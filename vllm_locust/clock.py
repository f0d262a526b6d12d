"""The only module that reads time.

Durations are differences of ``monotonic_ns``. ``unix_ns`` places them on the wall clock for people and for other hosts.
The kernel stamps received bytes with CLOCK_REALTIME, so a stamp is brought to the monotonic axis with
``unix_minus_monotonic_ns``, sampled in the same poll round.

Tests bend the clocks of one process with ``VLLM_LOCUST_TEST_CLOCK``, for example ``offset=5s``, ``step=2s@10s`` (a
step of 2 s, 10 s after the start), ``step=2s@/tmp/now`` (when that file appears) or ``drift=100ppm``, joined by commas.
The wall clock and the kernel's stamps are bent together, as they are when an operator sets the clock; the monotonic
clock never is.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable

monotonic_ns = time.monotonic_ns
sleep = time.sleep
process_cpu_ns = time.process_time_ns

_UNITS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_STARTED_NS = monotonic_ns()
_LOOK_NS = 10_000_000


def _duration(text: str) -> int:
    match = re.fullmatch(r"(-?[0-9.]+)(ns|us|ms|s)", text)
    if match is None:
        raise ValueError(f"VLLM_LOCUST_TEST_CLOCK: {text!r} is not a duration such as 5s or -20ms")
    return round(float(match[1]) * _UNITS[match[2]])


class BentClock:
    """A wall clock with an offset, one step and a drift: ``shift_ns(t)`` is what it adds at monotonic time ``t``."""

    def __init__(self, spec: str, started_ns: int) -> None:
        self._started_ns = started_ns
        self._offset_ns = self._step_ns = self._step_at_ns = 0
        self._drift = 0.0
        self._sign: str | None = None
        """The file for which the step waits."""
        self._looked_ns = started_ns
        for part in filter(None, spec.split(",")):
            key, _, value = part.partition("=")
            if key == "offset":
                self._offset_ns = _duration(value)
            elif key == "step":
                size, _, at = value.partition("@")
                self._step_ns = _duration(size)
                self._step_at_ns, self._sign = (0, at) if at.startswith("/") else (_duration(at), None)
            elif key == "drift" and value.endswith("ppm"):
                self._drift = float(value[:-3]) * 1e-6
            else:
                raise ValueError(f"VLLM_LOCUST_TEST_CLOCK: {part!r} is not offset=…, step=…@… or drift=…ppm")

    def shift_ns(self, now_ns: int) -> int:
        elapsed = now_ns - self._started_ns
        if self._sign is not None:
            self._look_for_sign()
        stepped = self._step_ns if self._sign is None and elapsed >= self._step_at_ns else 0
        return self._offset_ns + stepped + round(elapsed * self._drift)

    def _look_for_sign(self) -> None:
        now_ns = monotonic_ns()
        if now_ns - self._looked_ns < _LOOK_NS:
            return
        self._looked_ns = now_ns
        if os.path.exists(str(self._sign)):
            self._step_at_ns, self._sign = now_ns - self._started_ns, None


_BENT = BentClock(spec, _STARTED_NS) if (spec := os.environ.get("VLLM_LOCUST_TEST_CLOCK")) else None


def unix_ns() -> int:
    """Nanoseconds since 1970 on this host's wall clock."""
    return time.time_ns() + (0 if _BENT is None else _BENT.shift_ns(monotonic_ns()))


def utc_stamp(unix_ns: int) -> str:
    """A wall-clock time as ``20261130-194046``, in UTC."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(unix_ns // 1_000_000_000))


def unix_minus_monotonic_ns() -> int:
    """The wall clock's distance from the monotonic one, to about 100 ns.

    Reads wall, monotonic, wall: the middle of the walls cancels the cost of the reads. A sample during which the
    process lost its core is taken again.
    """
    for _ in range(5):
        before = time.time_ns()
        now = monotonic_ns()
        after = time.time_ns()
        if 0 <= after - before < 20_000:
            break
    return ((before + after) >> 1) - now + (0 if _BENT is None else _BENT.shift_ns(now))


def _bend_stamp(stamp_unix_ns: int) -> int:
    assert _BENT is not None
    true_distance_ns = time.time_ns() - monotonic_ns()
    return stamp_unix_ns + _BENT.shift_ns(stamp_unix_ns - true_distance_ns)


class WallAxis:
    """This process's wall clock as it was at one moment, running on at the monotonic clock's pace.

    Whatever is placed with it lies on one straight axis, though the wall clock be set or slewed meanwhile. How far the
    axis is from other hosts' clocks is measured apart, against ``offset_ns``.
    """

    def __init__(self) -> None:
        self.offset_ns = unix_minus_monotonic_ns()
        """Add it to a monotonic time."""

    def unix_ns(self) -> int:
        return monotonic_ns() + self.offset_ns

    def moved_ns(self) -> int:
        """How far the wall clock has been set or slewed away from the axis."""
        return unix_minus_monotonic_ns() - self.offset_ns


bend_stamp: Callable[[int], int] | None = None if _BENT is None else _bend_stamp
"""Applied to the kernel's CLOCK_REALTIME stamps where a test bends the wall clock; None otherwise."""
