"""What a workload hands out: a prompt for one request, or a session of turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request. ``prompt_tokens`` counts the contents alone: what the server's chat template adds is not in it."""

    prompt_id: str
    """Stable name of the row, such as ``sharegpt:QWJhYvA_0:0`` or ``synthetic:17``."""
    messages: tuple[Mapping[str, str], ...]
    """Chat form; for completions the text is the contents joined."""
    prompt_tokens: int | None
    output_tokens: int | None
    """Length of the recorded answer: the default of ``max_tokens``."""
    conversation_id: str | None = None
    turn: int | None = None
    offset_ns: int | None = None
    """Trace: when the request is due, after T0."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a session; the caller puts the server's own earlier answers between the turns."""

    prompt_id: str
    turn: int
    text: str
    prompt_tokens: int
    """Tokens of ``text`` alone, without system message and history."""
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation: at least one turn, in order."""

    conversation_id: str
    system: str | None
    system_tokens: int
    turns: tuple[Turn, ...]
    turns_too_long: int = 0
    """Turns left out at the end, because the history that the workload expects would not fit into the context."""
