"""One choice of an answer, and the reading of its fields: strict on types, lenient on how the JSON was written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

from vllm_locust.protocol import bounded

MAX_TOKENS = 10_000_000
"""No answer has this many tokens: a larger number is a broken server's, and would not fit the columns."""


class MalformedError(Exception):
    """A field of the answer has a type or a value that the API does not allow."""


WRONG_TYPES = (MalformedError, TypeError, AttributeError, KeyError)


def json_or_text(data: bytes) -> Any:
    """JSON as a lenient server writes it (NaN, halves of surrogate pairs, broken UTF-8); else the stripped text."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        text = data.decode("utf-8", "replace").strip()
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def joined(parts: list[str]) -> str:
    """The parts as one string. Halves of a surrogate pair meet again; a lone one becomes U+FFFD."""
    text = "".join(parts)
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def keep(parts: list[str], fragment: object) -> bool:
    """Keep a fragment that is not empty; True if it was."""
    if not fragment:
        return False
    if type(fragment) is not str:
        raise MalformedError
    parts.append(fragment)
    return True


def short_text(value: object) -> str | None:
    if value is None:
        return None
    if type(value) is not str:
        raise MalformedError
    return bounded(value)


def token_count(value: object) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < MAX_TOKENS:
        raise MalformedError
    return value


def list_length(value: object) -> int:
    if type(value) is not list:
        raise MalformedError
    return len(value)


class ToolCall:
    """One tool call, put together from its fragments."""

    __slots__ = ("_arguments", "_name", "id")

    def __init__(self) -> None:
        self.id: str | None = None
        self._name: list[str] = []
        self._arguments: list[str] = []

    @property
    def name(self) -> str:
        return joined(self._name)

    @property
    def arguments(self) -> str:
        return joined(self._arguments)

    def take(self, fragment: Mapping[str, Any]) -> bool:
        """Take one fragment; True if it carries a part of the name or of the arguments."""
        if self.id is None:
            self.id = short_text(fragment.get("id"))
        function = fragment.get("function")
        if function is None:
            return False
        return keep(self._name, function.get("name")) | keep(self._arguments, function.get("arguments"))


class Choice:
    """One of the ``n`` answers to a request. vLLM counts continuous usage for each of them on its own."""

    __slots__ = ("finish_reason", "has_tokens", "reasoning", "text", "tokens", "tool_calls")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.tool_calls: dict[int, ToolCall] = {}
        self.tokens: int | None = None
        """Output tokens by continuous usage; None until the first count."""
        self.has_tokens = False
        self.finish_reason: str | None = None

    def rise_to(self, tokens: int) -> int | None:
        """Tokens since the last count. A first count is a rise only while nothing has arrived, else a total: None."""
        before = self.tokens
        if before is None:
            self.tokens = tokens
            return None if self.has_tokens else tokens
        if tokens <= before:
            return 0
        self.tokens = tokens
        return tokens - before
