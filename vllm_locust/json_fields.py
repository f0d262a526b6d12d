"""Reads JSON that came from a file: each value must be what it is said to be, or a ValueError names its field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

MAX_COUNT: Final = 1 << 53
MAX_NUMBER: Final = 1e18
SHOWN: Final = 40
"""Characters of a wrong value in its error."""


@dataclass(frozen=True, slots=True)
class JsonFields:
    """One JSON object; ``path`` is its place in the file."""

    content: Mapping[str, Any]
    path: str = ""

    @classmethod
    def of(cls, value: object, path: str = "", *, keys: Iterable[str] | None = None) -> Self:
        """``keys`` are all that it has, where they are known."""
        what = path or "the content"
        if not isinstance(value, Mapping):
            raise ValueError(f"{what} is {_shown(value)}, not an object")
        known = set(value) if keys is None else set(keys)
        if missing := sorted(known - set(value)):
            raise ValueError(f"{what} has no {missing[0]}")
        if unknown := sorted(set(value) - known):
            raise ValueError(f"{what} has the unknown field {unknown[0][:SHOWN]!r}")
        return cls(value, path)

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def value(self, key: str) -> Any:
        if key not in self.content:
            raise ValueError(f"{self.name(key)} is missing")
        return self.content[key]

    def mapping(self, key: str, *, keys: Iterable[str] | None = None) -> JsonFields:
        return JsonFields.of(self.value(key), self.name(key), keys=keys)

    def items(self, key: str) -> list[Any]:
        value = self.value(key)
        if not isinstance(value, list):
            raise ValueError(f"{self.name(key)} is {_shown(value)}, not a list")
        return value

    def text(self, key: str) -> str:
        return _text(self.value(key), self.name(key))

    def texts(self, key: str) -> list[str]:
        return [_text(value, f"{self.name(key)}[{i}]") for i, value in enumerate(self.items(key))]

    def text_or_none(self, key: str) -> str | None:
        return None if self.value(key) is None else self.text(key)

    def count(self, key: str) -> int:
        return _count(self.value(key), self.name(key))

    def count_or_none(self, key: str) -> int | None:
        return None if self.value(key) is None else self.count(key)

    def counts(self, key: str) -> tuple[int, ...]:
        return tuple(_count(value, f"{self.name(key)}[{i}]") for i, value in enumerate(self.items(key)))

    def number(self, key: str, *, above: float | None = None, least: float = -MAX_NUMBER) -> float:
        value: float = self.value(key)
        name = self.name(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_NUMBER <= value <= MAX_NUMBER:
            raise ValueError(f"{name} is {_shown(value)}, not a number")
        if above is not None and value <= above:
            raise ValueError(f"{name} is {value:g}; it must be above {above:g}")
        if value < least:
            raise ValueError(f"{name} is {value:g}; it must be {least:g} at least")
        return value

    def number_or_none(self, key: str, *, above: float | None = None, least: float = -MAX_NUMBER) -> float | None:
        return None if self.value(key) is None else self.number(key, above=above, least=least)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {_shown(value)}, not a text")
    return value


def _count(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{name} is {_shown(value)}, not a count from 0 to 2^53")
    return value


def _shown(value: object) -> str:
    """Without its content where that may be long or deep."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return repr(value[:SHOWN])
    return "a number that is too large" if isinstance(value, int) and abs(value) > MAX_COUNT else repr(value)
