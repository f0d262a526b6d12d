"""Counters of a server that starts anew now and then, as they would be had it never done so."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_locust.report.columns import Floats, Ints


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one metric of one engine, in order of time, on the common clock."""

    times_unix_ns: Ints
    values: Floats

    def between(self, start_unix_ns: int, end_unix_ns: int) -> Floats:
        first, last = np.searchsorted(self.times_unix_ns, [start_unix_ns, end_unix_ns], side="left")
        return self.values[first:last]

    def at(self, times_unix_ns: Ints) -> Floats:
        """The newest value at each time; before the first, the first."""
        place = np.searchsorted(self.times_unix_ns, times_unix_ns, side="right") - 1
        return self.values[np.maximum(place, 0)]


class Counter:
    """What a counter gained since it was first seen. After a start of its server it counts from 0 again: what it gained
    between the last look before and the end of the old server is not known and not counted.
    """

    def __init__(self, seen: Series, looks_unix_ns: Ints, restarts_unix_ns: Ints) -> None:
        """``looks_unix_ns``: when its page was read. A counter with a label need not be on it until it counts for the
        first time. ``restarts_unix_ns``: the first look after each start of the server.
        """
        times, values = seen.times_unix_ns, seen.values
        before = np.searchsorted(looks_unix_ns, times[0]) - 1
        if before >= 0:
            times, values = np.concatenate((looks_unix_ns[[before]], times)), np.concatenate(([0.0], values))
        restarted = np.diff(np.searchsorted(restarts_unix_ns, times, side="right")) > 0
        gains = np.where(restarted, values[1:], np.diff(values))
        self._first_ns = int(times[0])
        self._last_ns = int(times[-1])
        self._since_ns = (times - self._first_ns).astype(np.float64)
        self._gained = np.concatenate(([0.0], np.cumsum(gains)))

    def gain(self, start_unix_ns: int, end_unix_ns: int) -> tuple[float, float] | None:
        """What it gained between the two, on straight lines between the looks, and in how many seconds of that time it
        was watched. None: in none.
        """
        start = max(start_unix_ns, self._first_ns) - self._first_ns
        end = min(end_unix_ns, self._last_ns) - self._first_ns
        if end <= start:
            return None
        before, after = np.interp([start, end], self._since_ns, self._gained)
        return float(after - before), (end - start) / 1e9
