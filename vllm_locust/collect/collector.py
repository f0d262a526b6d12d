"""The collector's loop: fixed deadlines, missed ones counted, and a bound on what it costs.

A tick that comes late does not move those after it. What is slow to read is read once a second, and less often where
the collector would cost more than its budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from vllm_locust import clock
from vllm_locust.clock import WallAxis
from vllm_locust.collect.gpu_source import GpuSource, Remarks, Tick
from vllm_locust.collect.host import HostLoad
from vllm_locust.telemetry import TelemetryKind, TelemetrySink

SECOND_NS: Final = 1_000_000_000
CPU_BUDGET: Final = 0.05
"""Of one core."""
_JUDGE_EVERY_S: Final = 10
_SLOWEST_S: Final = 8


@dataclass(slots=True)
class CollectorCost:
    ticks: int = 0
    missed_ticks: int = 0
    cpu_ns: int = 0
    """Of the whole process since the first tick, the publisher's thread included."""
    tick_cpu_ns: int = 0
    """Of the ticks alone."""
    wall_ns: int = 0

    @property
    def cpu_fraction(self) -> float:
        return self.cpu_ns / self.wall_ns if self.wall_ns else 0.0


@dataclass(slots=True)
class _Budget:
    """Every how many seconds the slow fields are read."""

    slow_every_s: int = 1
    fractions: list[float] = field(default_factory=list)
    settled: bool = False
    """Opening what a driver offers may cost half a second of a core, once."""

    def spent(self, cpu_fraction: float) -> bool:
        """True where the slow fields are to be read half as often from now on."""
        self.fractions.append(cpu_fraction)
        if len(self.fractions) < _JUDGE_EVERY_S:
            return False
        mean = sum(self.fractions) / len(self.fractions)
        self.fractions.clear()
        if not self.settled:
            self.settled = True
            return False
        if mean <= CPU_BUDGET or self.slow_every_s >= _SLOWEST_S:
            return False
        self.slow_every_s *= 2
        return True


class Collector:
    """``wait`` sleeps for so many seconds, or until told to end, and is then True."""

    def __init__(
        self,
        sources: Sequence[GpuSource],
        sink: TelemetrySink,
        remarks: Remarks,
        *,
        host: str,
        axis: WallAxis,
        interval_ns: int,
        wait: Callable[[float], bool],
        monotonic_ns: Callable[[], int] = clock.monotonic_ns,
        cpu_ns: Callable[[], int] = clock.process_cpu_ns,
    ) -> None:
        self._sources = sources
        self._sink = sink
        self._remarks = remarks
        self._host = host
        self._axis = axis
        self._interval_ns = interval_ns
        self._ticks_per_second = max(1, round(SECOND_NS / interval_ns))
        self._wait = wait
        self._monotonic_ns = monotonic_ns
        self._cpu_ns = cpu_ns
        self._host_load = HostLoad(monotonic_ns=monotonic_ns)
        self._budget = _Budget()
        self._second = -1
        self._missed_ticks = 0
        """Since the last row of the host, as is ``_since``: the monotonic time and the CPU used till then."""
        self._since = (0, 0)
        self.cost = CollectorCost()

    def run(self) -> None:
        """Until ``wait`` says to end."""
        started_ns, cpu_started_ns = self._monotonic_ns(), self._cpu_ns()
        self._since = (started_ns, cpu_started_ns)
        number = 0
        while not self._wait(max(0, started_ns + number * self._interval_ns - self._monotonic_ns()) / SECOND_NS):
            late = (self._monotonic_ns() - started_ns) // self._interval_ns - number
            if late > 0:
                number += late
                self._missed_ticks += late
                self.cost.missed_ticks += late
            self._tick(number)
            number += 1
            self.cost.cpu_ns = self._cpu_ns() - cpu_started_ns
            self.cost.wall_ns = self._monotonic_ns() - started_ns
        self._put_rows(last=True)
        self._tell_host()

    def _tick(self, number: int) -> None:
        before_ns = self._cpu_ns()
        tick = Tick(number, self._ticks_per_second, self._budget.slow_every_s)
        for source in self._sources:
            source.tick(tick)
        self.cost.ticks += 1
        self.cost.tick_cpu_ns += self._cpu_ns() - before_ns
        self._put_rows()
        # The tick at which a second begins may be one that was missed.
        second = number // self._ticks_per_second
        if second != self._second:
            self._second = second
            self._tell_host()

    def _put_rows(self, *, last: bool = False) -> None:
        for source in self._sources:
            for kind, rows in source.take(last=last).items():
                if rows:
                    self._sink.put(kind, rows)

    def _tell_host(self) -> None:
        now_ns, cpu_now_ns = self._monotonic_ns(), self._cpu_ns()
        (since_ns, cpu_since_ns), self._since = self._since, (now_ns, cpu_now_ns)
        # The first row comes at once, after a time too short to tell.
        whole = now_ns - since_ns >= SECOND_NS // 2
        fraction = (cpu_now_ns - cpu_since_ns) / (now_ns - since_ns) if whole else None
        own = {"collector_cpu_fraction": fraction, "missed_ticks": self._missed_ticks}
        self._missed_ticks = 0
        when = {"time_unix_ns": self._axis.unix_ns(), "host": self._host}
        self._sink.put(TelemetryKind.HOST, [when | dict(self._host_load.read()) | own])
        if fraction is not None and self._budget.spent(fraction):
            self._remarks.always(
                f"the collector uses more than {CPU_BUDGET:.0%} of a core: fields that are slow to read are now read "
                f"every {self._budget.slow_every_s} s"
            )
