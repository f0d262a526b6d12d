"""How NVIDIA's numbers become ours: fractions for percent, joules for millijoules, words for bits."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

MIB: Final = 1 << 20
KIB: Final = 1 << 10

THROTTLE_REASONS: Final = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}


def throttle_reasons(bits: int) -> list[str]:
    """An unknown bit is named by its value."""
    return [THROTTLE_REASONS.get(1 << place, f"0x{1 << place:x}") for place in range(64) if bits >> place & 1]


def fraction(percent: float | None) -> float | None:
    """None also for what is no number, as GPM says of a span without a clock cycle."""
    return None if percent is None or not math.isfinite(percent) else percent / 100


def utilization_between(
    row_times_ns: Sequence[int], samples: Sequence[tuple[int, float]], previous_ns: int
) -> list[float | None]:
    """For each row the mean of the samples since the row before; where none came, the last one before; None before the
    first. All times are on one axis, in order; the row before the first was at ``previous_ns``.
    """
    times = [at for at, _ in samples]
    found: list[float | None] = []
    first = bisect_right(times, previous_ns)
    for row_ns in row_times_ns:
        end = bisect_right(times, row_ns)
        if end > first:
            found.append(sum(value for _, value in samples[first:end]) / (end - first))
        else:
            found.append(samples[end - 1][1] if end else None)
        first = end
    return found


class Rate:
    """Per second, of a counter that is read now and then; None at first and where it went back."""

    def __init__(self) -> None:
        self._before: tuple[int, int] | None = None

    def of(self, count: int, monotonic_ns: int) -> float | None:
        before, self._before = self._before, (count, monotonic_ns)
        if before is None or count < before[0] or monotonic_ns <= before[1]:
            return None
        return (count - before[0]) * 1e9 / (monotonic_ns - before[1])
