"""The truth log: one JSON line per request, written when it ends, with the real times of every send.

Times are nanoseconds; those ending in ``_mono_ns``, and all of chunks, headers and body, are CLOCK_MONOTONIC of this
machine, read right before and right after the bytes were handed to the kernel. Where it did not take them at once the
time after is the one at which it had taken them all; null where the connection ended first.
(Under TLS asyncio's own buffer of 64 KiB counts as the kernel's.)
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import orjson


@dataclass(slots=True)
class Truth:
    """What really happened to one request. The lists of ``chunk_…`` have one entry per token-bearing chunk sent."""

    request_id: str
    """The header ``X-Request-Id``, else the server's own."""
    response_id: str | None
    path: str
    received_unix_ns: int
    received_mono_ns: int
    """When the last byte of the request had been read."""
    streamed: bool | None = None
    http_status: int | None = None
    fault: str | None = None
    fault_happened: bool = False
    outcome: str | None = None
    """The outcome that a client without time limits reports; ``client_closed`` when the client went first."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    """Tokens sent, over all choices."""
    reasoning_tokens: int = 0
    finish_reasons: list[str | None] = field(default_factory=list)
    """One per choice."""
    num_preemptions: int = 0
    headers_before_ns: int | None = None
    headers_after_ns: int | None = None
    chunk_before_ns: list[int] = field(default_factory=list)
    chunk_after_ns: list[int | None] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    chunk_text_bytes: list[int] = field(default_factory=list)
    """0: tokens without text, visible only by ids or a usage count."""
    chunk_choice: list[int] = field(default_factory=list)
    chunk_kind: list[str] = field(default_factory=list)
    """``content`` ``reasoning`` ``tool_call`` ``text``."""
    done_before_ns: int | None = None
    """The [DONE] event, or the JSON body of an answer that is not streamed."""
    done_after_ns: int | None = None
    ended_mono_ns: int | None = None

    def settle(self) -> None:
        """Chunks that were never handed to the kernel were never sent."""
        sent = len(self.chunk_before_ns)
        unsent = sum(self.chunk_tokens[sent:])
        self.output_tokens -= unsent
        self.reasoning_tokens -= sum(
            tokens
            for tokens, kind in zip(self.chunk_tokens[sent:], self.chunk_kind[sent:], strict=True)
            if kind == "reasoning"
        )
        for values in (self.chunk_tokens, self.chunk_text_bytes, self.chunk_choice, self.chunk_kind):
            del values[sent:]
        self.chunk_after_ns += [None] * (sent - len(self.chunk_after_ns))


class TruthLog:
    """Appends each line with one unbuffered write, so that no way to end the process loses a finished request."""

    def __init__(self, path: str | None) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._fd = None if path is None else os.open(path, flags, 0o644)

    def write(self, truth: Truth) -> None:
        if self._fd is None:
            return
        line = memoryview(orjson.dumps(truth, option=orjson.OPT_APPEND_NEWLINE))
        while line:
            line = line[os.write(self._fd, line) :]

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
