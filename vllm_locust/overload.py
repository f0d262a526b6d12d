"""Whether a load is more than the server can take, seen while it runs, so that a hopeless probe ends early.

At a constant rate the number in flight goes up and down about a mean. If more come than the server finishes, it grows.
Even at a load of exactly what the server can take, in flight does no more than walk at random: its growth, over the
root of the sum of its squared steps, is then about standard normal. The limits are far out, since there is a look every
second. A server that only fills up finishes more and more; one that is overloaded does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

MIN_LOOKS: Final = 15
LIMIT: Final = 4.0
LIMIT_WHERE_QUEUED: Final = 3.0
"""When the server itself has reported a queue all the time in the later half."""
MIN_GROWTH: Final = 0.05
"""Of the arrivals; a smaller excess does no harm within a probe."""
LATER_SHARE: Final = 0.3
"""Of the growth: what grows evenly has half of it in the later half."""
MIN_COMPLETED: Final = 10
"""And as many as were in flight at first: before that, nothing is known of how long requests take."""
FILLING: Final = 1.1
"""So many times the completions of the first half, beside their own scatter, mean that the server still fills up."""


@dataclass(frozen=True, slots=True)
class _Look:
    elapsed_s: float
    in_flight: int
    completed: int
    arrived: int
    waiting: int | None


class Overload:
    """For one probe at a constant rate; fed about once a second. ``in_flight`` includes requests that wait for a free
    slot, ``completed`` and ``arrived`` are counts since any moment.
    """

    def __init__(self) -> None:
        self._looks: list[_Look] = []
        self._squares = 0.0

    def feed(
        self, elapsed_s: float, in_flight: int, completed: int, arrived: int, waiting_on_server: int | None = None
    ) -> str | None:
        """Why the load is too much, or None as long as that is not clear."""
        if self._looks:
            self._squares += (in_flight - self._looks[-1].in_flight) ** 2
        self._looks.append(_Look(elapsed_s, in_flight, completed, arrived, waiting_on_server))
        steps = len(self._looks) - 1
        if steps < MIN_LOOKS:
            return None
        first, middle, last = self._looks[0], self._looks[steps // 2], self._looks[-1]
        growth, later = last.in_flight - first.in_flight, last.in_flight - middle.in_flight
        if growth <= MIN_GROWTH * (last.arrived - first.arrived) or later < LATER_SHARE * growth:
            return None
        if last.completed - first.completed < max(MIN_COMPLETED, first.in_flight):
            return None
        scatter = (self._squares - growth**2 / steps) * steps / (steps - 1)
        if growth**2 <= self._limit(middle) ** 2 * scatter or _fills(first, middle, last):
            return None
        return self._sentence(first, last)

    def _limit(self, middle: _Look) -> float:
        later = [look.waiting for look in self._looks if look.elapsed_s >= middle.elapsed_s]
        return LIMIT_WHERE_QUEUED if all(later) else LIMIT

    def _sentence(self, first: _Look, last: _Look) -> str:
        queue = "" if last.waiting is None else f", and {last.waiting:,} wait on the server"
        return (
            f"queue grows: in flight rose from {first.in_flight:,} to {last.in_flight:,} in "
            f"{last.elapsed_s - first.elapsed_s:.0f} s although the rate is constant{queue}"
        )


def _fills(first: _Look, middle: _Look, last: _Look) -> bool:
    early, late = middle.completed - first.completed, last.completed - middle.completed
    evenly = early * (last.elapsed_s - middle.elapsed_s) / (middle.elapsed_s - first.elapsed_s)
    return late > FILLING * evenly + 2 * math.sqrt(evenly + 1)
