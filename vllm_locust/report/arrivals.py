"""What arrived in each stretch of time, from whichever requests: the numerators of all rates (see ``metrics``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from vllm_locust.phases import interval_index
from vllm_locust.report.columns import Flags, Floats, Ints, RequestColumns, first_known
from vllm_locust.report.run_facts import Interval

RATES: Final = ("achieved_rps", "requests_per_s", "output_tokens_per_s", "input_tokens_per_s", "total_tokens_per_s")


class ArrivalCounts:
    """Counts for intervals that are in order and do not overlap."""

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self._starts = [interval.start_unix_ns for interval in intervals]
        self._ends = [interval.end_unix_ns for interval in intervals]
        self._lengths_s = [interval.length_s for interval in intervals]
        self.sent, self.completed, self.output_tokens, self.input_tokens = np.zeros((4, len(intervals)))

    def add(self, columns: RequestColumns) -> None:
        if not self._starts:
            return
        sent = columns.ints("sent_unix_ns")
        self.sent += self._tally(sent, columns.sent.astype(np.float64))
        last = first_known(columns.floats("e2e_ns"), columns.last_ns, columns.floats("done_ns"))
        self.completed += self._tally_at(sent, last, columns.ok, np.ones(columns.rows))
        prompt_tokens = columns.floats("prompt_tokens")
        answered = first_known(columns.first_ns, columns.floats("ttft_ns"), last)
        self.input_tokens += self._tally_at(sent, answered, ~np.isnan(prompt_tokens), prompt_tokens)
        self._add_output_tokens(columns, sent, last)

    def _add_output_tokens(self, columns: RequestColumns, sent: Ints, last: Floats) -> None:
        """By chunk: with its own tokens where known, else with an equal share of the request's."""
        total = columns.floats("output_tokens")
        chunk_tokens, known = columns.chunk_tokens
        in_chunks = np.bincount(columns.chunk_request, weights=chunk_tokens, minlength=columns.rows)
        by_chunk = known & (in_chunks > 0)
        # The server's total is right where the chunks' tokens add up to another number.
        scale = np.where(by_chunk & ~np.isnan(total), total / np.where(by_chunk, in_chunks, 1), 1.0)
        share = np.nan_to_num(total) / np.maximum(columns.chunks, 1)
        weights = np.where(
            by_chunk[columns.chunk_request],
            chunk_tokens * scale[columns.chunk_request],
            share[columns.chunk_request],
        )
        times = sent[columns.chunk_request] + columns.chunk_ns
        self.output_tokens += self._tally(times, weights)
        in_one_piece = (columns.chunks == 0) & ~np.isnan(total)
        self.output_tokens += self._tally_at(sent, last, in_one_piece, total)

    def _tally_at(self, sent: Ints, after_ns: Floats, which: Flags, weights: Floats) -> Floats:
        known = which & ~np.isnan(after_ns)
        return self._tally(sent[known] + after_ns[known].astype(np.int64), weights[known])

    def _tally(self, times: Ints, weights: Floats) -> Floats:
        index, inside = interval_index(times, self._starts, self._ends)
        return np.bincount(index[inside], weights=weights[inside], minlength=len(self._starts)).astype(np.float64)

    def rates(self, position: int) -> dict[str, Any]:
        """Per second, of one interval; null where it has no length."""
        length = self._lengths_s[position] if self._lengths_s else 0.0
        if length <= 0:
            return dict.fromkeys(RATES)
        output, given = float(self.output_tokens[position]) / length, float(self.input_tokens[position]) / length
        return {
            "achieved_rps": float(self.sent[position]) / length,
            "requests_per_s": float(self.completed[position]) / length,
            "output_tokens_per_s": output,
            "input_tokens_per_s": given,
            "total_tokens_per_s": output + given,
        }
