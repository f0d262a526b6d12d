"""Lines about a run while it goes on, from the workers' merged snapshots, on standard error: the other is Locust's.

``auto``: one line that is drawn anew each second, on a terminal; nothing where there is none. ``json``: one object a
second, whose keys are those of ``_facts``. Counts are since the start of the load, warm-up included; rates and
percentiles are of the last ``recent_s`` seconds, at most ten and none before the first request, and percentiles of the
requests that ended in them.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Final, Literal

from vllm_locust.aggregate import RunAggregate
from vllm_locust.histogram import LogHistogram
from vllm_locust.outcome import Outcome

SCHEMA: Final = 1
INTERVAL_NS: Final = 1_000_000_000
RECENT_NS: Final = 10_000_000_000


class Progress:
    """``show`` may be called often; it decides itself when to print."""

    def __init__(self, mode: Literal["auto", "off", "json"]) -> None:
        self._json = mode == "json"
        self._silent = mode == "off" or (mode == "auto" and not sys.stderr.isatty())
        self._last_ns: int | None = None
        self._recent: deque[tuple[int, RunAggregate]] = deque()
        """What was known at each of the last lines, the oldest first."""
        self._drawn = False

    def _write(self, text: str) -> None:
        """Nobody may be reading: that must not end a run."""
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except OSError:
            self._silent = True

    def show(
        self,
        now_ns: int,
        phase: str,
        left_s: float | None,
        merged: Callable[[], RunAggregate],
        *,
        stage: str | None = None,
        offered_rps: float | None = None,
        search: str | None = None,
        probe: Mapping[str, Any] | None = None,
    ) -> None:
        """``offered_rps``: what is asked for at this moment of an open loop. ``search``: how far a search is, in words;
        ``probe`` the same as numbers.
        """
        if self._silent or (self._last_ns is not None and now_ns - self._last_ns < INTERVAL_NS):
            return
        aggregate = merged()
        facts = {
            "schema": SCHEMA,
            "phase": phase,
            "stage": stage,
            "search": search,
            "probe": None if probe is None else dict(probe),
            "left_s": None if left_s is None else round(left_s, 1),
            "offered_rps": _rounded(offered_rps),
            **self._facts(now_ns, aggregate),
        }
        self._last_ns = now_ns
        if self._json:
            self._write(json.dumps(facts, allow_nan=False) + "\n")
        else:
            self._write(f"\r\x1b[K{_line(facts)}")
            self._drawn = True

    def end(self) -> None:
        if self._drawn:
            self._write("\n")
            self._drawn = False

    def _facts(self, now_ns: int, now: RunAggregate) -> dict[str, Any]:
        while self._recent and (now_ns - self._recent[0][0] > RECENT_NS or not now.sent):
            self._recent.popleft()
        before_ns, before = self._recent[0] if self._recent else (now_ns, now)
        try:
            gained, seconds = now.since(before), (now_ns - before_ns) / 1e9
        except ValueError:
            # A worker began anew, or has left: what is known now does not hold what was known before.
            self._recent.clear()
            gained, seconds = RunAggregate(), 0.0
        self._recent.append((now_ns, now))
        done = _finished(now)

        def rate(more: int) -> float | None:
            return round(more / seconds, 3) if seconds else None

        return {
            "in_flight": now.in_flight,
            "waiting_arrivals": now.waiting_arrivals,
            "dropped_arrivals": now.dropped_arrivals,
            "sent": now.sent,
            "finished": done,
            "failed": done - now.finished.get(Outcome.OK, 0),
            "output_tokens": now.output_tokens,
            "recent_s": round(seconds, 3),
            "achieved_rps": rate(gained.sent),
            "requests_per_s": rate(_finished(gained)),
            "output_tokens_per_s": rate(gained.output_tokens),
            "ttft_p50_s": _quantile(gained.histograms["ttft"], Fraction(1, 2)),
            "ttft_p99_s": _quantile(gained.histograms["ttft"], Fraction(99, 100)),
            "tpot_p50_s": _quantile(gained.histograms["tpot"], Fraction(1, 2)),
        }


def _finished(aggregate: RunAggregate) -> int:
    return sum(aggregate.finished.values())


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _quantile(histogram: LogHistogram, q: Fraction) -> float | None:
    value_ns = histogram.quantile(q)
    return None if value_ns is None else round(value_ns / 1e9, 6)


_IF_ANY = (("waiting_arrivals", "waiting"), ("dropped_arrivals", "dropped"))


def _line(facts: dict[str, Any]) -> str:
    what = facts["search"] or facts["stage"]
    parts = [
        f"{facts['phase']:<8}" if what is None else f"{facts['phase']} {what:<8}",
        f"in flight {facts['in_flight']}",
        f"finished {facts['finished']}",
        f"failed {facts['failed']}",
    ]
    parts += [f"{word} {facts[name]}" for name, word in _IF_ANY if facts[name]]
    if facts["offered_rps"] is not None and facts["achieved_rps"] is not None:
        parts.append(f"offered {facts['offered_rps']:.1f}/s sent {facts['achieved_rps']:.1f}/s")
    if facts["requests_per_s"] is not None:
        parts += [f"{facts['requests_per_s']:.1f} requests/s", f"{facts['output_tokens_per_s']:.0f} output tokens/s"]
    if facts["ttft_p50_s"] is not None:
        parts.append(f"TTFT p50 {facts['ttft_p50_s'] * 1e3:.1f} ms p99 {facts['ttft_p99_s'] * 1e3:.1f} ms")
    if facts["tpot_p50_s"] is not None:
        parts.append(f"TPOT p50 {facts['tpot_p50_s'] * 1e3:.2f} ms")
    if facts["left_s"] is not None:
        parts.append(f"{facts['left_s']:.0f} s left")
    return " · ".join(parts)
