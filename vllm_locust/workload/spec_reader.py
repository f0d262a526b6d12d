"""Reads the keys of one YAML mapping, remembers every fault, and names the keys that nobody asked for."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from vllm_locust.errors import WorkloadError

_REQUIRED = object()


class _UniqueKeys(yaml.SafeLoader):
    """YAML lets a second key of the same name replace the first in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml_mapping(path: Path, what: str = "workload", *, first_key: str = "kind") -> Mapping[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except OSError as error:
        raise WorkloadError(f"{what} {path} cannot be read ({error.strerror}); check the path") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise WorkloadError(f"{what} {path} is not valid YAML ({reason}); correct it") from None
    if not isinstance(content, dict):
        raise WorkloadError(f"{what} {path} must be a mapping of keys to values, starting with {first_key}; correct it")
    return content


class SpecReader:
    """Typed access to a mapping; ``finish`` adds the unknown keys. ``problems`` is shared with nested readers."""

    def __init__(self, mapping: Mapping[str, Any], where: str, problems: list[str]) -> None:
        self._mapping = mapping
        self._where = where
        self._asked: set[str] = set()
        self.problems = problems

    def _get(self, key: str, default: object) -> Any:
        self._asked.add(key)
        if key in self._mapping:
            return self._mapping[key]
        if default is _REQUIRED:
            self.fault(key, "is missing; add it")
            return None
        return default

    def fault(self, key: str, text: str) -> None:
        self.problems.append(f"{self._where}: {key} {text}")

    def has(self, key: str) -> bool:
        return key in self._mapping

    def value(self, key: str, default: object = _REQUIRED) -> Any:
        return self._get(key, default)

    def integer(self, key: str, default: object = _REQUIRED, minimum: int = 1) -> int:
        value = self._get(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and value >= minimum:
            return value
        if value is not None or key in self._mapping:
            self.fault(key, f"must be a whole number of at least {minimum}, not {value!r}")
        return minimum

    def optional_integer(self, key: str, minimum: int = 1) -> int | None:
        if self._get(key, None) is None:
            return None
        return self.integer(key, minimum=minimum)

    def number(self, key: str, default: object = _REQUIRED) -> float:
        value = self._get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
            return float(value)
        if value is not None or key in self._mapping:
            self.fault(key, f"must be a number above 0, not {value!r}")
        return 1.0

    def text(self, key: str, default: object = _REQUIRED) -> str:
        value = self._get(key, default)
        if isinstance(value, str) and value.strip():
            return value.strip()
        if value is not None or key in self._mapping:
            self.fault(key, f"must be a text, not {value!r}")
        return ""

    def choice(self, key: str, choices: tuple[str, ...], default: object = _REQUIRED) -> str:
        value = self._get(key, default)
        if value in choices:
            return str(value)
        if value is not None or key in self._mapping:
            self.fault(key, f"must be one of {', '.join(choices)}, not {value!r}")
        return choices[0]

    def nested(self, key: str) -> SpecReader | None:
        value = self._get(key, _REQUIRED)
        if isinstance(value, dict):
            return SpecReader(value, f"{self._where}: {key}", self.problems)
        if value is not None or key in self._mapping:
            self.fault(key, f"must be a mapping, not {value!r}")
        return None

    def finish(self) -> None:
        for key in self._mapping:
            if key not in self._asked:
                close = difflib.get_close_matches(str(key), sorted(self._asked), n=1)
                hint = f"; did you mean {close[0]}?" if close else f"; known here: {', '.join(sorted(self._asked))}"
                self.fault(str(key), f"is not a known key{hint}")
