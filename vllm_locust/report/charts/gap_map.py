"""How gaps between tokens lie over the time of a run: a count for each cell of a map, with logarithmic rows."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from vllm_locust.report.charts.bins import TimeBins, short
from vllm_locust.report.columns import Gaps, Ints

PER_DECADE: Final = 24
"""Rows, each 10 % higher than the one below it."""
MAX_ROWS: Final = 60
_FROM, _TO = 5, 12
"""Powers of ten of the shortest and the longest gap in nanoseconds; beyond, gaps count in the outermost row."""
_ROWS: Final = (_TO - _FROM) * PER_DECADE


class GapMap:
    def __init__(self, bins: TimeBins) -> None:
        self._bins = bins
        self._counts = np.zeros(bins.count * _ROWS, dtype=np.int64)

    def add(self, gaps: Gaps, sent_unix_ns: Ints) -> None:
        """A chunk of k tokens after a gap g counts k times, as g/k."""
        column, inside = self._bins.index(sent_unix_ns[gaps.request] + gaps.end_ns)
        tokens = np.ones(len(gaps.gap_ns), dtype=np.int64) if gaps.tokens is None else gaps.tokens
        each_ns = np.maximum(gaps.gap_ns / tokens, 10.0**_FROM)
        row = np.minimum(((np.log10(each_ns) - _FROM) * PER_DECADE).astype(np.int64), _ROWS - 1)
        cell = (column * _ROWS + row)[inside]
        self._counts += np.bincount(cell, weights=tokens[inside], minlength=len(self._counts)).astype(np.int64)

    def as_json(self, metric: str) -> dict[str, Any] | None:
        """``cells``: bin of time, row and count of each that is not empty. ``edges_s`` bound the rows. None without
        gaps.
        """
        counts = self._counts.reshape(self._bins.count, _ROWS)
        used = np.flatnonzero(counts.sum(axis=0))
        if not len(used):
            return None
        first, height = int(used[0]), int(used[-1] - used[0]) + 1
        merged = -(-height // MAX_ROWS)
        rows = -(-height // merged)
        shown = np.zeros((self._bins.count, rows * merged), dtype=np.int64)
        shown[:, :height] = counts[:, first : first + height]
        shown = shown.reshape(self._bins.count, rows, merged).sum(axis=2)
        edges_ns = 10.0 ** (_FROM + (first + merged * np.arange(rows + 1)) / PER_DECADE)
        columns, places = np.nonzero(shown)
        return {
            "metric": metric,
            "edges_s": [short(edge / 1e9) for edge in edges_ns.tolist()],
            "cells": np.stack((columns, places, shown[columns, places]), axis=1).tolist(),
        }
