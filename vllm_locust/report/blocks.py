"""One metric's numbers as a block of ``summary.json``: seconds, null where nothing is known, never NaN or Infinity.

A percentile that falls on a failed request is null and its name stands in ``beyond``: slower than everything
measured. A bound of a confidence interval is null where the samples give none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm_locust.confidence import rank_interval, variance_inflation
from vllm_locust.pooled import PooledSample
from vllm_locust.report.columns import Floats
from vllm_locust.statistics import PERCENTILES, few_samples, nearest_rank, percentile


def seconds(value_ns: float | None) -> float | None:
    if value_ns is None or not np.isfinite(value_ns):
        return None
    return float(value_ns) / 1e9


def metric_block(values_ns: Floats) -> dict[str, Any]:
    """``values_ns`` in the order of sending, without NaN; infinite for a failed request."""
    n = len(values_ns)
    block = empty_block()
    if not n:
        return block
    ordered = np.sort(values_ns)
    failed = int(np.isinf(ordered).sum())
    block |= {"n": n, "mean": None if failed else seconds(float(ordered.mean())), "max": seconds(ordered[-1])}
    for name, q in PERCENTILES.items():
        value = percentile(ordered, q)
        block[name] = seconds(value)
        inflation = variance_inflation((values_ns > value).astype(np.float64), np.ones(n))
        block[f"{name}_ci95"] = [
            None if rank is None else seconds(ordered[rank - 1]) for rank in rank_interval(n, q, inflation)
        ]
    block["few_samples"] = few_samples(n)
    return _mark_failed(block, failed)


def pooled_block(
    sample: PooledSample, *, failed_samples: int = 0, inflations: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """``failed_samples`` are slower than everything. Intervals are given where ``inflations`` are known."""
    n = sample.n + failed_samples
    block = empty_block()
    if not n:
        return block
    block["n"] = n
    if not failed_samples:
        block |= {"mean": seconds(sample.mean_ns), "max": seconds(sample.at_rank(n))}
    for name, q in PERCENTILES.items():
        rank = nearest_rank(n, q)
        block[name] = seconds(sample.at_rank(rank)) if rank <= sample.n else None
        if inflations is not None:
            block[f"{name}_ci95"] = [
                None if bound is None or bound > sample.n else seconds(sample.at_rank(bound))
                for bound in rank_interval(n, q, inflations[name])
            ]
    block["few_samples"] = few_samples(n)
    return _mark_failed(block, failed_samples)


def empty_block() -> dict[str, Any]:
    names = ("mean", *PERCENTILES, "max", *(f"{name}_ci95" for name in PERCENTILES))
    return {"n": 0, **dict.fromkeys(names), "few_samples": list(PERCENTILES)}


def _mark_failed(block: dict[str, Any], failed: int) -> dict[str, Any]:
    if failed:
        block["failed"] = failed
        block["beyond"] = [name for name in (*PERCENTILES, "max") if block[name] is None]
    return block
