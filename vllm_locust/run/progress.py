"""Lines about a run while it goes on, from the workers' merged snapshots."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal

from vllm_locust.aggregate import RunAggregate
from vllm_locust.histogram import LogHistogram
from vllm_locust.outcome import Outcome

QUIET_INTERVAL_NS = 10_000_000_000
"""Between two lines where standard error is not a terminal."""


class Progress:
    """``show`` may be called often; it decides itself when to print."""

    def __init__(self, mode: Literal["auto", "off", "json"]) -> None:
        self._mode = mode
        self._terminal = sys.stderr.isatty()
        self._last_ns: int | None = None
        self._last: RunAggregate | None = None
        self._drawn = False

    def _write(self, text: str) -> None:
        """Nobody may be reading: that must not end a run."""
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except OSError:
            self._mode = "off"

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
    ) -> None:
        """``offered_rps``: what is asked for at this moment of an open loop. ``search``: how far that is."""
        if self._mode == "off":
            return
        interval_ns = 1_000_000_000 if self._terminal or self._mode == "json" else QUIET_INTERVAL_NS
        if self._last_ns is not None and now_ns - self._last_ns < interval_ns:
            return
        aggregate = merged()
        facts = self._facts(now_ns, phase, left_s, aggregate) | {
            "stage": stage,
            "offered_rps": _rounded(offered_rps),
            "search": search,
        }
        self._last_ns, self._last = now_ns, aggregate
        if self._mode == "json":
            self._write(json.dumps(facts, allow_nan=False) + "\n")
            return
        line = _line(facts)
        if self._terminal:
            self._write(f"\r\x1b[K{line}")
            self._drawn = True
        else:
            self._write(line + "\n")

    def end(self) -> None:
        if self._drawn:
            self._write("\n")
            self._drawn = False

    def _facts(self, now_ns: int, phase: str, left_s: float | None, now: RunAggregate) -> dict[str, Any]:
        before, before_ns = self._last, self._last_ns
        seconds = None if before_ns is None else (now_ns - before_ns) / 1e9
        done, tokens = _finished(now), now.output_tokens
        return {
            "phase": phase,
            "left_s": None if left_s is None else round(left_s, 1),
            "in_flight": now.in_flight,
            "waiting_arrivals": now.waiting_arrivals,
            "dropped_arrivals": now.dropped_arrivals,
            "achieved_rps": None if before is None or not seconds else round((now.sent - before.sent) / seconds, 2),
            "finished": done,
            "failed": done - now.finished.get(Outcome.OK, 0),
            "requests_per_s": None if before is None or not seconds else round((done - _finished(before)) / seconds, 2),
            "output_tokens_per_s": None
            if before is None or not seconds
            else round((tokens - before.output_tokens) / seconds, 1),
            "ttft_p50_s": _quantile(now.histograms["ttft"], Fraction(1, 2)),
            "ttft_p99_s": _quantile(now.histograms["ttft"], Fraction(99, 100)),
            "tpot_p50_s": _quantile(now.histograms["tpot"], Fraction(1, 2)),
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
