"""What a comparison looks at of one stage of one run: sequences over its requests, or over its time, in order.

All sequences keep one place for each request (or stretch of time), so that neighbours stay neighbours: what they have
in common is what makes n requests say less than n independent ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Owners = npt.NDArray[np.int64] | npt.NDArray[np.int32]


class Samples:
    """Values of a distribution, and which request each belongs to: one for each request, or the gaps of its stream.

    ``owners[i]`` is the place of the request that ``values[i]`` is of; ``weights[i]`` how many equal samples it stands
    for, one without ``weights``. A failed request has infinity. A request may have no value.
    """

    def __init__(self, values: Floats, owners: Owners, requests: int, weights: Floats | None = None) -> None:
        order = np.argsort(values, kind="stable")
        self.requests = requests
        self.values = values[order]
        self.owners = owners[order]
        self.weights = None if weights is None else weights[order]
        self.per_request = _counts(self.owners, self.weights, requests)
        self._cumulative = None if self.weights is None else np.concatenate(([0.0], np.cumsum(self.weights)))

    @classmethod
    def one_each(cls, values: Floats) -> Samples:
        """NaN where a request has no value."""
        places = np.flatnonzero(~np.isnan(values))
        return cls(values[places], places, len(values))

    @property
    def n(self) -> int:
        return len(self.values) if self._cumulative is None else round(float(self._cumulative[-1]))

    @property
    def owning(self) -> int:
        """Requests that have a value."""
        return int((self.per_request > 0).sum())

    def same_as(self, other: Samples) -> bool:
        if self is other:
            return True
        if (self.weights is None) != (other.weights is None) or not np.array_equal(self.values, other.values):
            return False
        return self.weights is None or other.weights is None or np.array_equal(self.weights, other.weights)

    def up_to(self, index: int) -> float:
        """Samples among the ``index`` smallest values."""
        return float(index if self._cumulative is None else self._cumulative[index])

    def beyond(self, index: int) -> Floats:
        """Of each request, the samples that are not among the ``index`` smallest values."""
        return _counts(self.owners[index:], None if self.weights is None else self.weights[index:], self.requests)

    @cached_property
    def totals(self) -> Totals:
        """For the mean. Failed requests have none."""
        known = int(np.searchsorted(self.values, np.inf, side="left"))
        owners, values = self.owners[:known], self.values[:known]
        weights = None if self.weights is None else self.weights[:known]
        sums = _counts(owners, values if weights is None else weights * values, self.requests)
        return Totals(sums, _counts(owners, weights, self.requests))


def _counts(owners: Owners, weights: Floats | None, requests: int) -> Floats:
    return np.bincount(owners, weights=weights, minlength=requests).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Totals:
    """A ratio of two sums over places in order: a mean, a share of requests, or a rate over stretches of time."""

    sums: Floats
    weights: Floats

    @property
    def ratio(self) -> float:
        return float(self.sums.sum() / self.weights.sum())

    @property
    def known(self) -> int:
        """Places that count."""
        return int((self.weights > 0).sum())


@dataclass(frozen=True, slots=True)
class StageSeries:
    """One stage of one run. Times in seconds. A metric or a ratio that does not apply is missing.

    ``arrivals`` are the numbers in the schedule of the requests, in their order; None in a closed loop.
    """

    samples: dict[str, Samples]
    totals: dict[str, Totals]
    arrivals: Ints | None
    over_time: frozenset[str] = frozenset()
    """Those of ``totals`` whose places are stretches of time and no requests."""
    completed: int = 0
    """Requests that ended well within the stage: what its rates come from."""
    length_s: float = 0.0
