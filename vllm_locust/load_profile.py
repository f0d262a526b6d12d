"""How the load changes over a test: stages of a rate or of users, from the command line or from a shape file.

A stage is also a row of every table, so shapes become stages that are worth a row each: a soak is cut into equal holds
so that a drift shows, a sinusoid into its halves, up and down.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, Final, Literal, Self, TypeAlias

from vllm_locust.arrival import Piece
from vllm_locust.duration import bounded_duration_ns, parse_duration_ns

MAX_VALUE: Final = 1_000_000
MIN_RATE_RPS: Final = 0.001
"""Apart from 0, which is silence. Mean gaps beyond 17 minutes are no load, and arrivals further on have no time that a
clock could count to.
"""
MAX_STAGES: Final = 1_000
MAX_LENGTH_NS: Final = 366 * 86_400_000_000_000
"""Of a stage. Beyond all of these lies a slip of the keyboard, not a test."""
_SINE_PIECES: Final = 16
"""Straight pieces for half a sinusoid: they are at most 0.3 % of its swing away from it."""
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")

StageKind = Literal["hold", "ramp"]
Curve = Literal["linear", "sine"]


class Quantity(StrEnum):
    RATE = "rate"
    USERS = "users"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileStage:
    """From ``start_value`` to ``end_value``, on a straight line or on half a sine wave."""

    name: str
    start_value: float
    end_value: float
    length_ns: int | None
    """None: it has no end; only of the last stage, and only of a hold."""
    curve: Curve = "linear"

    @property
    def kind(self) -> StageKind:
        return "hold" if self.start_value == self.end_value else "ramp"

    @property
    def mean_value(self) -> float:
        return (self.start_value + self.end_value) / 2

    def value_at(self, fraction: float) -> float:
        """At this fraction of its length."""
        way = fraction if self.curve == "linear" else (1 - math.cos(math.pi * fraction)) / 2
        return round(self.start_value + (self.end_value - self.start_value) * way, 9)

    def pieces(self) -> tuple[Piece, ...]:
        """As the schedule takes it."""
        if self.length_ns is None or self.kind == "hold" or self.curve == "linear":
            return (Piece(self.length_ns, self.start_value, self.end_value),)
        length_ns = self.length_ns
        fractions = [i / _SINE_PIECES for i in range(_SINE_PIECES + 1)]
        return tuple(
            Piece(round(b * length_ns) - round(a * length_ns), self.value_at(a), self.value_at(b))
            for a, b in pairwise(fractions)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProfile:
    quantity: Quantity
    stages: tuple[ProfileStage, ...]

    @property
    def length_ns(self) -> int | None:
        """None: the last stage has no end."""
        lengths = [stage.length_ns for stage in self.stages]
        return None if lengths[-1] is None else sum(length for length in lengths if length is not None)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """From what ``dataclasses.asdict`` gives."""
        return cls(quantity=Quantity(data["quantity"]), stages=tuple(ProfileStage(**stage) for stage in data["stages"]))


def constant_rate(text: str, length_ns: int | None) -> LoadProfile:
    """One hold at the rate in ``text``. Raises ValueError."""
    value = _value(text, Quantity.RATE)
    if value == 0:
        raise ValueError("a rate of 0 sends nothing; write the requests per second, such as 10 or 0.5")
    return _profile(Quantity.RATE, [_stage(value, value, length_ns, "linear", Quantity.RATE)])


def parse_stages(text: str, quantity: Quantity) -> LoadProfile:
    """``10:60s,10-50:120s``: a value that is held, or a range that is gone through, and for how long. Raises
    ValueError.
    """
    stages = []
    for part in text.split(","):
        values, colon, length = part.partition(":")
        low, dash, high = values.partition("-")
        if not colon or not length.strip():
            raise ValueError(f"{part.strip()[:60]!r} has no length; write VALUE:LENGTH, such as 10:60s or 10-50:120s")
        start = _value(low, quantity)
        end = _value(high, quantity) if dash else start
        stages.append(_stage(start, end, parse_duration_ns(length), "linear", quantity))
    return _profile(quantity, stages)


def _value(text: str, quantity: Quantity) -> float:
    number = text.strip()
    if len(number) > 20 or not number.isascii() or not _NUMBER.fullmatch(number):
        return _checked(math.nan, number, quantity)
    return _checked(float(number), number, quantity)


def _checked(value: float, text: str, quantity: Quantity) -> float:
    if not 0 <= value <= MAX_VALUE:
        raise ValueError(f"{text[:40]!r} is not a number from 0 to {MAX_VALUE:,}; write for example 10 or 0.5")
    if quantity is Quantity.USERS and value != int(value):
        raise ValueError(f"{text[:40]} users cannot be; write a whole number")
    return value


def _profile(quantity: Quantity, stages: Sequence[ProfileStage]) -> LoadProfile:
    if len(stages) > MAX_STAGES:
        raise ValueError(f"{len(stages):,} stages are more than {MAX_STAGES:,}; join some, or run several tests")
    if not any(stage.start_value or stage.end_value for stage in stages):
        raise ValueError("every stage is 0, so nothing would be sent; give one of them a value above 0")
    return LoadProfile(quantity=quantity, stages=tuple(stages))


def _shown(value: float) -> str:
    """Without the exponent that ``g`` writes from a million on."""
    text = f"{value:g}"
    return f"{value:,.10g}" if "e+" in text else text


def _stage(start: float, end: float, length_ns: int | None, curve: Curve, quantity: Quantity) -> ProfileStage:
    values = _shown(start) if start == end else f"{_shown(start)}→{_shown(end)}"
    name = f"{values}/s" if quantity is Quantity.RATE else f"{values} users"
    if length_ns is not None and not 0 < length_ns <= MAX_LENGTH_NS:
        raise ValueError(f"stage {name}: its length must be above 0 and at most 366 days; correct it")
    if quantity is Quantity.RATE and any(0 < value < MIN_RATE_RPS for value in (start, end)):
        raise ValueError(f"stage {name}: the least rate is {MIN_RATE_RPS}/s; write that or more, or 0 for silence")
    return ProfileStage(name=name, start_value=start, end_value=end, length_ns=length_ns, curve=curve)


def profile_from_shape(content: Mapping[str, Any]) -> LoadProfile:
    """The content of a shape file: ``quantity`` (rate or users) and ``stages``, a list of mappings with a ``shape``
    each and the keys of that shape. Raises ValueError with every fault that it finds, a line each.
    """
    faults = [f"{key} is not a known key; known here: quantity, stages" for key in content.keys() - _FILE_KEYS]
    quantity, entries = content.get("quantity", "rate"), content.get("stages")
    if quantity not in list(Quantity):
        faults.append(f"quantity {quantity!r} is not known; write rate or users")
    if not isinstance(entries, list) or not entries:
        faults.append("stages is not a list of shapes; write for example - {shape: hold, value: 10, length: 60s}")
    if faults:
        raise ValueError("\n".join(sorted(faults)))
    stages: list[ProfileStage] = []
    for number, entry in enumerate(entries or (), 1):
        try:
            stages += _shape_stages(entry, Quantity(quantity))
        except ValueError as error:
            faults.append(f"stages, entry {number}: {error}")
    if faults:
        raise ValueError("\n".join(faults))
    return _profile(Quantity(quantity), stages)


_FILE_KEYS: Final = {"quantity", "stages"}


def _shape_stages(entry: object, quantity: Quantity) -> list[ProfileStage]:
    if not isinstance(entry, Mapping):
        raise ValueError("it is not a mapping; write for example {shape: hold, value: 10, length: 60s}")
    shape = entry.get("shape")
    if shape not in list(_SHAPES):
        raise ValueError(f"shape {shape!r} is not known; write one of {', '.join(_SHAPES)}")
    keys, build = _SHAPES[shape]
    for key in entry:
        if key not in ("shape", *keys):
            raise ValueError(f"{key} is not a key of {shape}; its keys are {', '.join(keys)}")
    for key in keys:
        if key not in entry:
            raise ValueError(f"{key} is missing; a {shape} has {', '.join(keys)}")
    return [_stage(*steps, quantity=quantity) for steps in build(_Entry(entry, quantity))]


class _Entry:
    """The keys of one shape. Each raises ValueError with its name."""

    def __init__(self, keys: Mapping[str, object], quantity: Quantity) -> None:
        self._keys = keys
        self._quantity = quantity

    def value(self, key: str) -> float:
        given = self._keys[key]
        try:
            if isinstance(given, int | float) and not isinstance(given, bool):
                return _checked(given, str(given), self._quantity)
            return _value(str(given), self._quantity)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None

    def length_ns(self, key: str) -> int:
        given = self._keys[key]
        try:
            if isinstance(given, int | float) and not isinstance(given, bool) and given >= 0:
                return bounded_duration_ns(given * 1e9, str(given))
            return parse_duration_ns(str(given))
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None

    def count(self, key: str) -> int:
        number = self._keys[key]
        if type(number) is not int or not 1 <= number <= MAX_STAGES:
            raise ValueError(f"{key}: {number!r} is not a whole number from 1 to {MAX_STAGES:,}; correct it")
        return number


_Steps: TypeAlias = list[tuple[float, float, int, Curve]]


def _hold(entry: _Entry) -> _Steps:
    value = entry.value("value")
    return [(value, value, entry.length_ns("length"), "linear")]


def _step(entry: _Entry) -> _Steps:
    start, end, step, length_ns = entry.value("from"), entry.value("to"), entry.value("step"), entry.length_ns("length")
    if not step or abs(end - start) / step > MAX_STAGES:
        raise ValueError(f"step: {step:g} leads to more than {MAX_STAGES:,} stages; write a larger one")
    steps = math.floor(abs(end - start) / step + 1e-9)
    values = [round(start + math.copysign(step * i, end - start), 9) for i in range(steps + 1)]
    return [(value, value, length_ns, "linear") for value in values]


def _ramp(entry: _Entry) -> _Steps:
    return [(entry.value("from"), entry.value("to"), entry.length_ns("length"), "linear")]


def _spike(entry: _Entry) -> _Steps:
    base, peak = entry.value("base"), entry.value("peak")
    parts = ((base, "before"), (peak, "length"), (base, "after"))
    return [(value, value, entry.length_ns(key), "linear") for value, key in parts]


def _sinusoid(entry: _Entry) -> _Steps:
    low, high, period_ns = entry.value("low"), entry.value("high"), entry.length_ns("period")
    up_ns = period_ns // 2
    period: _Steps = [(low, high, up_ns, "sine"), (high, low, period_ns - up_ns, "sine")]
    return period * entry.count("periods")


def _soak(entry: _Entry) -> _Steps:
    value, left_ns, every_ns = entry.value("value"), entry.length_ns("length"), entry.length_ns("every")
    if not every_ns or left_ns / every_ns > MAX_STAGES:
        raise ValueError(f"every: it cuts the soak into more than {MAX_STAGES:,} stages; write a longer time")
    lengths_ns = [every_ns] * (left_ns // every_ns) + [left_ns % every_ns] * bool(left_ns % every_ns)
    return [(value, value, length_ns, "linear") for length_ns in lengths_ns]


_SHAPES: Final[Mapping[str, tuple[tuple[str, ...], Callable[[_Entry], _Steps]]]] = {
    "hold": (("value", "length"), _hold),
    "step": (("from", "to", "step", "length"), _step),
    "ramp": (("from", "to", "length"), _ramp),
    "spike": (("base", "peak", "before", "length", "after"), _spike),
    "sinusoid": (("low", "high", "period", "periods"), _sinusoid),
    "soak": (("value", "length", "every"), _soak),
}
"""By name: the keys, all needed, and what makes the stages of them."""
