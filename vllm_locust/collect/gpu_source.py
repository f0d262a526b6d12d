"""What tells of GPUs, as the collector sees it. Nothing above this line knows NVIDIA."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_locust.telemetry import Row, TelemetryKind

Rows = Mapping[TelemetryKind, Sequence[Row]]


@dataclass(frozen=True, slots=True)
class Tick:
    number: int
    """Since the collector's start. Some may be missing."""
    per_second: int
    slow_every_s: int
    """How often what costs much or changes slowly is to be read of each GPU."""


class GpuSource(Protocol):
    def tick(self, tick: Tick) -> None:
        """Take a sample. Never raises for a GPU."""
        ...

    def take(self, *, last: bool = False) -> Rows:
        """The rows that are complete since the last time; at the very end, all."""
        ...

    def describe(self) -> Iterator[str]:
        """A line for each GPU, for people."""
        ...

    def close(self) -> None: ...


class Remarks:
    """Says each thing once: what a GPU does not tell and why, or that it is lost."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()

    def once(self, remark: str) -> None:
        if remark not in self._said:
            self._said.add(remark)
            self._say(remark)

    def always(self, remark: str) -> None:
        self._say(remark)
