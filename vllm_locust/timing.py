"""The times of one request, turned into the metrics that the field knows. Integer nanoseconds; unknown is None.

``chunk_ns`` are the arrivals of the token-bearing chunks, on the same axis as ``sent_ns`` and in the order of arrival.
Only differences count: with times after ``sent``, as records keep them, ``sent_ns`` is 0.
"""

from __future__ import annotations

from collections.abc import Sequence


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
