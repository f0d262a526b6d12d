"""Whether a stage of constant load was in a steady state, and whether it was more than the server could take.

The trend of a series is the slope of its least-squares line, set against the slope's standard error by Newey & West
(Econometrica 1987) with two lags over 20 batch means, which sees that a queue's length hangs on its length before. With
so few batches that error comes out too small (Kiefer & Vogelsang, Econometric Theory 2005), so the limit is not the
normal distribution's 1.96 but 4.5. For servers of 1 to 20 places at 50 to 80 % load about one stage in a hundred
exceeds it by chance, while at 120 % load all do: a queue that grows has a slope far beyond. A trend that matters moves
the series by more than a tenth of its mean from the first batch to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BATCHES: Final = 20
LAGS: Final = 2
LIMIT: Final = 4.5
RELEVANT_CHANGE: Final = 0.10
MIN_SAMPLES: Final = 5 * BATCHES
MAX_SERVICE_SHARE: Final = 1 / 3
"""A stage that lasts less than three times as long as its quickest requests (p10) is over before it is full: more come
than are finished, be it too much or not. Only a rising latency tells that requests wait for each other."""
OVERLOAD_SHARE: Final = 0.05
"""Of the arrivals: so many more than were finished mean that the load was too much."""


@dataclass(frozen=True, slots=True)
class Trend:
    """``change`` is what the fitted line gains over the stage; ``statistic`` its slope in standard errors."""

    mean: float
    change: float
    statistic: float

    @property
    def matters(self) -> bool:
        return abs(self.statistic) > LIMIT and abs(self.change) > RELEVANT_CHANGE * abs(self.mean)

    def as_json(self) -> dict[str, Any]:
        return {
            "mean": self.mean,
            "change": self.change,
            "statistic": float(np.clip(self.statistic, -1e6, 1e6)),
            "matters": self.matters,
        }


def trend(batch_means: Sequence[float] | Floats) -> Trend:
    """Of a series in order of time, as its batch means."""
    values = np.asarray(batch_means, dtype=np.float64)
    n = len(values)
    time = np.arange(n) - (n - 1) / 2
    slope = float(time @ (values - values.mean()) / (time @ time))
    scores = time * (values - values.mean() - slope * time)
    variance = float(scores @ scores)
    for lag in range(1, LAGS + 1):
        variance += 2 * (1 - lag / (LAGS + 1)) * float(scores[lag:] @ scores[:-lag])
    error = np.sqrt(max(variance, 0.0) * n / (n - 2)) / (time @ time)
    # What rounding leaves of the residuals of a straight line is no noise.
    error = max(float(error), 1e-9 * abs(float(values.mean())) / n)
    return Trend(float(values.mean()), slope * (n - 1), slope / error if error else 0.0)


def batch_means(values: Floats) -> Floats:
    """Of values in order of time, in batches of equal size up to one."""
    return np.asarray([part.mean() for part in np.array_split(values, BATCHES)])


class Occupancy:
    """How many of some intervals are open at a time: requests in flight, or arrivals not yet answered."""

    def __init__(self, starts: Floats, ends: Floats) -> None:
        self._starts, self._ends = np.sort(starts), np.sort(ends)
        self._starts_sum = np.concatenate(([0.0], np.cumsum(self._starts)))
        self._ends_sum = np.concatenate(([0.0], np.cumsum(self._ends)))

    def at(self, times: Floats) -> npt.NDArray[np.int64]:
        """An interval is half open: at its end it is over."""
        begun = np.searchsorted(self._starts, times, side="right")
        return begun - np.searchsorted(self._ends, times, side="right")

    def means(self, edges: Floats) -> Floats:
        """Between each two successive edges."""
        begun = np.searchsorted(self._starts, edges, side="right")
        over = np.searchsorted(self._ends, edges, side="right")
        area = begun * edges - self._starts_sum[begun] - (over * edges - self._ends_sum[over])
        return np.maximum(np.diff(area) / np.diff(edges), 0.0)

    def most(self, start: float, end: float) -> int:
        """The largest number from ``start`` until before ``end``; it is reached at ``start`` or where one begins."""
        inside = self._starts[np.searchsorted(self._starts, start) : np.searchsorted(self._starts, end)]
        return int(self.at(np.concatenate(([start], inside))).max())


@dataclass(frozen=True, slots=True)
class SteadyState:
    """None: the stage is too short, or has too few requests, to tell. ``overload`` says in words why it is one."""

    steady: bool | None
    overloaded: bool | None
    overload: str | None
    in_system: Trend | None
    latency: Trend | None


UNKNOWN: Final = SteadyState(None, None, None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A stage of constant load, on any axis of seconds. An arrival counts from when it was due, else sent."""

    start_s: float
    length_s: float
    in_system: Occupancy
    """Arrivals that are not over, from when they were due."""
    in_flight: Occupancy
    """Of them, those that were sent."""
    times_in_system_s: Floats
    """Of the stage's requests, whatever became of them."""
    latencies_s: Floats
    """Time to the first token (or to the end, where there is no stream) of its ok requests, by when they were due."""
    open_loop: bool
    arrivals: int
    """Those that were dropped or lost included."""
    dropped: int
    refused: int
    """Requests answered with 429 or 503."""


def assess(hold: Hold) -> SteadyState:
    if min(len(hold.times_in_system_s), hold.arrivals) < MIN_SAMPLES:
        return UNKNOWN
    latency = trend(batch_means(hold.latencies_s)) if len(hold.latencies_s) >= MIN_SAMPLES else None
    short = np.quantile(hold.times_in_system_s, 0.1) > MAX_SERVICE_SHARE * hold.length_s
    if short and not (latency is not None and latency.matters and latency.change > 0):
        return UNKNOWN
    in_system = trend(hold.in_system.means(hold.start_s + np.linspace(0.0, hold.length_s, BATCHES + 1)))
    overload = _overload(hold, in_system) if hold.open_loop else None
    return SteadyState(
        steady=not (in_system.matters or (latency is not None and latency.matters)),
        overloaded=overload is not None if hold.open_loop else None,
        overload=overload,
        in_system=in_system,
        latency=latency,
    )


def _overload(hold: Hold, in_system: Trend) -> str | None:
    """Also in the second half more must have come than was finished: a stage that only fills up is not overloaded."""
    moments = hold.start_s + np.array([0.0, hold.length_s / 2, hold.length_s])
    start, middle, end = hold.in_system.at(moments).tolist()
    growth, later = (end - start) / hold.arrivals, (end - middle) / (hold.arrivals / 2)
    if in_system.matters and min(growth, later) > OVERLOAD_SHARE:
        sent_start, _, sent_end = hold.in_flight.at(moments).tolist()
        waiting = (end - sent_end) - (start - sent_start)
        where = ", most of them waiting for a free slot (-u)" if waiting > (end - start) / 2 else ""
        return (
            f"{end - start:,} more arrived than were finished ({growth * 100:.0f} % of {hold.arrivals:,}){where}: "
            f"in flight or waiting rose from {start:,} to {end:,}"
        )
    if hold.dropped > OVERLOAD_SHARE * hold.arrivals:
        return f"{hold.dropped:,} of {hold.arrivals:,} arrivals were dropped, since every slot was busy (-u)"
    if hold.refused > OVERLOAD_SHARE * hold.arrivals:
        return f"the server refused {hold.refused:,} of {hold.arrivals:,} requests (429 or 503)"
    return None
