"""How a number is written for people: three significant digits, a unit that fits, and a dash for what is not known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

UNKNOWN: Final = "–"
BEYOND: Final = "failed"
"""A percentile that falls on a failed request."""


def time(value_s: float | None) -> str:
    if value_s is None:
        return UNKNOWN
    size = abs(value_s)
    if size >= 0.9995:
        return f"{value_s:,.0f} s" if size >= 999.5 else f"{_digits(value_s)} s"
    if size >= 0.9995e-3 or size == 0:
        return f"{_digits(value_s * 1e3)} ms"
    return f"{_digits(value_s * 1e6)} µs"


def rate(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 999.5 else _digits(value)


def share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{_digits(value * 100)} %"


def count(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def plain(value: float | None) -> str:
    return UNKNOWN if value is None else _digits(value)


def size(value_bytes: int | None) -> str:
    return UNKNOWN if value_bytes is None else f"{value_bytes / 1e6:,.0f} MB"


def percentile(block: Mapping[str, Any], name: str) -> str:
    """With ``?`` where the samples are too few for it."""
    if name in block.get("beyond", ()):
        return BEYOND
    mark = "?" if name in block["few_samples"] and block[name] is not None else ""
    return time(block[name]) + mark


def _digits(value: float) -> str:
    """Three significant digits, never in exponential form: 12.3, 0.0123, 1,234."""
    if value == 0:
        return "0"
    text = f"{value:.3g}"
    if "e" in text:
        return f"{value:,.0f}" if abs(value) >= 1 else f"{value:.6f}"
    return text
