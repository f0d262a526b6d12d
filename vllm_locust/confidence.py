"""95 % confidence intervals for percentiles and shares of one run, whose successive requests are not independent.

Latencies of requests that share a queue come in clusters, so n requests say less than n independent ones. How much
less is estimated from the sequence itself: the long-run variance of "this sample lies beyond the percentile" by
overlapping batch means (Meketon & Schmeiser, WSC 1984), set against the variance that independent samples would have.
Batches are long (n^(2/3), in the range for which Flegal & Jones, Annals of Statistics 2010, show consistency), since
at 80 % load a queue remembers hundreds of requests; the few of them that there are then are paid for with Student's t
in the place of the normal distribution. The ratio divides n. With that effective n the interval is the classic one
between two order statistics (binomial; David & Nagaraja, Order Statistics, 7.1), which is Woodruff's interval (JASA
1952) for dependent data as in Heidelberger & Lewis (Operations Research 1984). It costs O(n) and needs no random
numbers.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

TAIL = 0.025
Z_95 = 1.959963984540054


def batch_size(n: int) -> int:
    """n^(2/3), but at most an eighth of all."""
    return max(1, min(n // 8, round(math.pow(n, 2 / 3))))


def long_run_variance(sequence: npt.NDArray[np.float64], size: int | None = None) -> float:
    """n times the variance of the sequence's mean, with its autocorrelation, by overlapping batch means of ``size``."""
    n = len(sequence)
    if n < 2:
        return 0.0
    size = batch_size(n) if size is None else size
    sums = np.concatenate(([0.0], np.cumsum(sequence - np.mean(sequence))))
    batch_means = (sums[size:] - sums[:-size]) / size
    return float(n * size * np.sum(batch_means**2) / ((n - size + 1) * (n - size)))


def variance_inflation(beyond: npt.NDArray[np.float64], samples: npt.NDArray[np.float64]) -> float:
    """How many dependent samples are worth one independent one, at least 1.

    ``samples[i]`` are the samples of request i, in the order in which the requests were sent, and ``beyond[i]`` those
    of them beyond the percentile: with one sample per request this is autocorrelation alone, with the gaps of a
    stream it is the likeness of gaps within one stream too.
    """
    total = float(np.sum(samples))
    if total == 0:
        return 1.0
    share = float(np.sum(beyond)) / total
    independent = share * (1 - share)
    if independent == 0:
        return 1.0
    n = len(samples)
    dependent = long_run_variance(beyond - share * samples) * n / total
    return max(1.0, dependent / independent * (_t_quantile(_degrees_of_freedom(n)) / Z_95) ** 2)


def _degrees_of_freedom(n: int) -> float:
    """Of the variance by overlapping batch means: half as many again as of batches that do not overlap."""
    return max(3.0, 1.5 * (n / batch_size(n) - 1))


def _t_quantile(degrees: float) -> float:
    """Student's t at 97.5 %, by the expansion in 1/degrees of Abramowitz & Stegun, 26.7.5."""
    z = Z_95
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def rank_interval(n: int, q: Fraction, inflation: float = 1.0) -> tuple[int | None, int | None]:
    """1-based ranks between which percentile q lies with 95 % confidence; None where n samples give no bound on that
    side.
    """
    effective = max(1, int(n / inflation))
    low, high = _binomial_ranks(effective, float(q))
    return (
        None if low == 0 else max(1, low * n // effective),
        None if high > effective else min(n, -(-high * n // effective)),
    )


def _binomial_ranks(n: int, q: float) -> tuple[int, int]:
    """The largest l with P(X < l) <= 2.5 % and the smallest u with P(X >= u) <= 2.5 %, for X ~ Binomial(n, q)."""
    reach = int(12 * math.sqrt(n * q * (1 - q))) + 12
    first, last = max(0, int(n * q) - reach), min(n, int(n * q) + reach)
    k = np.arange(first, last, dtype=np.float64)
    steps = np.log(n - k) - np.log(k + 1) + math.log(q) - math.log1p(-q)
    log_first = math.lgamma(n + 1) - math.lgamma(first + 1) - math.lgamma(n - first + 1)
    log_first += first * math.log(q) + (n - first) * math.log1p(-q)
    masses = np.exp(np.concatenate(([log_first], log_first + np.cumsum(steps))))
    cumulative = np.cumsum(masses)
    low = first + int(np.searchsorted(cumulative, TAIL, side="right"))
    high = first + int(np.searchsorted(cumulative, 1 - TAIL, side="left")) + 1
    return low, high


def proportion_ci95(yes: npt.NDArray[np.bool_]) -> tuple[float, float] | None:
    """Wilson's interval for a share, with the effective n of the sequence; ``yes`` in the order of sending."""
    n = len(yes)
    if n == 0:
        return None
    values = yes.astype(np.float64)
    effective = max(1.0, n / variance_inflation(values, np.ones(n)))
    share, z2 = float(np.mean(values)), Z_95**2
    centre = share + z2 / (2 * effective)
    spread = Z_95 * math.sqrt(share * (1 - share) / effective + z2 / (4 * effective**2))
    scale = 1 + z2 / effective
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
