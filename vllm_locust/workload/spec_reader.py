"""Reads the keys of one YAML mapping, remembers every fault, and names the keys that nobody asked for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from vllm_locust.errors import WorkloadError

_REQUIRED = object()
_MAX_DEPTH: Final = 50
"""Of mappings and lists within each other. What people write has four."""
_TYPES: Final = ("null", "bool", "int", "float", "str", "seq", "map")
_OCTAL_OR_SEXAGESIMAL = re.compile(r"[-+]?0[0-7_]+|[-+]?[0-9_]+(?::[0-9]+)+(?:\.[0-9_]*)?")
_EXPONENT = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")


class _StrictLoader(yaml.SafeLoader):
    """Refuses what YAML allows and nobody means: a second key of the same name, which replaces the first in silence;
    010 for 8 and 1:30 for 90; aliases and depth with which a small file keeps a computer busy for days. Takes 1e2 for
    the number that it is, as YAML 1.2 does.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _fault(f"*{event.anchor} is an alias, which is not read here: write out what it stands for", event)
        if event.tag not in (None, "!"):
            raise _fault(f"{event.tag} is a tag, which is not read here: drop it", event)
        if self._depth == _MAX_DEPTH:
            raise _fault(f"it is nested more than {_MAX_DEPTH} deep", event)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _fault("a key is a list or a mapping: write a name", key_node)
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise _fault(f"key {key!r} stands twice", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        if _OCTAL_OR_SEXAGESIMAL.fullmatch(node.value):
            raise _fault(
                f"{node.value[:40]} is another number in YAML than it seems: write it as a plain decimal", node
            )
        try:
            whole = node.tag == "tag:yaml.org,2002:int"
            return int(self.construct_yaml_int(node)) if whole else float(self.construct_yaml_float(node))
        except ValueError:
            raise _fault(f"{node.value[:40]!r} is not a number", node) from None

    def construct_other(self, node: yaml.ScalarNode) -> None:
        raise _fault(f"{node.value[:40]} is neither a text nor a number in YAML: put it in quotes", node)


def _fault(text: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=at.start_mark)


def _constructor_of(name: str) -> Callable[[_StrictLoader, Any], Any]:
    if name in ("int", "float"):
        return _StrictLoader.construct_number
    constructor: Callable[[_StrictLoader, Any], Any] = yaml.SafeLoader.yaml_constructors[f"tag:yaml.org,2002:{name}"]
    return constructor


_StrictLoader.yaml_constructors = {
    None: _StrictLoader.construct_other,
    **{f"tag:yaml.org,2002:{name}": _constructor_of(name) for name in _TYPES},
}
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def read_yaml_mapping(path: Path, what: str = "workload", *, first_key: str = "kind") -> Mapping[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
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
