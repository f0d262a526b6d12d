"""What a client reported, joined with the truth log request by request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tests.bench.truth import Nanoseconds, TrueRequest, TruthLog

Milliseconds = float


@dataclass(frozen=True, slots=True)
class ReportedRequest:
    """One request as the client told it. ``key`` is the request id, or the serial number in its first token."""

    key: str | int
    ttft_ns: int | None
    gaps_ns: Nanoseconds | None
    """One per token after the first."""
    sent_mono_ns: int | None = None
    """Where known, on this clock or the next, chunk times are compared on the common clock too."""
    sent_unix_ns: int | None = None
    own_stamp: npt.NDArray[np.bool_] | None = None
    """Tokens whose time is a kernel stamp of their own; None where the client makes no such difference."""


@dataclass(frozen=True, slots=True)
class Reported:
    requests: list[ReportedRequest]
    headline: Mapping[str, float | str | None] = field(default_factory=dict)
    """The client's own summary, as printed by it."""
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Nearest rank, in milliseconds."""

    n: int
    p50: Milliseconds
    p99: Milliseconds
    p99_9: Milliseconds
    max: Milliseconds


def quantiles(values_ns: Nanoseconds) -> Quantiles | None:
    n = len(values_ns)
    if n == 0:
        return None
    ordered = np.sort(values_ns)

    def rank(q: float) -> Milliseconds:
        return float(ordered[max(math.ceil(q * n), 1) - 1]) / 1e6

    return Quantiles(n, rank(0.5), rank(0.99), rank(0.999), float(ordered[-1]) / 1e6)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Errors are absolute differences between reported and true; a true TTFT runs from request read to token sent."""

    joined: int
    unjoined: int
    """Reported requests that the truth does not know."""
    missing: int
    """Requests that the server finished in the window and the client did not report."""
    miscounted: int
    """Joined requests with another number of chunks than the server sent: their gaps are left out."""
    ttft_reported: Quantiles | None
    ttft_true: Quantiles | None
    ttft_error: Quantiles | None
    gap_reported: Quantiles | None
    gap_true: Quantiles | None
    gap_error: Quantiles | None
    chunk_error: Quantiles | None
    """On the common clock; only for clients that report when they sent."""
    chunk_error_own_stamp: Quantiles | None
    own_stamp_share: float | None


class _Columns:
    """Values of all requests, gathered by name."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Nanoseconds]] = {}

    def add(self, name: str, values: Nanoseconds) -> None:
        self._parts.setdefault(name, []).append(values)

    def all(self, name: str) -> Nanoseconds:
        parts = self._parts.get(name)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def compare(truth: TruthLog, reported: Reported, start_ns: int, end_ns: int) -> Accuracy:
    """Only tokens sent, and requests begun, inside the window count."""
    by_id = {r.request_id: r for r in truth.requests}
    by_serial = {r.serial: r for r in truth.requests}
    columns, unjoined, miscounted = _Columns(), 0, 0
    seen: set[int] = set()
    for r in reported.requests:
        true = by_id.get(r.key) if isinstance(r.key, str) else by_serial.get(r.key)
        if true is None:
            unjoined += 1
            continue
        seen.add(true.serial)
        inside = (true.sent_ns >= start_ns) & (true.sent_ns < end_ns)
        if r.ttft_ns is not None and len(true.sent_ns) and start_ns <= true.read_ns and inside[0]:
            _add_ttft(columns, r.ttft_ns, true)
        if r.gaps_ns is not None and len(r.gaps_ns) == len(true.sent_ns) - 1:
            _add_chunks(columns, r, true, inside, truth.unix_minus_mono_ns)
        elif r.gaps_ns is not None:
            miscounted += 1
    finished = {r.serial for r in truth.requests if r.state == "finished" and _ended_within(r, start_ns, end_ns)}
    return _accuracy(columns, len(seen), unjoined, len(finished - seen), miscounted)


def _ended_within(request: TrueRequest, start_ns: int, end_ns: int) -> bool:
    return len(request.sent_ns) > 0 and start_ns <= int(request.sent_ns[-1]) < end_ns


def _add_ttft(columns: _Columns, ttft_ns: int, true: TrueRequest) -> None:
    true_ttft = int(true.sent_ns[0]) - true.read_ns
    columns.add("ttft", np.array([ttft_ns], np.int64))
    columns.add("ttft_true", np.array([true_ttft], np.int64))
    columns.add("ttft_error", np.array([abs(ttft_ns - true_ttft)], np.int64))


def _add_chunks(
    columns: _Columns, reported: ReportedRequest, true: TrueRequest, inside: npt.NDArray[np.bool_], unix_minus_mono: int
) -> None:
    assert reported.gaps_ns is not None
    gaps, true_gaps = reported.gaps_ns, np.diff(true.sent_ns)
    columns.add("gap", gaps[inside[1:]])
    columns.add("gap_true", true_gaps[inside[1:]])
    columns.add("gap_error", np.abs(gaps - true_gaps)[inside[1:]])
    sent = reported.sent_mono_ns
    if sent is None and reported.sent_unix_ns is not None:
        sent = reported.sent_unix_ns - unix_minus_mono
    if sent is None or reported.ttft_ns is None:
        return
    arrivals = sent + reported.ttft_ns + np.concatenate(([0], np.cumsum(gaps)))
    errors = np.abs(arrivals - true.sent_ns)
    columns.add("chunk_error", errors[inside])
    if reported.own_stamp is not None:
        columns.add("chunk_error_own", errors[inside & reported.own_stamp])


def _accuracy(columns: _Columns, joined: int, unjoined: int, missing: int, miscounted: int) -> Accuracy:
    own, every = columns.all("chunk_error_own"), columns.all("chunk_error")
    return Accuracy(
        joined=joined,
        unjoined=unjoined,
        missing=missing,
        miscounted=miscounted,
        ttft_reported=quantiles(columns.all("ttft")),
        ttft_true=quantiles(columns.all("ttft_true")),
        ttft_error=quantiles(columns.all("ttft_error")),
        gap_reported=quantiles(columns.all("gap")),
        gap_true=quantiles(columns.all("gap_true")),
        gap_error=quantiles(columns.all("gap_error")),
        chunk_error=quantiles(every),
        chunk_error_own_stamp=quantiles(own),
        own_stamp_share=len(own) / len(every) if len(own) else None,
    )
