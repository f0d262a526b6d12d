"""Reads the pages that servers write for Prometheus, in its own text format or as OpenMetrics.

A server's page is read once a second while the server is under load, and of its some 700 lines a tenth is wanted: lines
of other names are left before their labels are read. A line that is broken costs that line, and is counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Final

_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABELS_AND_VALUE: Final = re.compile(
    r'\s*(?:\{(?P<labels>(?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?'
    r"\s*(?P<value>[^\s#_]+)(?:\s+(?P<time>[-+0-9.eE]+))?\s*(?:#.*)?"
)
"""After the value there may be a time and, in OpenMetrics, an exemplar behind a ``#``."""
_LABEL: Final = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES: Final = {"n": "\n"}


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: Mapping[str, str]
    value: float
    """Finite, or infinite; a sample whose value is NaN is none."""


@dataclass(frozen=True, slots=True)
class Samples:
    found: list[Sample]
    broken_lines: int


def read_samples(text: str, wanted: Container[str]) -> Samples:
    """The samples of the wanted names, in the page's order."""
    found: list[Sample] = []
    broken = 0
    for line in text.split("\n"):
        match = _NAME.match(line)
        if match is None:
            broken += bool(line.strip()) and not line.lstrip().startswith("#")
            continue
        if match[0] not in wanted:
            continue
        sample = _sample(match[0], line[match.end() :])
        if sample is None:
            broken += 1
        elif not math.isnan(sample.value):
            found.append(sample)
    return Samples(found, broken)


def _sample(name: str, rest: str) -> Sample | None:
    match = _LABELS_AND_VALUE.fullmatch(rest)
    labels = None if match is None else _labels(match["labels"] or "")
    if match is None or labels is None:
        return None
    try:
        return Sample(name, labels, float(match["value"]))
    except ValueError:
        return None


def _labels(text: str) -> dict[str, str] | None:
    labels: dict[str, str] = {}
    at, end = 0, len(text.rstrip())
    while at < end:
        match = _LABEL.match(text, at, end)
        if match is None:
            return None
        labels[match[1]] = _ESCAPED.sub(lambda escape: _ESCAPES.get(escape[1], escape[1]), match[2])
        at = match.end()
    return labels
