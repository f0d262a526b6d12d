"""A mergeable histogram for live views: log buckets of ratio 1.01, so a quantile is within 0.5 % of the exact nearest
rank.

Values are durations in nanoseconds from 1 ns to about 292 years. Zero has a count of its own; a negative value (a
clock that went back) and one that is too large are counted by name, and the exact minimum and maximum stand for them
in quantiles. Merging adds integers, so order and grouping do not matter. For the final result see ``statistics``: it
is exact and needs no buckets.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from fractions import Fraction
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_locust.statistics import nearest_rank

RATIO: Final = 1.01
BUCKETS: Final = 4400
LIMIT_NS: Final = 1 << 63

_LOG_RATIO = math.log(RATIO)
_MAGIC = b"VLH1"
# magic, used buckets, zero, negative, too large, has min and max, min, max, then the sum as 16 bytes
_HEADER = struct.Struct("<4sHQQQ?qq16s")
_INT64_MAX = (1 << 63) - 1


Durations = npt.NDArray[np.int64] | npt.NDArray[np.float64]
_Used = tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]
"""Rising numbers of buckets, and the count of each."""
_NO_BUCKETS: Final[_Used] = (np.zeros(0, dtype=np.uint16), np.zeros(0, dtype=np.int64))


class Tally(NamedTuple):
    """Some values, at least one, counted by bucket: ``counts`` from bucket ``first`` on."""

    first: int
    counts: npt.NDArray[np.int64]
    zero: int
    negative: int
    sum_ns: int
    low: int
    high: int

    @classmethod
    def of(cls, values_ns: Durations, weights: npt.NDArray[np.int64] | None = None) -> Tally:
        low, high = float(values_ns.min()), float(values_ns.max())
        if not (math.isfinite(low) and math.isfinite(high)) or high >= LIMIT_NS or low <= -LIMIT_NS:
            raise ValueError(f"durations from {low} to {high} ns are not all finite and below 2^63 ns")
        total = values_ns.sum() if weights is None else values_ns @ weights
        zero = negative = 0
        if low < 1:
            # Less than a nanosecond is as good as zero.
            each = np.ones(len(values_ns), dtype=np.int64) if weights is None else weights
            negative = int(each[values_ns < 0].sum())
            keep = values_ns >= 1
            zero = int(each[~keep].sum()) - negative
            values_ns, weights = values_ns[keep], None if weights is None else weights[keep]
        extent = zero, negative, round(float(total)) if values_ns.dtype.kind == "f" else int(total)
        if not len(values_ns):
            return cls(0, np.zeros(0, dtype=np.int64), *extent, math.floor(low), math.ceil(high))
        index = (np.log(values_ns) / _LOG_RATIO).astype(np.int64)
        first = int(index.min())
        counts = np.bincount(index - first, weights=weights).astype(np.int64)
        return cls(first, counts, *extent, math.floor(low), math.ceil(high))


class LogHistogram:
    """``record`` one value or ``record_many``; ``merge`` gives a new one; ``==`` compares contents.

    One that was read from bytes holds only its used buckets until something is recorded: a thousand workers' would
    fill gigabytes otherwise.
    """

    __slots__ = ("_counts", "_used", "max_ns", "min_ns", "negative", "sum_ns", "too_large", "zero")

    def __init__(self) -> None:
        self._counts: npt.NDArray[np.int64] | None = None
        self._used: _Used = _NO_BUCKETS
        self.zero = 0
        self.negative = 0
        self.too_large = 0
        self.sum_ns = 0
        self.min_ns: int | None = None
        self.max_ns: int | None = None

    def _dense(self) -> npt.NDArray[np.int64]:
        """The counts of all buckets, to be written to."""
        if self._counts is None:
            self._counts = np.zeros(BUCKETS, dtype=np.int64)
            self._counts[self._used[0]] = self._used[1]
            self._used = _NO_BUCKETS
        return self._counts

    def _sparse(self) -> _Used:
        if self._counts is None:
            return self._used
        used = np.flatnonzero(self._counts)
        return used.astype(np.uint16), self._counts[used]

    @property
    def n(self) -> int:
        counts = self._used[1] if self._counts is None else self._counts
        return int(counts.sum()) + self.zero + self.negative + self.too_large

    @property
    def mean_ns(self) -> float | None:
        return self.sum_ns / n if (n := self.n) else None

    def record(self, value_ns: int, weight: int = 1) -> None:
        self.sum_ns += value_ns * weight
        self._extend_range(value_ns, value_ns)
        if value_ns >= LIMIT_NS:
            self.too_large += weight
        elif value_ns > 0:
            self._dense()[int(math.log(value_ns) / _LOG_RATIO)] += weight
        elif value_ns == 0:
            self.zero += weight
        else:
            self.negative += weight

    def record_many(self, values_ns: Durations, weights: npt.NDArray[np.int64] | None = None) -> None:
        """``weights[i]`` samples of ``values_ns[i]``, which may have fractions of a nanosecond above 1 ns."""
        if len(values_ns):
            self.add(Tally.of(values_ns, weights))

    def add(self, tally: Tally) -> None:
        """Take in values that have been sorted into buckets: for the same values in several histograms."""
        self._dense()[tally.first : tally.first + len(tally.counts)] += tally.counts
        self.zero += tally.zero
        self.negative += tally.negative
        self.sum_ns += tally.sum_ns
        self._extend_range(tally.low, tally.high)

    def _extend_range(self, low: int, high: int) -> None:
        self.min_ns = low if self.min_ns is None else min(self.min_ns, low)
        self.max_ns = high if self.max_ns is None else max(self.max_ns, high)

    def quantile(self, q: Fraction | float) -> float | None:
        """Percentile q in ns by nearest rank, within 0.5 %; None when nothing was recorded."""
        if self.min_ns is None or self.max_ns is None:
            return None
        rank = nearest_rank(self.n, Fraction(q).limit_denominator(1_000_000))
        if rank <= self.negative:
            return float(self.min_ns)
        rank -= self.negative
        if rank <= self.zero:
            return 0.0
        rank -= self.zero
        used, counts = self._sparse()
        cumulative = np.cumsum(counts)
        place = int(np.searchsorted(cumulative, rank, side="left"))
        if place == len(used):
            return float(self.max_ns)
        bucket = int(used[place])
        middle = 2 * math.exp(bucket * _LOG_RATIO) * RATIO / (1 + RATIO)
        return min(max(middle, float(self.min_ns)), float(self.max_ns))

    def above(self, limit_ns: float) -> int:
        """How many values are larger; those in the limit's own bucket are taken as spread evenly over it."""
        if limit_ns < 1:
            return self.n - self.negative - self.zero if limit_ns >= 0 else self.n - self.negative
        place = math.log(limit_ns) / _LOG_RATIO
        bucket = int(place)
        if bucket >= BUCKETS:
            return self.too_large
        if self.max_ns is not None and self.max_ns <= limit_ns:
            return 0
        used, counts = self._sparse()
        here, beyond = np.searchsorted(used, (bucket, bucket + 1)).tolist()
        within = round(float(counts[here:beyond].sum()) * (bucket + 1 - place))
        return int(counts[beyond:].sum()) + self.too_large + within

    @classmethod
    def union(cls, parts: Iterable[LogHistogram]) -> LogHistogram:
        """All that the parts hold, in a new one; nothing where there are none."""
        whole = cls()
        counts = whole._dense()
        sparse = []
        for part in parts:
            if part._counts is None:
                sparse.append(part._used)
            else:
                counts += part._counts
            whole.zero += part.zero
            whole.negative += part.negative
            whole.too_large += part.too_large
            whole.sum_ns += part.sum_ns
            if part.min_ns is not None and part.max_ns is not None:
                whole._extend_range(part.min_ns, part.max_ns)
        if sparse:
            np.add.at(counts, np.concatenate([index for index, _ in sparse]), np.concatenate([n for _, n in sparse]))
        return whole

    def since(self, earlier: LogHistogram) -> LogHistogram:
        """What was recorded after ``earlier``, a former state of this histogram; its minimum and maximum are those of
        its buckets. Raises ValueError where it is no former state.
        """
        part = LogHistogram.union((self,))
        counts = part._dense()
        buckets, before = earlier._sparse()
        counts[buckets] -= before
        part.zero, part.negative = self.zero - earlier.zero, self.negative - earlier.negative
        part.too_large, part.sum_ns = self.too_large - earlier.too_large, self.sum_ns - earlier.sum_ns
        part.min_ns = part.max_ns = None
        if np.any(counts < 0) or min(part.zero, part.negative, part.too_large) < 0:
            raise ValueError("the earlier histogram is no former state of this one: it counts more")
        if part.n and self.min_ns is not None and self.max_ns is not None:
            used = np.flatnonzero(counts)
            low = self.min_ns if part.negative else 0 if part.zero or not len(used) else _edge(int(used[0]))
            high = self.max_ns if part.too_large else _edge(int(used[-1]) + 1) if len(used) else 0
            part._extend_range(max(low, self.min_ns), min(high, self.max_ns))
        return part

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LogHistogram) and self.to_bytes() == other.to_bytes()

    __hash__ = None  # type: ignore[assignment]

    def to_bytes(self) -> bytes:
        """Only the buckets in use: 2 bytes of index and 8 of count each."""
        used, counts = self._sparse()
        header = _HEADER.pack(
            _MAGIC,
            len(used),
            self.zero,
            self.negative,
            self.too_large,
            self.min_ns is not None,
            _to_int64(self.min_ns),
            _to_int64(self.max_ns),
            self.sum_ns.to_bytes(16, "little", signed=True),
        )
        return header + used.astype("<u2").tobytes() + counts.astype("<i8").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> LogHistogram:
        """Raises ValueError on anything that ``to_bytes`` cannot have written."""
        if len(data) < _HEADER.size:
            raise ValueError(f"a histogram of {len(data)} bytes is shorter than its header of {_HEADER.size}")
        magic, used, zero, negative, too_large, has_range, low, high, total = _HEADER.unpack_from(data)
        if magic != _MAGIC:
            raise ValueError(f"a histogram starts with {_MAGIC!r}, not with {magic!r}")
        if len(data) != _HEADER.size + 10 * used:
            raise ValueError(f"a histogram of {used} buckets has {_HEADER.size + 10 * used} bytes, not {len(data)}")
        index = np.frombuffer(data, dtype="<u2", count=used, offset=_HEADER.size)
        # Read as signed: what a count of 2^63 and more would be is below 1.
        counts = np.frombuffer(data, dtype="<i8", count=used, offset=_HEADER.size + 2 * used)
        if used and (index[-1] >= BUCKETS or (index[1:] <= index[:-1]).any()):
            raise ValueError(f"the histogram's bucket numbers are not rising below {BUCKETS}")
        if (used and (counts.min() < 1 or counts.max() > 1 << 53)) or max(zero, negative, too_large) > 1 << 53:
            raise ValueError("the histogram has a count outside 1…2^53")
        histogram = cls()
        histogram._used = (index, counts)
        histogram.zero, histogram.negative, histogram.too_large = zero, negative, too_large
        histogram.sum_ns = int.from_bytes(total, "little", signed=True)
        if has_range != bool(used or zero or negative or too_large) or low > high:
            raise ValueError("the histogram's range does not fit its counts")
        if has_range:
            histogram.min_ns, histogram.max_ns = low, high
        return histogram


def _edge(bucket: int) -> int:
    return min(math.floor(math.exp(bucket * _LOG_RATIO)), _INT64_MAX)


def _to_int64(value: int | None) -> int:
    return 0 if value is None else max(-_INT64_MAX, min(_INT64_MAX, value))
