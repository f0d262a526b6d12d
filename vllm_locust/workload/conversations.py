"""Conversations of the ShareGPT shape: who speaks, and which turns can be replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant"]

_ROLES: Mapping[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
}


@dataclass(frozen=True, slots=True)
class Exchange:
    """A user's message and the recorded answer to it."""

    user: str
    answer: str


@dataclass(frozen=True, slots=True)
class Conversation:
    conversation_id: str
    system: str | None
    exchanges: tuple[Exchange, ...]


def parse_conversation(row: Any, index: int, filters: Counter[str]) -> Conversation | None:
    """The replayable part of one row, or None; ``filters`` counts why a row, or a part of it, was left out.

    Answers before the first user message are dropped: the data set cuts long conversations, and a piece may begin in
    the middle. Messages of one speaker in a row are one message. A conversation ends before the first turn that is
    empty, unanswered or of an unexpected speaker.
    """
    messages = _messages(row)
    if messages is None:
        filters["bad_row"] += 1
        return None
    first = next((i for i, (role, _) in enumerate(messages) if role == "user"), len(messages))
    preamble, turns = messages[:first], messages[first:]
    system = "\n\n".join(text for role, text in preamble if role == "system" and text.strip())
    if not turns:
        filters["no_human_turn"] += 1
        return None
    filters["leading_answers_dropped"] += sum(role == "assistant" for role, _ in preamble)
    row_id = str(index if row.get("id") is None else row["id"])
    if not (_is_unicode(system) and _is_unicode(row_id)):
        filters["not_unicode"] += 1
        return None
    exchanges = _exchanges(turns, filters)
    return Conversation(row_id, system or None, tuple(exchanges)) if exchanges else None


def _messages(row: Any) -> list[tuple[Role | None, str]] | None:
    if not isinstance(row, dict):
        return None
    items = row.get("conversations", row.get("messages"))
    if not isinstance(items, list):
        return None
    merged: list[tuple[Role | None, str]] = []
    for item in items:
        if not isinstance(item, dict):
            return None
        speaker, text = item.get("from", item.get("role")), item.get("value", item.get("content"))
        if not isinstance(speaker, str) or not isinstance(text, str):
            return None
        role = _ROLES.get(speaker.lower())
        if merged and merged[-1][0] == role and text.strip():
            previous = merged[-1][1]
            merged[-1] = (role, f"{previous}\n\n{text}" if previous.strip() else text)
        elif not (merged and merged[-1][0] == role):
            merged.append((role, text))
    return merged


def _exchanges(turns: list[tuple[Role | None, str]], filters: Counter[str]) -> list[Exchange]:
    """User and answer by turns; a fault in the first exchange names the filter of the conversation."""
    exchanges: list[Exchange] = []
    for start in range(0, len(turns), 2):
        pair = turns[start : start + 2]
        fault = _fault(pair)
        if fault is not None:
            if not exchanges:
                filters[fault] += 1
            else:
                # A last message without an answer is the normal end of a piece that was cut.
                filters["later_turns_dropped"] += (len(turns) - start + 1) // 2
            break
        exchanges.append(Exchange(pair[0][1], pair[1][1]))
    return exchanges


def _fault(pair: list[tuple[Role | None, str]]) -> str | None:
    if pair[0][0] != "user":
        return "unexpected_speaker"
    if not pair[0][1].strip():
        return "empty_prompt"
    if len(pair) == 1:
        return "no_answer"
    if pair[1][0] != "assistant":
        return "unexpected_speaker"
    if not pair[1][1].strip():
        return "empty_answer"
    if any(not _is_unicode(text) for _, text in pair):
        return "not_unicode"
    return None


def _is_unicode(text: str) -> bool:
    """JSON may escape half of a surrogate pair, which no server accepts in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
