"""What the window's requests of one stage leave in memory: a few numbers for each request, and the pooled gaps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from vllm_locust.metrics import CATALOGUE, DISTRIBUTIONS, Per
from vllm_locust.pooled import PooledSample
from vllm_locust.report.columns import Flags, Floats, Gaps, Ints, RequestColumns
from vllm_locust.slo import Slo, judge_requests
from vllm_locust.statistics import PERCENTILES, few_samples, nearest_rank, percentile
from vllm_locust.verdict.evidence import Shift

PER_REQUEST: Final = tuple(m.name for m in DISTRIBUTIONS if m.per is Per.REQUEST)
POOLED: Final = tuple(m.name for m in DISTRIBUTIONS if m.per is not Per.REQUEST)
_TIMES: Final = (*PER_REQUEST, "slot_wait")
_NOT_STREAMED: Final = ("e2e", "done")
"""Latencies that an answer in one piece has as well."""
_KEPT_COUNTS: Final = ("prompt_tokens", "output_tokens", "prompt_tokens_planned")
_OF_CHUNKS: Final = ("first_width", "last_width", "chunks", "first_tokens", "tpot_divisor")
_FLAGS: Final = ("ok", "streamed", "good", "decided", "scheduled")


class BoundedGaps:
    """Gaps as reported, and the smallest and largest that they can have been where a chunk has no stamp of its own."""

    def __init__(self) -> None:
        self.certain = PooledSample()
        self.touched = PooledSample()
        self.lowest = PooledSample()
        self.highest = PooledSample()
        self.requests = 0
        """That gave one sample or more."""

    def add(self, gaps: Gaps) -> None:
        self.requests += int(np.count_nonzero(np.diff(gaps.request, prepend=-1)))
        touched = (gaps.width_before_ns > 0) | (gaps.width_after_ns > 0)
        self.certain.add(gaps.gap_ns[~touched], None if gaps.tokens is None else gaps.tokens[~touched])
        if touched.any():
            gap, tokens = gaps.gap_ns[touched], None if gaps.tokens is None else gaps.tokens[touched]
            self.touched.add(gap, tokens)
            self.lowest.add(np.maximum(gap - gaps.width_after_ns[touched], 0), tokens)
            self.highest.add(gap + gaps.width_before_ns[touched], tokens)

    @classmethod
    def union(cls, parts: Sequence[BoundedGaps]) -> BoundedGaps:
        whole = cls()
        for name in ("certain", "touched", "lowest", "highest"):
            setattr(whole, name, PooledSample.union(getattr(part, name) for part in parts))
        whole.requests = sum(part.requests for part in parts)
        return whole

    @property
    def n(self) -> int:
        return self.certain.n + self.touched.n

    @property
    def touched_share(self) -> float | None:
        """Of samples that touch a chunk without a stamp of its own."""
        return self.touched.n / self.n if self.n else None

    @property
    def reported(self) -> PooledSample:
        return PooledSample.union((self.certain, self.touched))

    def shifts(self, metric: str) -> Iterable[Shift]:
        if not self.touched.n:
            return
        reported = self.reported
        lowest = PooledSample.union((self.certain, self.lowest))
        highest = PooledSample.union((self.certain, self.highest))
        for name, q in PERCENTILES.items():
            if name not in few_samples(reported.n):
                rank = nearest_rank(reported.n, q)
                yield Shift(
                    metric=metric,
                    percentile=name,
                    reported_ns=reported.at_rank(rank),
                    lowest_ns=lowest.at_rank(rank),
                    highest_ns=highest.at_rank(rank),
                )


REFUSED: Final = (429, 503)
"""Status codes of a server, or of what lies before it, that does not take a request for now."""


class StageSamples:
    """Filled batch by batch; ``settle`` puts the requests into the order of sending."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.gaps = {name: BoundedGaps() for name in POOLED}
        self.widths = PooledSample()
        """Of the chunks of ok requests that have no stamp of their own: the interval in which each came."""
        self.refused = 0
        """Requests that got the answer 429 or 503."""
        self._sent: list[Ints] = []
        self._flags: dict[str, list[Flags]] = {}
        self._floats: dict[str, list[Floats]] = {}
        self.flags: dict[str, Flags] = {}
        self.floats: dict[str, Floats] = {}
        self.sent_unix_ns: Ints = np.empty(0, dtype=np.int64)

    def add(self, columns: RequestColumns, mine: Flags, slos: Sequence[Slo]) -> None:
        """The rows of a batch that ``mine`` marks."""
        if not mine.any():
            return
        self._sent.append(columns.ints("sent_unix_ns")[mine])
        outcomes = columns.texts("outcome")
        self.outcomes.update(str(outcomes[row]) for row in np.flatnonzero(mine))
        self.refused += int((np.isin(columns.ints("http_status"), REFUSED) & mine & ~columns.ok).sum())
        values = {name: columns.metric_ns(name) for name in _TIMES}
        good, decided = judge_requests(slos, columns.ok, columns.slo_values_ns())
        flags = (columns.ok, columns.flags("streamed"), good, decided, columns.known("scheduled_unix_ns"))
        for name, flag in zip(_FLAGS, flags, strict=True):
            self._flags.setdefault(name, []).append(flag[mine])
        counts = {name: columns.floats(name) for name in _KEPT_COUNTS}
        of_chunks = {
            "first_width": columns.first_width_ns,
            "last_width": columns.last_width_ns,
            "chunks": columns.chunks.astype(np.float64),
            "first_tokens": columns.first_tokens,
            "tpot_divisor": columns.tpot_divisor,
        }
        for name, column in (values | counts | of_chunks).items():
            self._floats.setdefault(name, []).append(column[mine])
        self.gaps["chunk_gap"].add(columns.chunk_gaps(mine & columns.ok))
        self.gaps["itl"].add(columns.itl_gaps(mine & columns.ok))
        widths = columns.chunk_width_ns[(mine & columns.ok)[columns.chunk_request]]
        self.widths.add(widths[widths > 0])

    def settle(self) -> None:
        if not self._sent:
            self.flags = {name: np.zeros(0, dtype=np.bool_) for name in _FLAGS}
            self.floats = {name: np.empty(0) for name in (*_TIMES, *_KEPT_COUNTS, *_OF_CHUNKS)}
            return
        sent = np.concatenate(self._sent)
        order = np.argsort(sent, kind="stable")
        self.sent_unix_ns = sent[order]
        self.flags = {name: np.concatenate(parts)[order] for name, parts in self._flags.items()}
        self.floats = {name: np.concatenate(parts)[order] for name, parts in self._floats.items()}

    @classmethod
    def union(cls, parts: Sequence[StageSamples]) -> StageSamples:
        whole = cls()
        for part in parts:
            whole.outcomes.update(part.outcomes)
            whole.refused += part.refused
            whole._sent += part._sent
            for name, flags in part._flags.items():
                whole._flags.setdefault(name, []).extend(flags)
            for name, floats in part._floats.items():
                whole._floats.setdefault(name, []).extend(floats)
        whole.widths = PooledSample.union(part.widths for part in parts)
        whole.gaps = {name: BoundedGaps.union([part.gaps[name] for part in parts]) for name in POOLED}
        whole.settle()
        return whole

    @property
    def attempted(self) -> int:
        return len(self.sent_unix_ns)

    @property
    def generator_lag_p99_ns(self) -> float | None:
        """By how much requests were sent late although a slot was free for them."""
        return _p99(self.floats["schedule_lag"] - self.floats["slot_wait"])

    @property
    def slot_wait_p99_ns(self) -> float | None:
        """Of all arrivals on record, also those that were never sent."""
        return _p99(self.floats["slot_wait"])

    def values(self, metric: str) -> Floats:
        """In the order of sending; of ok requests only, unless the metric is measured on all."""
        values = self.floats[metric]
        keep = ~np.isnan(values)
        if not CATALOGUE[metric].of_every_request:
            keep &= self.flags["ok"]
        return values[keep]

    def adjusted(self, metric: str) -> Floats:
        """``values``, with each failed request as infinite. Nothing where the metric does not apply to the stage: ok
        requests, and none of them has it."""
        ok = self.flags["ok"]
        values = np.where(ok, self.floats[metric], np.inf)
        failed_counts = np.ones(len(ok), dtype=np.bool_) if metric in _NOT_STREAMED else self.flags["streamed"]
        if metric == "ttft_from_schedule":
            failed_counts = failed_counts & self.flags["scheduled"]
        if ok.any() and not len(self.values(metric)):
            return np.empty(0)
        return values[~np.isnan(values) & (ok | failed_counts)]

    def failed_gap_samples(self, metric: str) -> int:
        """Each failed request stands for as many samples as an ok one that has any, on average: its share is kept."""
        ok = self.flags["ok"]
        failed = int((~ok & self.flags["streamed"]).sum())
        gaps = self.gaps[metric]
        if not gaps.n:
            return 0 if ok.any() else failed
        return -(-failed * gaps.n // gaps.requests)

    def shifts(self) -> list[Shift]:
        """How far percentiles could be off, where chunks came without stamps of their own."""
        shifts = [shift for name in POOLED for shift in self.gaps[name].shifts(name)]
        first, last = self.floats["first_width"], self.floats["last_width"]
        if not (np.nan_to_num(first).any() or np.nan_to_num(last).any()):
            return shifts
        divisor = self.floats["tpot_divisor"]
        for metric, earlier, later in (
            ("ttft", first, None),
            ("ttft_from_schedule", first, None),
            ("e2e", np.nan_to_num(last), None),
            ("tpot", last / divisor, first / divisor),
        ):
            shifts += self._scalar_shifts(metric, earlier, later)
        return shifts

    def _scalar_shifts(self, metric: str, earlier: Floats, later: Floats | None) -> Iterable[Shift]:
        reported = self.floats[metric]
        keep = self.flags["ok"] & ~np.isnan(reported) & ~np.isnan(earlier)
        low, values = np.sort((reported - earlier)[keep]), np.sort(reported[keep])
        high = values if later is None else np.sort((reported + later)[keep])
        for name, q in PERCENTILES.items():
            if len(values) and name not in few_samples(len(values)):
                yield Shift(
                    metric=metric,
                    percentile=name,
                    reported_ns=percentile(values, q),
                    lowest_ns=percentile(low, q),
                    highest_ns=percentile(high, q),
                )


def _p99(values: Floats) -> float | None:
    known = np.sort(values[~np.isnan(values)])
    return percentile(known, PERCENTILES["p99"]) if len(known) else None
