"""Confidence of percentiles over pooled gaps: gaps of one stream are alike, and so are those of streams in a row.

The percentiles are known from a first pass over the requests; a second one counts, for each request, how many of its
samples lie beyond each.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vllm_locust.confidence import variance_inflation
from vllm_locust.pooled import PooledSample
from vllm_locust.report.columns import Flags, Floats, Gaps, Ints
from vllm_locust.statistics import PERCENTILES, nearest_rank


class GapConfidence:
    """Of one pooled metric in one stage."""

    def __init__(self, sample: PooledSample) -> None:
        self._limits_ns = {
            name: sample.at_rank(nearest_rank(sample.n, q)) for name, q in PERCENTILES.items() if sample.n
        }
        self._sent: list[Ints] = []
        self._samples: list[Floats] = []
        self._beyond: dict[str, list[Floats]] = {name: [] for name in self._limits_ns}

    def add(self, gaps: Gaps, sent_unix_ns: Ints, mine: Flags) -> None:
        """``gaps`` of the rows that ``mine`` marks, all of them in the sample."""
        if not self._limits_ns:
            return
        rows = len(sent_unix_ns)
        weights = np.ones(len(gaps.gap_ns), dtype=np.int64) if gaps.tokens is None else gaps.tokens
        samples = np.bincount(gaps.request, weights=weights, minlength=rows).astype(np.float64)
        keep = mine & (samples > 0)
        self._sent.append(sent_unix_ns[keep])
        self._samples.append(samples[keep])
        per_token = gaps.gap_ns if gaps.tokens is None else gaps.gap_ns / gaps.tokens
        request = gaps.request
        # What lies beyond a percentile is among what lies beyond the one before it: ever fewer.
        for name, limit in self._limits_ns.items():
            beyond = np.flatnonzero(per_token > limit)
            per_token, request, weights = per_token[beyond], request[beyond], weights[beyond]
            counts = np.bincount(request, weights=weights, minlength=rows)
            self._beyond[name].append(counts[keep].astype(np.float64))

    def inflations(self) -> Mapping[str, float]:
        if not self._sent:
            return dict.fromkeys(PERCENTILES, 1.0)
        order = np.argsort(np.concatenate(self._sent), kind="stable")
        samples = np.concatenate(self._samples)[order]
        return {name: variance_inflation(np.concatenate(parts)[order], samples) for name, parts in self._beyond.items()}
