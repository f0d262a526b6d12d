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


class Samples:
    """Values of a distribution, and which request each belongs to: one for each request, or the gaps of its stream.

    ``owners[i]`` is the place of the request that ``values[i]`` is of; ``weights[i]`` how many equal samples it stands
    for. A failed request has infinity. A request may have no value.
    """

    def __init__(self, values: Floats, owners: Ints, requests: int, weights: Floats | None = None) -> None:
        order = np.argsort(values, kind="stable")
        self.requests = requests
        self.values = values[order]
        self.owners = owners[order]
        self.weights = np.ones(len(values)) if weights is None else weights[order]
        self.per_request = _counts(self.owners, self.weights, requests)
        self._cumulative = np.concatenate(([0.0], np.cumsum(self.weights)))

    @classmethod
    def one_each(cls, values: Floats) -> Samples:
        """NaN where a request has no value."""
        places = np.flatnonzero(~np.isnan(values))
        return cls(values[places], places, len(values))

    @property
    def n(self) -> int:
        return round(float(self._cumulative[-1]))

    @property
    def owning(self) -> int:
        """Requests that have a value."""
        return int((self.per_request > 0).sum())

    def same_as(self, other: Samples) -> bool:
        return np.array_equal(self.values, other.values) and np.array_equal(self.weights, other.weights)

    def up_to(self, index: int) -> float:
        """Samples among the ``index`` smallest values."""
        return float(self._cumulative[index])

    def beyond(self, index: int) -> Floats:
        """Of each request, the samples that are not among the ``index`` smallest values."""
        return _counts(self.owners[index:], self.weights[index:], self.requests)

    @cached_property
    def totals(self) -> Totals:
        """For the mean. Failed requests have none."""
        known = np.isfinite(self.values)
        owners, weights = self.owners[known], self.weights[known]
        return Totals(
            _counts(owners, weights * self.values[known], self.requests), _counts(owners, weights, self.requests)
        )


def _counts(owners: Ints, weights: Floats, requests: int) -> Floats:
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
