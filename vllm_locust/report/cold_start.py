"""Whether the first requests of the warm-up were slower than the window's: caches, graphs and kernels in the making."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from vllm_locust.phases import Phase
from vllm_locust.report.columns import Floats, Ints, RequestColumns

FIRST: Final = 10
"""Requests at most: of those that come later many find a server that is warm."""
MIN_RATIO: Final = 1.5
MIN_DIFFERENCE_S: Final = 0.020


class ColdStart:
    """The first requests of the warm-up, by when they were sent."""

    def __init__(self) -> None:
        self._sent_unix_ns: Ints = np.empty(0, np.int64)
        self._ttft_ns: Floats = np.empty(0)

    def add(self, columns: RequestColumns) -> None:
        ttft_ns = columns.floats("ttft_ns")
        mine = columns.is_equal("phase", Phase.WARMUP) & columns.ok & ~np.isnan(ttft_ns)
        if not mine.any():
            return
        sent = np.concatenate([self._sent_unix_ns, columns.ints("sent_unix_ns")[mine]])
        order = np.argsort(sent, kind="stable")[:FIRST]
        self._sent_unix_ns = sent[order]
        self._ttft_ns = np.concatenate([self._ttft_ns, ttft_ns[mine]])[order]

    def as_json(self, users: int | None, window_p50_s: float | None) -> dict[str, Any] | None:
        """Of no more requests than there are users: the next ones follow an answer. None without a warm-up or a window.
        It ``matters`` where it is plain to see.
        """
        first_s = self._ttft_ns[:users] / 1e9
        if not len(first_s) or window_p50_s is None:
            return None
        mean_s = float(first_s.mean())
        return {
            "requests": len(first_s),
            "ttft_mean_s": mean_s,
            "ttft_max_s": float(first_s.max()),
            "window_ttft_p50_s": window_p50_s,
            "ratio": mean_s / window_p50_s if window_p50_s > 0 else None,
            "matters": mean_s > MIN_RATIO * window_p50_s and mean_s - window_p50_s > MIN_DIFFERENCE_S,
        }
