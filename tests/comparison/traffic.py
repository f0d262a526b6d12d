"""Latencies of made-up servers: heavy tails, and requests that remember those before them. A row is one run."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_SETTLING = 300


def autoregressive(random: np.random.Generator, runs: int, requests: int, memory: float) -> Floats:
    """Standard normal; neighbours correlated by ``memory``."""
    noise = random.standard_normal((runs, requests + _SETTLING))
    series = noise.copy()
    for place in range(1, series.shape[1]):
        series[:, place] = memory * series[:, place - 1] + np.sqrt(1 - memory**2) * noise[:, place]
    return series[:, _SETTLING:]


def lognormal(random: np.random.Generator, runs: int, requests: int, *, memory: float, spread: float) -> Floats:
    return np.exp(spread * autoregressive(random, runs, requests, memory))


def plan(random: np.random.Generator, runs: int, requests: int, *, load: float, spread: float) -> tuple[Floats, Floats]:
    """Gaps before arrivals, and what each asks for (lognormal, mean 1), of a Poisson process."""
    shape = runs, requests + _SETTLING
    return random.exponential(1 / load, shape), np.exp(spread * random.standard_normal(shape) - spread**2 / 2)


def queue(gaps: Floats, services: Floats) -> Floats:
    """Times in a queue with one place, first come first served (Lindley, 1952)."""
    waits = np.zeros_like(services)
    for place in range(1, services.shape[1]):
        waits[:, place] = np.maximum(0.0, waits[:, place - 1] + services[:, place - 1] - gaps[:, place])
    return (waits + services)[:, _SETTLING:]
