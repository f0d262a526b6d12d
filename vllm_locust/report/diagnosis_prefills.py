"""What prefills did to other requests' streams, from the clients' own times.

A server's step that ends a prompt's prefill gives that request its first token, and every running stream its next one.
So a gap of a stream that holds another request's first token at its end holds its prefill, or its last piece.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final

import numpy as np
import numpy.typing as npt

from vllm_locust.diagnosis.figures import PrefillFigures
from vllm_locust.histogram import LogHistogram
from vllm_locust.phases import Phase
from vllm_locust.report.columns import Flags, Floats, Ints, RequestColumns
from vllm_locust.report.stage_samples import StageSamples
from vllm_locust.statistics import percentile

_P50, _P90 = Fraction(1, 2), Fraction(9, 10)
_SHORT: Final = 1 / 4
"""Of a long prompt's length."""
_TOLERANCE_NS: Final = 2_000_000
"""The chunks of one step may come a little apart. At most a quarter of the gap."""


class FirstTokens:
    """When requests of all phases got their first token, and how long their prompts were. Some 16 bytes a request.
    ``settle`` once all are there.
    """

    def __init__(self) -> None:
        self._parts: dict[str | None, list[tuple[Ints, Floats]]] = {}
        self._times: dict[str | None, Ints] = {}
        self._tokens_before: dict[str | None, Floats] = {}

    def add(self, columns: RequestColumns) -> None:
        ttft_ns, prompt = columns.floats("ttft_ns"), columns.floats("prompt_tokens")
        if columns.has("cached_prompt_tokens"):
            prompt = np.maximum(prompt - np.nan_to_num(columns.floats("cached_prompt_tokens")), 0.0)
        known = ~np.isnan(ttft_ns) & ~np.isnan(prompt)
        first_unix_ns = columns.ints("sent_unix_ns") + np.nan_to_num(ttft_ns).astype(np.int64)
        for target, mine in by_target(columns):
            rows = mine & known
            self._parts.setdefault(target, []).append((first_unix_ns[rows], prompt[rows]))

    @property
    def targets(self) -> int:
        return len(self._times)

    def settle(self) -> None:
        for target, parts in self._parts.items():
            times, tokens = (np.concatenate(pieces) for pieces in zip(*parts, strict=True))
            order = np.argsort(times, kind="stable")
            self._times[target] = times[order]
            self._tokens_before[target] = np.concatenate(([0.0], np.cumsum(tokens[order])))
        self._parts = {}

    def between(self, target: str | None, after_unix_ns: Ints, until_unix_ns: Ints) -> tuple[Ints, Floats]:
        """How many of a replica's first tokens came in each interval, and the tokens of their prompts."""
        if target not in self._times:
            return np.zeros(len(after_unix_ns), np.int64), np.zeros(len(after_unix_ns))
        times, before = self._times[target], self._tokens_before[target]
        first, last = (np.searchsorted(times, edge, side="right") for edge in (after_unix_ns, until_unix_ns))
        return last - first, before[last] - before[first]


def by_target(columns: RequestColumns) -> list[tuple[str | None, Flags]]:
    if not columns.has("target"):
        return [(None, np.ones(columns.rows, dtype=np.bool_))]
    targets = np.array(columns.texts("target"), dtype=object)
    return [(target, np.asarray(targets == target, dtype=np.bool_)) for target in dict.fromkeys(targets.tolist())]


class PrefillEffects:
    """Of one stage; ``samples`` are its requests."""

    def __init__(self, samples: StageSamples) -> None:
        keep = samples.flags["ok"] & ~np.isnan(samples.floats["ttft"]) & ~np.isnan(samples.floats["prompt_tokens"])
        self._prompt, self._ttft_ns = samples.floats["prompt_tokens"][keep], samples.floats["ttft"][keep]
        self._long_tokens = _long_tokens(self._prompt) if len(self._prompt) else None
        self._long, self._short, self._quiet = LogHistogram(), LogHistogram(), LogHistogram()
        self._with_prefill_n = self._with_prefill_ns = self._all_ns = 0

    def add(self, columns: RequestColumns, mine: Flags, first_tokens: FirstTokens) -> None:
        """``mine`` marks ok requests of the stage."""
        if self._long_tokens is None:
            return
        for target, rows in by_target(columns):
            start, end = _gaps(columns, mine & rows)
            slack = np.minimum((end - start) // 4, _TOLERANCE_NS)
            count, tokens = first_tokens.between(target, start + slack, end + slack)
            gap_ns, filled = end - start, count > 0
            self._quiet.record_many(gap_ns[~filled])
            self._long.record_many(gap_ns[filled & (tokens >= self._long_tokens)])
            self._short.record_many(gap_ns[filled & (tokens <= _SHORT * self._long_tokens)])
            self._with_prefill_n += int(filled.sum())
            self._with_prefill_ns += int(gap_ns[filled].sum())
            self._all_ns += int(gap_ns.sum())

    def figures(self) -> PrefillFigures:
        long = self._prompt >= (np.inf if self._long_tokens is None else self._long_tokens)
        quiet_ns = self._quiet.quantile(_P50)
        stretched = None
        if quiet_ns is not None and self._all_ns:
            stretched = max(0.0, (self._with_prefill_ns - self._with_prefill_n * quiet_ns) / self._all_ns)
        return PrefillFigures(
            requests=len(self._prompt),
            long_tokens=self._long_tokens,
            long_share=float(long.mean()) if len(long) else None,
            ttft_p90_long_ns=_p90(self._ttft_ns[long]),
            ttft_p90_rest_ns=_p90(self._ttft_ns[~long]),
            gaps_long=self._long.n,
            gap_p50_long_ns=self._long.quantile(_P50),
            gaps_short=self._short.n,
            gap_p50_short_ns=self._short.quantile(_P50),
            gaps_quiet=self._quiet.n,
            gap_p50_quiet_ns=quiet_ns,
            stretched_share=stretched,
        )


def _long_tokens(prompt: Floats) -> float:
    """From here on a prompt is one of the longest tenth. Where many have the same length, those beyond it are fewer;
    where all have, they are all alike.
    """
    limit = percentile(np.sort(prompt), _P90)
    beyond = prompt[prompt > limit]
    if len(beyond) and (prompt >= limit).mean() > 2 * (1 - _P90):
        return float(beyond.min())
    return limit


def _p90(values_ns: Floats) -> float | None:
    return percentile(np.sort(values_ns), _P90) if len(values_ns) else None


def _gaps(columns: RequestColumns, mine: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Start and end of each gap between chunks."""
    keep = mine[columns.chunk_request]
    owner = columns.chunk_request[keep]
    times = columns.chunk_ns[keep] + columns.ints("sent_unix_ns")[owner]
    same = owner[1:] == owner[:-1]
    return times[:-1][same], times[1:][same]


class Turns:
    """Of each request of the window, whether its prompt repeats an earlier one of the run: a conversation's later turn.
    Some 20 bytes a request.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Ints, Ints, Flags]] = []

    def add(self, columns: RequestColumns) -> None:
        if not (columns.has("turn") and columns.has("conversation_id")):
            return
        known = columns.known("turn") & columns.known("conversation_id")
        ids = np.array([hash(text) for text in columns.texts("conversation_id")], dtype=np.int64)
        in_window = columns.is_equal("phase", Phase.WINDOW)
        self._parts.append((np.where(known, ids, 0), np.where(known, columns.ints("turn"), -1), in_window))

    def later_share(self) -> float | None:
        """None where no request of the window belongs to a conversation."""
        if not self._parts:
            return None
        ids, turns, in_window = (np.concatenate(parts) for parts in zip(*self._parts, strict=True))
        known = turns >= 0
        if not (known & in_window).any():
            return None
        _, places = np.unique(ids[known], return_inverse=True)
        first = np.full(places.max() + 1, np.iinfo(np.int64).max)
        np.minimum.at(first, places, turns[known])
        later = turns[known] > first[places]
        return float((later & in_window[known]).sum() / in_window.sum())
