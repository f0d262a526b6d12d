"""The simulated server's engine in virtual time: requests in, times of first and last tokens out, no socket and no
clock. It keeps its state from one probe to the next, as a real server does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_locust.simserver.engine import Engine, EngineConfig, EngineRequest


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and output lengths, lognormal with these means and this standard deviation of the logarithm."""

    prompt_mean: float
    output_mean: float
    spread: float
    at_most: int

    def draw(self, rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
        prompts, outputs = (self._lognormal(rng, mean, count) for mean in (self.prompt_mean, self.output_mean))
        return list(zip(prompts, outputs, strict=True))

    def _lognormal(self, rng: np.random.Generator, mean: float, count: int) -> list[int]:
        drawn = rng.lognormal(np.log(mean) - self.spread**2 / 2, self.spread, count)
        return [int(length) for length in np.clip(np.rint(drawn), 1, self.at_most)]


@dataclass(frozen=True, slots=True)
class RecordedLengths:
    """Prompt and output lengths of requests that were really sent, drawn independently with replacement."""

    pairs: tuple[tuple[int, int], ...]

    def draw(self, rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
        return [self.pairs[index] for index in rng.integers(len(self.pairs), size=count)]


@dataclass(slots=True, eq=False)
class Served:
    """One request's fate; a time that did not come is None."""

    arrived_ns: int
    output_tokens: int
    first_ns: int | None = None
    last_ns: int | None = None


class Load:
    """What comes next. ``next_ns`` is None where nothing is planned until something ends."""

    next_ns: int | None

    def take(self, now_ns: int) -> tuple[int, int, int]:
        """Arrival time, prompt and output tokens of what is due."""
        raise NotImplementedError

    def ended(self, now_ns: int) -> None:
        """A request has ended."""


class OfflineServer:
    def __init__(self, config: EngineConfig) -> None:
        self.engine = Engine(config)
        self.now_ns = 0
        self.arrived = 0
        self.completed = 0
        self._of: dict[EngineRequest, Served] = {}

    @property
    def in_flight(self) -> int:
        return len(self._of)

    def run(self, load: Load, until: Callable[[int], bool]) -> list[Served]:
        """Requests that come until ``until(now_ns)``, which is asked before each step."""
        taken: list[Served] = []
        while True:
            while load.next_ns is not None and load.next_ns <= self.now_ns:
                taken.append(self._add(*load.take(self.now_ns)))
            if until(self.now_ns):
                return taken
            if self.engine.has_work:
                for _ in range(self._step()):
                    load.ended(self.now_ns)
            elif load.next_ns is not None:
                self.now_ns = load.next_ns
            else:
                return taken

    def _add(self, arrived_ns: int, prompt_tokens: int, output_tokens: int) -> Served:
        served = Served(arrived_ns, output_tokens)
        request = EngineRequest(str(self.arrived), prompt_tokens, output_tokens)
        self.arrived += 1
        self._of[request] = served
        self.engine.add(request, arrived_ns)
        return served

    def _step(self) -> int:
        result = self.engine.step(self.now_ns)
        self.now_ns = result.start_ns + result.duration_ns
        for request, _ in result.outputs:
            if request.generated == 1:
                self._of[request].first_ns = self.now_ns
        for request in result.finished:
            self._of.pop(request).last_ns = self.now_ns
        self.completed += len(result.finished)
        return len(result.finished)


class PoissonLoad(Load):
    """An open loop without an end, drawn in blocks."""

    def __init__(
        self, rng: np.random.Generator, lengths: Lengths | RecordedLengths, rate_rps: float, start_ns: int
    ) -> None:
        self._rng, self._lengths, self._mean_gap_ns = rng, lengths, 1e9 / rate_rps
        self._block: list[tuple[int, int, int]] = []
        self._fill(start_ns)

    def _fill(self, after_ns: int) -> None:
        times = after_ns + np.cumsum(self._rng.exponential(self._mean_gap_ns, 500)).astype(np.int64)
        drawn = self._lengths.draw(self._rng, len(times))
        self._block = [(at, *lengths) for at, lengths in zip(times.tolist(), drawn, strict=True)][::-1]
        self.next_ns = self._block[-1][0]

    def take(self, now_ns: int) -> tuple[int, int, int]:  # noqa: ARG002
        arrival = self._block.pop()
        if self._block:
            self.next_ns = self._block[-1][0]
        else:
            self._fill(arrival[0])
        return arrival


class UsersLoad(Load):
    """A closed loop: so many users, each of whom asks again as soon as it has its answer."""

    def __init__(
        self, rng: np.random.Generator, lengths: Lengths | RecordedLengths, users: int, in_flight: int, start_ns: int
    ) -> None:
        self._rng, self._lengths = rng, lengths
        self._missing = users - in_flight
        self.next_ns = start_ns if self._missing > 0 else None

    def take(self, now_ns: int) -> tuple[int, int, int]:
        self._missing -= 1
        if self._missing <= 0:
            self.next_ns = None
        return now_ns, *self._lengths.draw(self._rng, 1)[0]

    def ended(self, now_ns: int) -> None:
        self._missing += 1
        if self._missing > 0:
            self.next_ns = now_ns
