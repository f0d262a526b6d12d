"""The figures of a run that goes on, from the workers' merged snapshots: what it amounts to, and how it goes now.

"So far" is from the first request on, warm-up included; the window is cut out at the end, from every request.
Percentiles are those of a histogram, within 0.5 %.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final

from vllm_locust.aggregate import RunAggregate
from vllm_locust.duration import seconds
from vllm_locust.histogram import LogHistogram
from vllm_locust.metrics import CATALOGUE
from vllm_locust.outcome import Outcome
from vllm_locust.statistics import PERCENTILES

RECENT_NS: Final = 5_000_000_000
"""What is told of "now" is of the requests that ended in so long a time."""
LATENCIES: Final = ("ttft", "ttft_from_schedule", "tpot", "itl", "chunk_gap", "e2e", "schedule_lag", "receive_lag")
"""Names of the catalogue, in the order of the tables."""
CHARTED: Final = ("ttft", "ttft_from_schedule", "tpot", "itl", "e2e", "schedule_lag", "receive_lag")
_CHARTED_PERCENTILES: Final = ("p50", "p90", "p99")


def finished(aggregate: RunAggregate) -> int:
    return sum(aggregate.finished.values())


def totals(aggregate: RunAggregate) -> dict[str, Any]:
    """Counts since the beginning; ``good_fraction`` is None where no request could be judged."""
    done, ok = finished(aggregate), aggregate.finished.get(Outcome.OK, 0)
    judged = aggregate.good + aggregate.not_good
    return {
        "sent": aggregate.sent,
        "in_flight": aggregate.in_flight,
        "waiting_arrivals": aggregate.waiting_arrivals,
        "dropped_arrivals": aggregate.dropped_arrivals,
        "finished": done,
        "ok": ok,
        "failed": done - ok,
        "prompt_tokens": aggregate.prompt_tokens,
        "output_tokens": aggregate.output_tokens,
        "chunks": aggregate.chunks,
        "coalesced_chunks": aggregate.coalesced_chunks,
        "good": aggregate.good,
        "not_good": aggregate.not_good,
        "good_fraction": aggregate.good / judged if judged else None,
    }


def outcomes(aggregate: RunAggregate) -> dict[str, int]:
    """How many requests ended how, the most first."""
    found = sorted(aggregate.finished.items(), key=lambda pair: -pair[1])
    return {str(outcome): count for outcome, count in found if count}


def latency_table(aggregate: RunAggregate) -> list[dict[str, Any]]:
    """A row for each metric of ``LATENCIES`` that has a sample: ``metric title n mean_s p50_s … max_s``, seconds."""
    rows = []
    for name in LATENCIES:
        histogram = aggregate.histograms[name]
        if histogram.n:
            row = {
                "metric": name,
                "title": CATALOGUE[name].title,
                "n": histogram.n,
                "mean_s": seconds(histogram.mean_ns),
            }
            rows.append(row | _percentiles(histogram) | {"max_s": seconds(histogram.max_ns)})
    return rows


def _percentiles(histogram: LogHistogram) -> dict[str, float | None]:
    return {f"{label}_s": seconds(histogram.quantile(q)) for label, q in PERCENTILES.items()}


class Recent:
    """What has come within the last ``RECENT_NS``, by the aggregates that were offered about once a second."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, RunAggregate]] = deque()

    def figures(self, now_ns: int, aggregate: RunAggregate) -> dict[str, Any]:
        """Rates per second and percentiles in seconds, None where nothing tells of them; also the in-flight counts."""
        while len(self._seen) > 1 and now_ns - self._seen[0][0] > RECENT_NS:
            self._seen.popleft()
        part, length_s = self._since_first(now_ns, aggregate)
        self._seen.append((now_ns, aggregate))
        point: dict[str, Any] = {
            "in_flight": aggregate.in_flight,
            "waiting_arrivals": aggregate.waiting_arrivals,
        }
        if part is None:
            return point
        point |= _rates(part, length_s)
        for name in CHARTED:
            histogram = part.histograms[name]
            for label in _CHARTED_PERCENTILES:
                point[f"{name}_{label}_s"] = seconds(histogram.quantile(Fraction(PERCENTILES[label])))
        return point

    def _since_first(self, now_ns: int, aggregate: RunAggregate) -> tuple[RunAggregate | None, float]:
        if not self._seen:
            return None, 0.0
        at_ns, earlier = self._seen[0]
        try:
            part = aggregate.since(earlier)
        except ValueError:
            # A worker that has left, or began anew, takes its numbers along.
            self._seen.clear()
            return None, 0.0
        return (part, (now_ns - at_ns) / 1e9) if now_ns > at_ns else (None, 0.0)


def _rates(part: RunAggregate, seconds: float) -> dict[str, Any]:
    judged = part.good + part.not_good
    rates: dict[str, Any] = {
        "achieved_rps": part.sent / seconds,
        "requests_per_s": part.finished.get(Outcome.OK, 0) / seconds,
        "input_tokens_per_s": part.prompt_tokens / seconds,
        "output_tokens_per_s": part.output_tokens / seconds,
        "dropped_per_s": part.dropped_arrivals / seconds,
        "goodput_rps": part.good / seconds if judged else None,
        "failures_per_s": {
            str(outcome): count / seconds for outcome, count in part.finished.items() if outcome != Outcome.OK and count
        },
    }
    return rates


def worker_row(worker_id: str, aggregate: RunAggregate, health: Mapping[str, float | None] | None) -> dict[str, Any]:
    """One worker so far, with its own condition in its last second."""
    condition = health or {}
    return {
        "worker_id": worker_id,
        "sent": aggregate.sent,
        "in_flight": aggregate.in_flight,
        "finished": finished(aggregate),
        "failed": finished(aggregate) - aggregate.finished.get(Outcome.OK, 0),
        "output_tokens": aggregate.output_tokens,
        "ttft_p99_s": seconds(aggregate.histograms["ttft"].quantile(PERCENTILES["p99"])),
        "schedule_lag_p99_s": seconds(aggregate.histograms["schedule_lag"].quantile(PERCENTILES["p99"])),
        "receive_lag_p99_s": seconds(aggregate.histograms["receive_lag"].quantile(PERCENTILES["p99"])),
        "cpu_fraction": condition.get("cpu_fraction"),
        "loop_lag_s": seconds(condition.get("loop_lag_ns")),
        "gc_pause_s": seconds(condition.get("gc_pause_ns")),
        "open_fds": condition.get("open_fds"),
        "rss_bytes": condition.get("rss_bytes"),
        "spooled_batches": condition.get("spooled_batches"),
    }
