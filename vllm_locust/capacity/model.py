"""Where the share of samples beyond an SLO's limit crosses what is allowed: a posterior over the load.

The search is a stochastic root finding in the logarithm of the load, in the manner of probabilistic bisection (Waeber,
Frazier & Henderson, SIAM J. Control Optim. 2013) where, as in its generalisation (Rodriguez & Ludkovski, ACM TOMACS
2020), a probe says more than yes or no: how far beyond, and how surely. For each SLO

    logit(share) = logit(allowed) + slope * (exp(curvature * (x - root)) - 1) / curvature,    x = log(load)

which rises with the load. Curvature 1 is the tail of a queue (in M/M/1 the logarithm of P(wait > t) is linear in the
load); larger ones bend like a latency that hardly moves until something is full. A count is beta-binomial with an
unknown variance inflation, since slow requests come in crowds: a probe without any slow request says little when crowds
are large, and much when they are small. The inflation shows in the scatter of batches within a probe and of probes. The
curve is local: it is believed to 30 % of its own distance from the limit, so that far probes give the direction, and
near ones the place. A probe far beyond its limit is in no steady state; it says only that it is beyond.

All of root, slope, curvature and inflation are laid on a grid and summed, which needs no random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from vllm_locust.capacity.probe import ProbeResult, SloCount, by_slo

Floats = npt.NDArray[np.float64]

# Axes of the grid: root, slope, curvature, inflation.
SLOPES: Final = np.geomspace(2, 120, 11)[:, None, None]
CURVATURES: Final = np.array([-2.0, 0.01, 1.0, 3.0, 8.0])[:, None]
CURVATURE_WEIGHTS: Final = np.array([0.1, 0.2, 0.4, 0.2, 0.1])[:, None]
INFLATIONS: Final = np.geomspace(1.2, 500, 11)
SLOPE_PRIOR: Final = (14.0, 0.9)
"""Median, and standard deviation of the logarithm."""
INFLATION_PRIOR: Final = (10.0, 1.3)
MISFIT: Final = 0.3
FAR_BEYOND: Final = 2.5
"""In logits: twelve times as many as a small allowed share."""
ROOT_POINTS: Final = 81
MARGIN: Final = 0.7
"""How far, in log load, the capacity may lie outside of the loads tried."""
POINTS: Final = 2001
OVERLOAD_DOUBT: Final = 0.002
"""The probability that a load was found to be too much although the SLOs hold at it."""
_NEGLIGIBLE: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Observation:
    """Counts of one probe, by batches; ``log_load`` is its place. ``beyond_steady``: its queue grew all the time, so
    that only the direction counts.
    """

    log_load: float
    beyond: tuple[int, ...]
    samples: tuple[int, ...]
    beyond_steady: bool = False


@dataclass(frozen=True, slots=True)
class CapacityPosterior:
    """``above[i]`` is P(capacity > load i), ``first[slo][i]`` the density of that SLO's root where it is the lowest."""

    log_loads: Floats
    above: Floats
    first: Mapping[str, Floats]

    def quantile(self, q: float) -> float:
        return math.exp(np.interp(q, 1 - self.above, self.log_loads))

    def probability_above(self, load: float) -> float:
        return float(np.interp(math.log(load), self.log_loads, self.above))

    @property
    def limiting_slo(self) -> str | None:
        """The one that most probably has the lowest root."""
        shares = {slo: float(density.sum()) for slo, density in self.first.items()}
        return max(shares, key=lambda slo: shares[slo], default=None)


@dataclass(frozen=True, slots=True)
class RootPosterior:
    """Probabilities of the root's place on an even grid of log loads."""

    log_loads: Floats
    weights: Floats

    def above(self, log_loads: Floats) -> Floats:
        """P(root > x)."""
        step = self.log_loads[1] - self.log_loads[0]
        edges = np.concatenate((self.log_loads - step / 2, [self.log_loads[-1] + step / 2]))
        tail = np.concatenate(([1.0], 1 - np.cumsum(self.weights)))
        return np.interp(log_loads, edges, tail)


def capacity_posterior(probes: Sequence[ProbeResult]) -> CapacityPosterior:
    """The capacity is the lowest of the SLOs' roots, and no load that overloads the server is within it."""
    loads = [math.log(probe.load) for probe in probes]
    lowest, highest = min(loads) - MARGIN, max(loads) + MARGIN
    log_loads = np.linspace(lowest, highest, POINTS)
    roots = {
        slo: root_posterior(_observations(counts), counts[0][1].allowed, lowest, highest).above(log_loads)
        for slo, counts in by_slo(probes).items()
    }
    above = np.prod([*roots.values(), np.ones(POINTS)], axis=0)
    first = {slo: above * np.maximum(0, -np.gradient(np.log(np.maximum(root, 1e-300)))) for slo, root in roots.items()}
    flooded = [math.log(probe.load) for probe in probes if probe.overloaded is not None]
    return CapacityPosterior(log_loads, _below(above, log_loads, flooded), first)


def _below(above: Floats, log_loads: Floats, flooded: Sequence[float]) -> Floats:
    """P(capacity > x) with the knowledge that these loads are too much."""
    likelihood = np.ones(len(log_loads))
    for load in flooded:
        likelihood[log_loads > load] *= OVERLOAD_DOUBT
    masses = -np.diff(above, prepend=1.0, append=0.0) * np.append(likelihood, likelihood[-1])
    return np.asarray(1 - np.cumsum(masses[:-1]) / masses.sum())


def _observations(counts: Sequence[tuple[ProbeResult, SloCount]]) -> list[Observation]:
    """An overloaded probe that has met an SLO so far says nothing of what would have become of it."""
    return [
        Observation(math.log(probe.load), slo.beyond, slo.samples, probe.overloaded is not None)
        for probe, slo in counts
        if sum(slo.samples) > 1 and not (probe.overloaded is not None and slo.met)
    ]


def root_posterior(observations: Sequence[Observation], allowed: float, lowest: float, highest: float) -> RootPosterior:
    """Evenly distributed between two log loads before anything was observed."""
    low, high = lowest, highest
    while True:
        roots = np.linspace(low, high, ROOT_POINTS)
        log_density = _log_prior()[None] + sum(
            (_log_likelihood(one, allowed, roots) for one in observations), np.zeros((1, 1, 1, 1))
        )
        weights = np.exp(log_density - log_density.max()).sum(axis=(1, 2, 3))
        weights /= weights.sum()
        likely = np.flatnonzero(weights > _NEGLIGIBLE)
        closer_low = roots[max(0, int(likely[0]) - 1)]
        closer_high = roots[min(ROOT_POINTS - 1, int(likely[-1]) + 1)]
        if closer_high - closer_low > 0.6 * (high - low):
            return RootPosterior(roots, weights)
        low, high = float(closer_low), float(closer_high)


def _log_prior() -> Floats:
    slope = _log_normal(SLOPES, *SLOPE_PRIOR)
    return np.asarray(slope + np.log(CURVATURE_WEIGHTS) + _log_normal(INFLATIONS, *INFLATION_PRIOR))


def _log_normal(values: Floats, median: float, spread: float) -> Floats:
    return np.asarray(-0.5 * (np.log(values / median) / spread) ** 2)


def _log_likelihood(one: Observation, allowed: float, roots: Floats) -> Floats:
    distance = (one.log_load - roots)[:, None, None, None]
    margin = np.clip(SLOPES * np.expm1(np.clip(CURVATURES * distance, -30, 30)) / CURVATURES, -30, 30)
    beyond, samples = sum(one.beyond), sum(one.samples)
    limit = _logit(allowed)
    seen = math.log((beyond + 0.5) / (samples - beyond + 0.5)) - limit
    if seen > FAR_BEYOND or one.beyond_steady:
        # A logistic step at a margin of 1: whoever is far beyond is beyond.
        return np.asarray(-np.logaddexp(0, -2.3 * (margin - 1)))
    share = np.clip(1 / (1 + np.exp(-(limit + margin))), 1e-9, 1 - 1e-9)
    inflation = INFLATIONS + samples * share * (1 - share) * np.minimum((MISFIT * margin) ** 2, 4)
    fit = _log_beta_binomial(beyond, samples, share, inflation)
    scatter = batch_scatter(one)
    if scatter is not None and abs(seen) < 1.5:
        fit = fit - 0.5 * np.log(SCATTER_BIAS * max(scatter, 0.3) / INFLATIONS) ** 2 / SCATTER_VARIANCE
    return np.asarray(fit)


SCATTER_BIAS: Final = 1.5
SCATTER_VARIANCE: Final = 0.6
"""Of the logarithm: batches of one probe see only part of the crowding, since they have a crowd in common."""


def batch_scatter(one: Observation) -> float | None:
    """Variance of the batches' counts over that of independent samples; None where there are too few to tell."""
    beyond, samples = sum(one.beyond), sum(one.samples)
    if min(beyond, samples - beyond) < 5:
        return None
    share = beyond / samples
    squares = [
        (k - n * share) ** 2 / (n * share * (1 - share)) for k, n in zip(one.beyond, one.samples, strict=True) if n
    ]
    return sum(squares) / (len(squares) - 1) if len(squares) > 1 else None


def _logit(share: float) -> float:
    return math.log(share / (1 - share))


def _log_beta_binomial(beyond: int, samples: int, share: Floats, inflation: Floats) -> Floats:
    """Without the binomial coefficient, which is the same everywhere."""
    inflation = np.minimum(inflation, (samples + 1) / 2)
    strength = (samples - inflation) / (inflation - 1)
    yes, no = share * strength, (1 - share) * strength
    return np.asarray(_log_rising(yes, beyond) + _log_rising(no, samples - beyond) - _log_rising(strength, samples))


def _log_rising(start: Floats, steps: int) -> Floats:
    """log(start * (start + 1) * ... * (start + steps - 1))."""
    return _log_gamma(start + steps) - _log_gamma(start)


def _log_gamma(x: Floats) -> Floats:
    """Stirling's series at x + 5, taken back by the recurrence: 8 digits for x > 0, and fast."""
    z = x + 5.0
    series = (
        (z - 0.5) * np.log(z) - z + 0.5 * math.log(2 * math.pi) + (1 - (1 / 30 - 2 / 7 / 30 / z**2) / z**2) / 12 / z
    )
    return np.asarray(series - np.log(x * (x + 1) * (x + 2) * (x + 3) * (x + 4)))
