"""The times of one request, turned into the metrics that the field knows. Integer nanoseconds; unknown is None.

``chunk_ns`` are the arrivals of the token-bearing chunks, on the same axis as ``sent_ns`` and in the order of arrival.
Only differences count: with times after ``sent``, as records keep them, ``sent_ns`` is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class WeightedSamples(NamedTuple):
    """``weights[i]`` samples of ``values_ns[i]`` each."""

    values_ns: list[int]
    weights: list[int]


def _divided(total: int, parts: int) -> int:
    """The quotient to the nearest nanosecond, halves up."""
    return (2 * total + parts) // (2 * parts)


def ttft_ns(sent_ns: int, chunk_ns: Sequence[int]) -> int | None:
    """First token-bearing chunk − sent. With the scheduled time in place of ``sent_ns`` it is TTFT from schedule."""
    return chunk_ns[0] - sent_ns if chunk_ns else None


def e2e_ns(sent_ns: int, chunk_ns: Sequence[int], body_ns: int | None = None) -> int | None:
    """Last token-bearing chunk − sent. Where all tokens came as one JSON body, ``body_ns`` is when its end arrived."""
    if chunk_ns:
        return chunk_ns[-1] - sent_ns
    return None if body_ns is None else body_ns - sent_ns


def tpot_ns(chunk_ns: Sequence[int], output_tokens: int | None) -> int | None:
    """(Last token-bearing chunk − first) / (output tokens − 1); None below two tokens or when all came in one chunk."""
    if output_tokens is None or output_tokens < 2 or len(chunk_ns) < 2:
        return None
    return _divided(chunk_ns[-1] - chunk_ns[0], output_tokens - 1)


def tpot_reads_low(chunk_tokens: Sequence[int] | None) -> bool | None:
    """Whether the first chunk held several tokens: they share the divisor of TPOT but took none of its time.

    None where the tokens of the chunks are not known.
    """
    return chunk_tokens[0] > 1 if chunk_tokens else None


def chunk_gaps_ns(chunk_ns: Sequence[int]) -> list[int]:
    """The gaps between successive token-bearing chunks."""
    return [after - before for before, after in pairwise(chunk_ns)]


def itl_samples(chunk_ns: Sequence[int], chunk_tokens: Sequence[int] | None) -> WeightedSamples | None:
    """The same gaps per token: a chunk of k tokens after a gap g is k samples of g/k, to the nearest nanosecond.

    A chunk with text but no new token (text that the server had held back) is no sample; its gap counts to the next
    chunk that has one, so that the samples still add up to the time that passed. None where the tokens of the chunks
    are not known.
    """
    if chunk_tokens is None:
        return None
    samples = WeightedSamples([], [])
    since_ns = chunk_ns[0] if chunk_ns else 0
    for arrival_ns, tokens in zip(chunk_ns[1:], chunk_tokens[1:], strict=True):
        if tokens:
            samples.values_ns.append(_divided(arrival_ns - since_ns, tokens))
            samples.weights.append(tokens)
            since_ns = arrival_ns
    return samples


def mean_tokens_per_chunk(chunk_ns: Sequence[int], output_tokens: int | None) -> float | None:
    """What stands beside the chunk gap where ITL is null."""
    return output_tokens / len(chunk_ns) if chunk_ns and output_tokens is not None else None
