"""Exact percentiles of very many gaps in little memory.

A chunk of k tokens after a gap of g ns is k samples of g/k. Gaps are kept as sorted runs of 4-byte integers, apart
for each k; a percentile is found by bisection over the value, counting with binary searches. So 100 million tokens
take 400 MB, no array is ever copied whole, and the answer is the exact nearest rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import numpy.typing as npt

RUN_LENGTH = 1 << 20
_UINT32_MAX = (1 << 32) - 1

_Run = npt.NDArray[np.uint32] | npt.NDArray[np.int64]


class PooledSample:
    """Gaps of many requests as one sample; ``n`` counts tokens (or gaps, where they were added without tokens)."""

    def __init__(self) -> None:
        self.n = 0
        self.total_ns = 0
        self._pending: dict[int, list[npt.NDArray[np.int64]]] = {}
        self._pending_length: dict[int, int] = {}
        self._runs: dict[int, list[_Run]] = {}

    def add(self, gaps_ns: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64] | None = None) -> None:
        """``tokens[i]``, at least 1, arrived after ``gaps_ns[i]``; without ``tokens`` each gap is one sample."""
        if not len(gaps_ns):
            return
        self.total_ns += int(gaps_ns.sum())
        if tokens is None:
            self._append(1, gaps_ns)
            return
        fewest, most = int(tokens.min()), int(tokens.max())
        if fewest < 1:
            raise ValueError(f"a chunk of {fewest} tokens has no gap per token")
        if fewest == most:  # as a rule, and much cheaper to see than to sort out
            self._append(fewest, gaps_ns)
            return
        for k in np.unique(tokens).tolist():
            self._append(k, gaps_ns[tokens == k])

    def _append(self, k: int, gaps_ns: npt.NDArray[np.int64]) -> None:
        self.n += k * len(gaps_ns)
        self._pending.setdefault(k, []).append(gaps_ns)
        self._pending_length[k] = self._pending_length.get(k, 0) + len(gaps_ns)
        if self._pending_length[k] >= RUN_LENGTH:
            self._sort_pending(k)

    def _sort_pending(self, k: int) -> None:
        gaps = np.concatenate(self._pending.pop(k))
        del self._pending_length[k]
        fits = (gaps >= 0) & (gaps <= _UINT32_MAX)
        for run in (gaps[fits].astype(np.uint32), gaps[~fits]):
            if len(run):
                run.sort()
                self._runs.setdefault(k, []).append(run)

    def _settle(self) -> None:
        for k in list(self._pending):
            self._sort_pending(k)

    @classmethod
    def union(cls, samples: Iterable[PooledSample]) -> PooledSample:
        """All samples together, sharing their memory."""
        whole = cls()
        for sample in samples:
            sample._settle()
            whole.n += sample.n
            whole.total_ns += sample.total_ns
            for k, runs in sample._runs.items():
                whole._runs.setdefault(k, []).extend(runs)
        return whole

    @property
    def mean_ns(self) -> float:
        """Over tokens: the k samples of g/k of one chunk add up to g."""
        return self.total_ns / self.n

    def count_up_to(self, value_ns: Fraction | int) -> int:
        """Samples that are at most ``value_ns``: g/k <= v where g <= floor(v*k)."""
        self._settle()
        return sum(
            k * sum(_count_up_to(run, value_ns.numerator * k // value_ns.denominator) for run in runs)
            for k, runs in self._runs.items()
        )

    def at_rank(self, rank: int) -> float:
        """The sample of this 1-based rank, in ns."""
        if not 1 <= rank <= self.n:
            raise ValueError(f"rank {rank} is outside 1…{self.n}")
        self._settle()
        low = min(int(run[0]) // k for k, runs in self._runs.items() for run in runs) - 1
        high = max(-(-int(run[-1]) // k) for k, runs in self._runs.items() for run in runs)
        while high - low > 1:
            middle = (low + high) // 2
            if self.count_up_to(middle) >= rank:
                high = middle
            else:
                low = middle
        # The sample lies in (low, high]: there are at most k different gaps of that size for each k.
        candidates = sorted({Fraction(g, k) for k in self._runs for g in self._distinct_gaps(k, k * low, k * high)})
        return float(next(value for value in candidates if self.count_up_to(value) >= rank))

    def _distinct_gaps(self, k: int, above: int, up_to: int) -> set[int]:
        found: set[int] = set()
        for run in self._runs[k]:
            start, end = _count_up_to(run, above), _count_up_to(run, up_to)
            while start < end:
                found.add(gap := int(run[start]))
                start = _count_up_to(run, gap)
        return found


def _count_up_to(run: _Run, value: int) -> int:
    if run.dtype == np.uint32:
        if value < 0:
            return 0
        if value > _UINT32_MAX:
            return len(run)
    return int(np.searchsorted(run, run.dtype.type(value), side="right"))
