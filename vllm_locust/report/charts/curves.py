"""Whole distributions, and how latency and throughput hang together over the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any, Final

import numpy as np

from vllm_locust.capacity.knee import CurvePoint, find_knee
from vllm_locust.report.charts.bins import short
from vllm_locust.report.stage_samples import PER_REQUEST, POOLED, StageSamples
from vllm_locust.statistics import nearest_rank, percentile

DRAWN: Final = ("ttft", "ttft_from_schedule", "tpot", "itl", "chunk_gap", "e2e")
PER_DECADE: Final = 10
_DECADES: Final = 7
MAX_DRAWN: Final = 40
"""Stages with curves of their own: more cannot be told apart."""

Json = Mapping[str, Any]


def percentile_curves(stages: Sequence[Json], samples: Mapping[int, StageSamples]) -> dict[str, Any]:
    """``beyond``: the shares of the samples that lie beyond each point, 10 to a decade. A curve ends with the largest
    sample of all.
    """
    shares = [Fraction(10 ** (-k / PER_DECADE)).limit_denominator(10**9) for k in range(_DECADES * PER_DECADE + 1)]
    measured = [stage for stage in stages if any(stage[f"{name}_s"]["n"] for name in DRAWN)]
    shown = measured[:MAX_DRAWN]
    return {
        "left_out": len(measured) - len(shown),
        "beyond": [short(float(share)) for share in shares],
        "stages": [
            {
                "stage": stage["stage"],
                "name": stage["name"],
                "curves": {name: _curve(name, samples[stage["stage"]], shares) for name in DRAWN},
            }
            for stage in shown
        ],
    }


def _curve(name: str, samples: StageSamples, shares: Sequence[Fraction]) -> list[float]:
    """In seconds; up to the first point beyond which less than one sample lies."""
    if name in PER_REQUEST:
        values = np.sort(samples.values(name))
        inside = _within(len(values), shares)
        return [short(percentile(values, 1 - share) / 1e9) for share in inside]
    pooled = samples.gaps[name].reported if name in POOLED else None
    assert pooled is not None
    return [short(pooled.at_rank(nearest_rank(pooled.n, 1 - share)) / 1e9) for share in _within(pooled.n, shares)]


def _within(n: int, shares: Sequence[Fraction]) -> list[Fraction]:
    if not n:
        return []
    inside = [share for share in shares if share * n >= 1]
    return [*inside, shares[len(inside)]] if len(inside) < len(shares) else inside


def load_curve(summary: Json) -> dict[str, Any] | None:
    """A point for each hold, and for each probe of an earlier run that counts, in order of the load; None where there
    are fewer than two.
    """
    left_out, held = _judged(summary["capacity"])
    held = _of_slos(summary["slo"]["stages"]) | held
    points = _earlier(summary["capacity"]) + [
        {
            "name": stage["name"],
            "users": stage["users"],
            "offered_rps": stage["offered_rps"],
            "requests_per_s": stage["requests_per_s"],
            "output_tokens_per_s": stage["output_tokens_per_s"],
            **{f"{metric}_{p}": stage[f"{metric}_s"][p] for metric in ("ttft", "tpot", "e2e") for p in ("p50", "p99")},
            "overloaded": stage["overloaded"],
            "held": held.get(stage["stage"]),
        }
        for stage in summary["stages"]
        if stage["stage_kind"] == "hold" and stage["requests_per_s"] and stage["stage"] not in left_out
    ]
    if len(points) < 2:
        return None
    points.sort(key=_load)
    return {"points": points, "knee": _knee(summary["capacity"], points)}


def _earlier(capacity: Json | None) -> list[dict[str, Any]]:
    """Of them only the figures that the search keeps are known."""
    if capacity is None:
        return []
    blank = dict.fromkeys(f"{metric}_{p}" for metric in ("ttft", "tpot", "e2e") for p in ("p50", "p99"))
    in_users = capacity["unit"] == "users"
    return [
        blank
        | {
            "name": "of an earlier run",
            "users": probe["load"] if in_users else None,
            "offered_rps": None if in_users else probe["load"],
            "requests_per_s": probe["completed_rps"],
            "output_tokens_per_s": probe["figures"].get("output_tokens_per_s"),
            "e2e_p50": probe["latency_s"],
            "overloaded": probe["overload"] is not None,
            "held": probe["held"],
        }
        for probe in capacity["probes"]
        if probe["stage"] is None and not probe["left_out"] and probe["completed_rps"]
    ]


def _load(point: Json) -> float:
    return float(next(x for x in (point["offered_rps"], point["users"], point["requests_per_s"]) if x is not None))


def _judged(capacity: Json | None) -> tuple[set[int], dict[int, bool | None]]:
    """Of the probes of this run's stages: those that do not count, and which met the SLOs."""
    probes = () if capacity is None else [probe for probe in capacity["probes"] if probe["stage"] is not None]
    return {one["stage"] for one in probes if one["left_out"]}, {one["stage"]: one["held"] for one in probes}


def _of_slos(judged: Sequence[Json]) -> dict[int, bool | None]:
    """Whether a stage met all SLOs that it was judged by; None where that is not known of one, and none was missed."""
    met: dict[int, list[bool | None]] = {}
    for one in judged:
        met.setdefault(one["stage"], []).append(one["met"])
    return {stage: False if False in all_met else None if None in all_met else True for stage, all_met in met.items()}


def _knee(capacity: Json | None, points: Sequence[Json]) -> dict[str, Any] | None:
    if capacity is not None:
        return None if capacity["knee"] is None else dict(capacity["knee"])
    known = [point for point in points if point["e2e_p50"] is not None]
    knee = find_knee([CurvePoint(_load(point), point["requests_per_s"], point["e2e_p50"]) for point in known])
    return None if knee is None else asdict(knee)
