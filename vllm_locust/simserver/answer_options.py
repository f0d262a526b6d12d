"""How a server answers, whatever it is asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    stream_interval: int
    sse_keep_alive_interval_s: float | None
    prompt_tokens_details: bool
    block_size: int
    prefix_caching: bool
