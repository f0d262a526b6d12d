"""What limits the server, in words: each finding with its evidence, what to try and what would confirm it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

Json = Mapping[str, Any]

_OTHERS_SHOWN: Final = 3


def where(finding: Json, stages: Sequence[Json]) -> str:
    """The stages that it was found in, where there is a choice."""
    names: list[str] = finding["stages"]
    if len(stages) < 2 or not names:
        return ""
    also = ", ".join(names[1 : 1 + _OTHERS_SHOWN])
    more = len(names) - 1 - _OTHERS_SHOWN
    others = f"; also in {also}{f' and {more} more' if more > 0 else ''}" if also else ""
    return f" (stage {names[0]}{others})"


def nothing_found(diagnosis: Json) -> str | None:
    """In words, where that is what was found."""
    judged = len(diagnosis["not_found"])
    if diagnosis["findings"] or not judged:
        return None
    return f"None of the {judged} limits that could be judged was found." if judged > 1 else "No limit was found."


def not_judged(diagnosis: Json) -> list[str]:
    """By what is missing, the rules that could not be judged without it."""
    missing: dict[str, list[str]] = {}
    for rule in diagnosis["not_judged"]:
        missing.setdefault(rule["needs"], []).append(rule["title"])
    return [f"needs {needs}: {', '.join(titles)}" for needs, titles in missing.items()]
