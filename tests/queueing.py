"""A server of known capacity: c places, first come first served (M/M/c where nothing else is said)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Visits:
    """In seconds; the arrivals in order."""

    arrived: npt.NDArray[np.float64]
    began: npt.NDArray[np.float64]
    ended: npt.NDArray[np.float64]


def visits(seed: int, *, load: float, places: int, service_s: float, length_s: float, warmup_s: float = 0.0) -> Visits:
    """Arrivals from ``-warmup_s`` to ``length_s`` at ``load`` times what the server can do."""
    random = np.random.default_rng(seed)
    rate = load * places / service_s
    arrived = -warmup_s + np.cumsum(random.exponential(1 / rate, int(rate * (length_s + warmup_s) * 1.5) + 100))
    arrived = arrived[arrived < length_s]
    services = random.exponential(service_s, len(arrived))
    free = [-warmup_s] * places
    began = np.empty(len(arrived))
    for index, (at, service) in enumerate(zip(arrived.tolist(), services.tolist(), strict=True)):
        began[index] = max(at, free[0])
        heapq.heapreplace(free, began[index] + service)
    return Visits(arrived, began, began + services)
