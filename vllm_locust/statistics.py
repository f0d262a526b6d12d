"""Percentiles by nearest rank, and the distance between two distributions.

A percentile here is always a value that was measured: the smallest one that at least the share q of all samples does
not exceed. Nothing is interpolated, except in ``linear_percentile``, which exists to say what other tools would have
printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

PERCENTILES: Final[Mapping[str, Fraction]] = MappingProxyType(
    {
        "p50": Fraction(1, 2),
        "p90": Fraction(9, 10),
        "p95": Fraction(19, 20),
        "p99": Fraction(99, 100),
        "p99_9": Fraction(999, 1000),
    }
)
"""The percentiles of every report, by their name in ``summary.json``. Fractions: 0.999 * 1000 is not 999 in floats."""

MIN_SAMPLES_BEYOND: Final = 10
"""A percentile with fewer expected samples beyond it is flagged: the size of its tail is then uncertain by more than a
third (relative standard error of a binomial count of 10: 1/sqrt(10) = 32 %). p99 needs 1,000 samples, p99.9 10,000;
MLPerf's early stopping asks for 662 at p99."""


def nearest_rank(n: int, q: Fraction) -> int:
    """The 1-based rank of percentile q among n sorted samples: ceil(q * n), in exact arithmetic."""
    if n < 1:
        raise ValueError("a percentile of no samples is not defined")
    return max(1, -(-n * q.numerator // q.denominator))


def percentile(sorted_values: npt.NDArray[Any], q: Fraction) -> float:
    return float(sorted_values[nearest_rank(len(sorted_values), q) - 1])


def weighted_percentile(values: npt.NDArray[Any], weights: npt.NDArray[np.int64], q: Fraction) -> float:
    """Nearest rank where ``values[i]`` stands for ``weights[i]`` equal samples."""
    order = np.argsort(values, kind="stable")
    cumulative = np.cumsum(weights[order])
    rank = nearest_rank(int(cumulative[-1]) if len(cumulative) else 0, q)
    return float(values[order[int(np.searchsorted(cumulative, rank, side="left"))]])


def linear_percentile(n: int, value_at_rank: Callable[[int], float], q: Fraction) -> float:
    """numpy's default percentile (linear interpolation between order statistics), as most other tools print it."""
    position = Fraction(n - 1) * q
    below = position.numerator // position.denominator
    low = value_at_rank(below + 1)
    share = float(position - below)
    return low if share == 0 else low + share * (value_at_rank(below + 2) - low)


def few_samples(n: int) -> list[str]:
    """Names of the percentiles that n samples are too few for: n * (1 - q) < 10."""
    return [name for name, q in PERCENTILES.items() if n * (1 - q) < MIN_SAMPLES_BEYOND]


def ks_distance(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """Kolmogorov-Smirnov distance: the largest difference of two empirical distribution functions, 0 (same) to 1."""
    first, second = np.sort(np.asarray(a, dtype=np.float64)), np.sort(np.asarray(b, dtype=np.float64))
    if not len(first) or not len(second):
        raise ValueError("the distance to a distribution without samples is not defined")
    points = np.concatenate((first, second))
    share_a = np.searchsorted(first, points, side="right") / len(first)
    share_b = np.searchsorted(second, points, side="right") / len(second)
    return float(np.max(np.abs(share_a - share_b)))
