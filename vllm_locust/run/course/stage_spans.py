"""The stages of a run as they really were: stretches of the window on the common clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from vllm_locust.load_profile import ProfileStage, Quantity


@dataclass(frozen=True, slots=True)
class Stretch:
    """What comes next in the load. Stretches of one number, which must be holds, are one stage; without a number it is
    not measured, such as a pause between two probes.
    """

    load: ProfileStage
    stage: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpan:
    """``end_unix_ns`` is the planned end until the window's own end is known; None for an open end."""

    stage: int
    load: ProfileStage
    quantity: Quantity
    start_unix_ns: int
    end_unix_ns: int | None

    @property
    def base_name(self) -> str:
        """Without the number that tells it from others of the same load."""
        return self.load.name.partition(" #")[0]

    def value_at(self, time_unix_ns: int) -> float:
        """The planned load at a time within the stage or after it."""
        if self.end_unix_ns is None or self.load.kind == "hold":
            return self.load.end_value
        part = (time_unix_ns - self.start_unix_ns) / (self.end_unix_ns - self.start_unix_ns)
        return self.load.value_at(min(1.0, part))

    def until(self, end_unix_ns: int) -> dict[str, Any]:
        """As it stands in ``run.json`` when the window ended then: of a ramp the mean load that it got to."""
        end_ns = end_unix_ns if self.end_unix_ns is None else min(self.end_unix_ns, end_unix_ns)
        part = (
            1.0 if self.end_unix_ns is None else (end_ns - self.start_unix_ns) / (self.end_unix_ns - self.start_unix_ns)
        )
        mean = _mean_value(self.load, part)
        return {
            "stage": self.stage,
            "name": self.load.name,
            "stage_kind": self.load.kind,
            "start_unix_ns": self.start_unix_ns,
            "end_unix_ns": end_ns,
            **({"offered_rps": mean} if self.quantity is Quantity.RATE else {"users": round(mean)}),
        }

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        values = {"load": ProfileStage(**data["load"]), "quantity": Quantity(data["quantity"])}
        return cls(**{**data, **values})


def _mean_value(load: ProfileStage, part: float) -> float:
    """Over the first part of the stage."""
    if load.kind == "hold" or part == 1:
        return load.mean_value
    if load.curve == "linear":
        return (load.start_value + load.value_at(part)) / 2
    way = (1 - math.sin(math.pi * part) / (math.pi * part)) / 2
    return load.start_value + (load.end_value - load.start_value) * way


def append_stretch(
    spans: Sequence[StageSpan], stretch: Stretch, quantity: Quantity, start_unix_ns: int
) -> tuple[StageSpan, ...]:
    """The spans with a stretch that begins at the time given: a new stage, or more of the last one. The second stage of
    one name is its #2, for no two stages of a run have the same.
    """
    if stretch.stage is None:
        return tuple(spans)
    length_ns = stretch.load.length_ns
    end_unix_ns = None if length_ns is None else start_unix_ns + length_ns
    if spans and spans[-1].stage == stretch.stage:
        return (*spans[:-1], replace(spans[-1], end_unix_ns=end_unix_ns))
    same = sum(span.base_name == stretch.load.name for span in spans)
    name = f"{stretch.load.name} #{same + 1}" if same else stretch.load.name
    span = StageSpan(
        stage=stretch.stage,
        load=replace(stretch.load, name=name),
        quantity=quantity,
        start_unix_ns=start_unix_ns,
        end_unix_ns=end_unix_ns,
    )
    return (*spans, span)


def cut_stages(spans: Sequence[StageSpan], end_unix_ns: int) -> list[dict[str, Any]]:
    """As they stand in ``run.json`` when the window ended then: what had not begun never was."""
    return [span.until(end_unix_ns) for span in spans if span.start_unix_ns < end_unix_ns]
