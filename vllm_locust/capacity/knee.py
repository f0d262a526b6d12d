"""The knee of the throughput-latency curve: where throughput per latency is largest.

That is Kleinrock's power (ICC 1979): below the knee one percent more throughput costs less than one percent of latency,
above it more. Unlike the point of largest curvature (Kneedle, Satopää et al. 2011) it depends neither on the scale of
the axes nor on how far beyond the knee was probed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CurvePoint:
    load: float
    throughput_rps: float
    latency_s: float

    @property
    def power(self) -> float:
        return self.throughput_rps / self.latency_s


@dataclass(frozen=True, slots=True)
class Knee:
    """Of the loads probed, the one with the largest power, between its neighbours ``after`` and ``before``."""

    load: float
    throughput_rps: float
    latency_s: float
    after: float
    before: float


def find_knee(points: Sequence[CurvePoint]) -> Knee | None:
    """None where the power is largest at the lowest or at the highest load: the knee is not between the probes."""
    curve = sorted((point for point in points if point.latency_s > 0), key=lambda point: point.load)
    best = max(range(len(curve)), key=lambda i: curve[i].power, default=0)
    if not 0 < best < len(curve) - 1:
        return None
    knee = curve[best]
    return Knee(knee.load, knee.throughput_rps, knee.latency_s, curve[best - 1].load, curve[best + 1].load)
