"""When each request is due: one seeded schedule for the whole test, the same to the nanosecond on every machine.

A renewal process of rate 1 gives each arrival its place U_k on the axis "arrivals planned so far": 0, 1, 2, … for a
constant rate, sums of random gaps of mean 1 otherwise. Arrival k is due when the integral of the planned rate reaches
U_k. The rate may therefore change in any way without a seam: neither does a new stage start the process anew, nor does
its first arrival bring a burst or a hole.

Workers compute the whole schedule, each for itself, and take every n-th arrival: nothing is sent between them, and any
number of workers sends the same schedule.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from fractions import Fraction
from itertools import count
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

_BLOCK: Final = 1024
"""Arrivals that are computed at once: some 0.1 ms of work, which must not hold up an event loop."""
_TICKS: Final = 1 << 30
"""Parts of a mean gap in which random gaps are summed, as integers: their sum has no rounding and no drift."""
_SEED_LABEL: Final = int.from_bytes(b"arrival", "big")
"""Sets the schedule's random numbers apart from all others of the same seed."""
_FINGERPRINTED_ARRIVALS: Final = 1000
_NS_PER_S: Final = 1_000_000_000
_LAST: Final = (1 << 63) - 1

MIN_BURSTINESS: Final = 0.01
MAX_BURSTINESS: Final = 1e6


class ArrivalProcess(StrEnum):
    CONSTANT = "constant"
    POISSON = "poisson"
    GAMMA = "gamma"
    TRACE = "trace"


class Arrival(NamedTuple):
    number: int
    """In the whole schedule, from 0."""
    offset_ns: int
    """After T0."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the plan with a rate that stays or changes linearly. ``length_ns`` None: it has no end."""

    length_ns: int | None
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        if not all(math.isfinite(rps) and rps >= 0 for rps in (self.start_rps, self.end_rps)):
            raise ValueError(f"{self}: a rate is a number of at least 0")
        if self.length_ns is None and self.start_rps != self.end_rps:
            raise ValueError(f"{self}: a ramp needs a length")
        if self.length_ns is not None and self.length_ns < 0:
            raise ValueError(f"{self}: a length is at least 0")

    @property
    def arrivals(self) -> Fraction | None:
        """The integral of the rate; None without an end."""
        if self.length_ns is None:
            return None
        return (_exact(self.start_rps) + _exact(self.end_rps)) / 2 * self.length_ns / _NS_PER_S


def _exact(rps: float) -> Fraction:
    """The decimal number that was written, not the binary one next to it: 0.1 is a tenth."""
    return Fraction(str(float(rps)))


class Schedule:
    """A process over a plan that may be extended at its end while it is read. Readers share no state.

    Its JSON holds everything but a trace's offsets, which come from the workload.
    """

    def __init__(
        self,
        process: ArrivalProcess,
        *,
        seed: int,
        burstiness: float = 1.0,
        pieces: Sequence[Piece] = (),
        trace_offsets_ns: Sequence[int] | Integers | None = None,
    ) -> None:
        """``burstiness`` is the gamma distribution's shape: gaps vary by 1/sqrt(burstiness) of their mean. Of a
        trace, the pieces give the length alone; without them it is taken whole.
        """
        if (process is ArrivalProcess.TRACE) != (trace_offsets_ns is not None):
            raise ValueError("a trace, and nothing else, needs trace_offsets_ns")
        if not MIN_BURSTINESS <= burstiness <= MAX_BURSTINESS:
            raise ValueError(f"burstiness {burstiness} is not between {MIN_BURSTINESS} and {MAX_BURSTINESS:.0f}")
        self.process = process
        self.seed = seed
        self.burstiness = burstiness
        self._trace = np.asarray(() if trace_offsets_ns is None else trace_offsets_ns, dtype=np.int64)
        if np.any(np.diff(self._trace, prepend=0) < 0):
            raise ValueError("a trace's offsets must not be negative and must be in order")
        self.ticks_per_arrival = 1 if process is ArrivalProcess.CONSTANT else _TICKS
        self._pieces: list[Piece] = []
        self._stretches: list[_Stretch] = []
        self._first_ticks: list[int] = []
        self._first_ns: list[int] = []
        """Of the first arrivals, for the fingerprint: an extension does not move them."""
        self._end_ns: int | None = 0
        self._end_ticks = 0
        self._arrivals = Fraction(0)
        for piece in pieces:
            self.extend(piece)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(self._pieces)

    @property
    def length_ns(self) -> int | None:
        """Of the whole plan; None if it has no end. A trace without pieces ends right after its last arrival."""
        if self.process is ArrivalProcess.TRACE and (not self._pieces or self._end_ns is None):
            return int(self._trace[-1]) + 1 if len(self._trace) else 0
        return self._end_ns

    @property
    def gap_cv(self) -> float | None:
        """The coefficient of variation of the gaps that the process asks for at a steady rate; None of a trace."""
        if self.process is ArrivalProcess.GAMMA:
            return 1 / math.sqrt(self.burstiness)
        return {ArrivalProcess.CONSTANT: 0.0, ArrivalProcess.POISSON: 1.0}.get(self.process)

    def extend(self, piece: Piece) -> None:
        """Add a piece at the end. What is due before it stays where it is, and readers go on into it."""
        if self._end_ns is None:
            raise ValueError("nothing can follow a piece without an end; give that piece a length")
        self._pieces.append(piece)
        if piece.length_ns != 0:
            first_ticks = min(math.ceil(self._arrivals * self.ticks_per_arrival), _LAST)
            self._stretches.append(_Stretch(piece, self._end_ns, self._arrivals, first_ticks, self.ticks_per_arrival))
            self._first_ticks.append(first_ticks)
        arrivals = piece.arrivals
        if piece.length_ns is None or arrivals is None:
            self._end_ns = None
            self._end_ticks = _LAST if piece.start_rps else self._first_ticks[-1]
        else:
            self._end_ns += piece.length_ns
            self._arrivals += arrivals
            self._end_ticks = min(math.ceil(self._arrivals * self.ticks_per_arrival), _LAST)

    def share(self, share: int, shares: int, first: int = 0) -> Iterator[Arrival]:
        """The arrivals k with k % shares == share, from number ``first`` on. It ends at the planned end as known when
        asked; after ``extend`` the same iterator goes on.
        """
        if not 0 <= share < shares:
            raise ValueError(f"share {share} of {shares}: shares are numbered from 0 to shares - 1")
        return _Share(self, share, shares, first)

    def offsets_ns(self, until_ns: int | None = None) -> Integers:
        """All arrivals due before ``until_ns``, by default those of the whole plan, which must then have an end."""
        if until_ns is None and self.length_ns is None:
            raise ValueError("a plan without an end has endless arrivals; say until when")
        reader, blocks = _Reader(self), [np.empty(0, np.int64)]
        while (block := reader.read()[1]).size:
            blocks.append(block)
            if until_ns is not None and block[-1] >= until_ns:
                break
        offsets = np.concatenate(blocks)
        return offsets if until_ns is None else offsets[: np.searchsorted(offsets, until_ns)]

    def warmup_length_ns(self, requests: int, at_most_ns: int, rate_rps: float) -> int:
        """How long a stretch at ``rate_rps`` before everything else must be to hold exactly the first ``requests``
        arrivals, but at most ``at_most_ns``. No warm-up where nothing would come (a ramp that starts at 0).
        """
        if self.process is ArrivalProcess.TRACE:
            return min(int(self._trace[requests]), at_most_ns) if requests < len(self._trace) else at_most_ns
        if rate_rps == 0:
            return 0
        alone = Schedule(
            self.process, seed=self.seed, burstiness=self.burstiness, pieces=(Piece(None, rate_rps, rate_rps),)
        )
        # A length beyond the limit is not computed to its end: 10^9 requests would take a while.
        for number, offset_ns in alone.share(0, 1):
            if number == requests or offset_ns >= at_most_ns:
                return min(offset_ns, at_most_ns) if requests else 0
        raise AssertionError("an endless plan has ended")

    def fingerprint(self) -> str:
        """SHA-256 over what the schedule is made of and its first arrivals as computed here: two machines that differ
        would send different loads.
        """
        if len(self._first_ns) < _FINGERPRINTED_ARRIVALS:
            numbered = zip(range(_FINGERPRINTED_ARRIVALS), self.share(0, 1), strict=False)
            self._first_ns = [offset_ns for _, (_, offset_ns) in numbered]
        described = json.dumps([self.to_json(), self._first_ns, len(self._trace)], sort_keys=True)
        return hashlib.sha256(described.encode() + self._trace.tobytes()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "process": str(self.process),
            "seed": self.seed,
            "burstiness": self.burstiness,
            "pieces": [asdict(piece) for piece in self._pieces],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, trace_offsets_ns: Sequence[int] | Integers | None = None) -> Self:
        return cls(
            ArrivalProcess(data["process"]),
            seed=data["seed"],
            burstiness=data["burstiness"],
            pieces=[Piece(**piece) for piece in data["pieces"]],
            trace_offsets_ns=trace_offsets_ns,
        )

    def unit_blocks(self) -> Iterator[Integers]:
        """The process itself, in ticks of the axis "arrivals planned so far"; of a trace its offsets."""
        if self.process is ArrivalProcess.TRACE:
            yield from (self._trace[start : start + _BLOCK] for start in range(0, len(self._trace), _BLOCK))
        elif self.process is ArrivalProcess.CONSTANT:
            yield from (np.arange(start, start + _BLOCK, dtype=np.int64) for start in count(0, _BLOCK))
        else:
            yield from self._random_blocks()

    def _random_blocks(self) -> Iterator[Integers]:
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, _SEED_LABEL])))
        reached = np.int64(0)
        while True:
            if self.process is ArrivalProcess.POISSON:
                gaps = random.standard_exponential(_BLOCK)
            else:
                gaps = random.standard_gamma(self.burstiness, _BLOCK) / self.burstiness
            ticks = reached + np.cumsum(np.rint(gaps * _TICKS).astype(np.int64))
            reached = ticks[-1]
            yield ticks

    def place(self, ticks: Integers) -> Integers:
        """When each of these ticks, in order, is reached: those of them that are planned."""
        if self.process is ArrivalProcess.TRACE:
            return ticks
        planned = ticks[: np.searchsorted(ticks, self._end_ticks)]
        if not planned.size:
            return planned
        # The last stretch that begins at or before it: silent stretches begin where they end and hold nothing.
        low, high = (bisect_right(self._first_ticks, int(tick)) for tick in planned[[0, -1]])
        stretches = self._stretches[low - 1 : high]
        cuts = np.searchsorted(planned, [stretch.first_ticks for stretch in stretches[1:]])
        parts = np.split(planned, cuts)
        return np.concatenate([s.offsets_ns(part) for s, part in zip(stretches, parts, strict=True) if part.size])


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A piece in its place."""

    piece: Piece
    start_ns: int
    arrivals_before: Fraction
    first_ticks: int
    """``arrivals_before`` in ticks, rounded up."""
    ticks_per_arrival: int

    def offsets_ns(self, ticks: Integers) -> Integers:
        if self.ticks_per_arrival == 1 and self.piece.start_rps == self.piece.end_rps:
            return self._evenly_spaced(ticks)
        before = self.arrivals_before * self.ticks_per_arrival
        arrivals = ((ticks - self.first_ticks) + float(self.first_ticks - before)) / self.ticks_per_arrival
        start, end, length_ns = self.piece.start_rps, self.piece.end_rps, self.piece.length_ns
        slope = 0.0 if length_ns is None else (end - start) / (length_ns / _NS_PER_S)
        # The root of start * t + slope * t**2 / 2 = arrivals in the form that cancels no digits, also at slope 0.
        divisor = start + np.sqrt(np.maximum(start * start + 2 * slope * arrivals, 0.0))
        seconds = np.divide(2 * arrivals, divisor, out=np.zeros_like(arrivals), where=divisor > 0)
        offsets: Integers = np.rint(seconds * _NS_PER_S).astype(np.int64)
        return self.start_ns + (offsets if length_ns is None else np.minimum(offsets, length_ns))

    def _evenly_spaced(self, numbers: Integers) -> Integers:
        """In whole numbers: the same to the nanosecond after any number of arrivals. Halves go to the even side."""
        gap = _NS_PER_S / _exact(self.piece.start_rps)
        first = self.start_ns + (int(numbers[0]) - self.arrivals_before) * gap
        parts = math.lcm(gap.denominator, first.denominator)
        whole, rest = divmod(first.numerator * (parts // first.denominator), parts)
        step = gap.numerator * (parts // gap.denominator)
        fits = 2 * (rest + step * len(numbers)) < _LAST and 2 * parts < _LAST
        position = rest + np.arange(len(numbers), dtype=np.int64 if fits else object) * step
        below, beyond = whole + position // parts, 2 * (position % parts)
        rounded: Integers = (below + ((beyond > parts) | ((beyond == parts) & (below % 2 == 1)))).astype(np.int64)
        return rounded


class _Reader:
    """Reads a schedule block by block and holds no more than one block of it."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._blocks = schedule.unit_blocks()
        self._ticks = np.empty(0, np.int64)
        self._number = 0
        self._last_ns = 0

    def read(self) -> tuple[Integers, Integers]:
        """Numbers and offsets of the next arrivals; none where the plan, as known now, has no more of them."""
        if not self._ticks.size:
            self._ticks = next(self._blocks, self._ticks)
        # Two arrivals within a billionth of a gap could change places by rounding on a ramp.
        offsets = np.maximum.accumulate(np.maximum(self._schedule.place(self._ticks), self._last_ns))
        length_ns = self._schedule.length_ns
        if length_ns is not None:
            offsets = offsets[: np.searchsorted(offsets, length_ns)]
        numbers = np.arange(self._number, self._number + offsets.size, dtype=np.int64)
        if offsets.size:
            self._ticks = self._ticks[offsets.size :]
            self._number += offsets.size
            self._last_ns = int(offsets[-1])
        return numbers, offsets


class DueCount:
    """How many arrivals are due before a time. Asked for later and later times it computes each arrival once, however
    long the test has been going on: a million of them take some 0.4 s, for which an event loop would stand still.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._begin()

    def _begin(self) -> None:
        self._reader = _Reader(self._schedule)
        self._passed = 0
        self._offsets = np.empty(0, np.int64)
        self._asked_ns = 0

    def before(self, offset_ns: int) -> int:
        if offset_ns < self._asked_ns:
            self._begin()
        self._asked_ns = offset_ns
        while not self._offsets.size or self._offsets[-1] < offset_ns:
            offsets = self._reader.read()[1]
            if not offsets.size:
                break
            self._passed += self._offsets.size
            self._offsets = offsets
        return self._passed + int(np.searchsorted(self._offsets, offset_ns))


class _Share:
    def __init__(self, schedule: Schedule, share: int, shares: int, first: int) -> None:
        self._reader = _Reader(schedule)
        self._share, self._shares, self._first = share, shares, first
        self._ready: Iterator[Arrival] = iter(())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Arrival:
        while (arrival := next(self._ready, None)) is None:
            numbers, offsets = self._reader.read()
            if not numbers.size:
                raise StopIteration
            mine = (numbers % self._shares == self._share) & (numbers >= self._first)
            self._ready = map(Arrival, numbers[mine].tolist(), offsets[mine].tolist())
        return arrival
