"""The loop against a clock that moves when told."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

from tests.collect.fake_nvml import FakeDevice, FakeNvml, FakeTime
from vllm_locust.collect.collector import Collector
from vllm_locust.collect.gpu_source import Remarks, Rows, Tick
from vllm_locust.collect.nvml import NvmlSource
from vllm_locust.telemetry import COLUMNS, TelemetryKind

MS = 1_000_000
SECOND = 1_000 * MS


class Sink:
    def __init__(self) -> None:
        self.puts: list[tuple[TelemetryKind, list[Mapping[str, Any]]]] = []

    def put(self, kind: TelemetryKind, rows: Sequence[Mapping[str, Any]]) -> None:
        self.puts.append((kind, list(rows)))

    def rows(self, kind: TelemetryKind) -> list[Mapping[str, Any]]:
        return [row for found, rows in self.puts if found is kind for row in rows]


class Forgetting(Sink):
    """As one whose batches are in Redis."""

    def put(self, kind: TelemetryKind, rows: Sequence[Mapping[str, Any]]) -> None:
        assert rows
        assert kind


class Counting:
    """A source that takes so much CPU and time for each tick."""

    def __init__(
        self, time: FakeTime, cpu: FakeTime, *, cost_ns: int = 0, slow_cost_ns: int = 0, first_cost_ns: int = 0
    ) -> None:
        self.ticks: list[tuple[int, bool]] = []
        self._time, self._cpu = time, cpu
        self._due = 0
        self._cost_ns, self._slow_cost_ns, self._first_cost_ns = cost_ns, slow_cost_ns, first_cost_ns

    def tick(self, tick: Tick) -> None:
        slow = tick.number >= self._due
        if slow:
            self._due = tick.number + tick.per_second * tick.slow_every_s
        self.ticks.append((self._time.now_ns, slow))
        cost_ns = (self._slow_cost_ns if slow else self._cost_ns) + self._first_cost_ns
        self._first_cost_ns = 0
        self._time.now_ns += cost_ns
        self._cpu.now_ns += cost_ns

    def take(self, *, last: bool = False) -> Rows:  # noqa: ARG002 - the protocol's
        return {}

    def describe(self) -> Iterator[str]:
        yield "counting"

    def close(self) -> None:
        return


def collector(sources: list[Any], sink: Sink, time: FakeTime, cpu: FakeTime, until_s: float, **more: Any) -> Collector:
    said = more.pop("said", [])
    settled: dict[str, Any] = {"interval_ns": 100 * MS, "wait": time.sleeper(time.now_ns + round(until_s * SECOND))}
    return Collector(
        sources,
        sink,
        Remarks(said.append),
        host="h",
        axis=time,  # type: ignore[arg-type]
        monotonic_ns=time.monotonic_ns,
        cpu_ns=cpu.monotonic_ns,
        **settled | more,
    )


def test_deadlines_are_fixed_and_slow_fields_once_a_second() -> None:
    time, cpu = FakeTime(), FakeTime(0)
    start_ns = time.now_ns
    source = Counting(time, cpu, cost_ns=3 * MS, slow_cost_ns=20 * MS)
    made = collector([source], Sink(), time, cpu, 3.05)
    made.run()
    assert [at - start_ns for at, _ in source.ticks] == [number * 100 * MS for number in range(31)]
    assert [(at - start_ns) // SECOND for at, slow in source.ticks if slow] == [0, 1, 2, 3]
    assert made.cost.missed_ticks == 0
    assert (made.cost.ticks, made.cost.tick_cpu_ns) == (31, 27 * 3 * MS + 4 * 20 * MS)


def test_missed_ticks_are_counted_and_move_no_other() -> None:
    time, cpu, sink = FakeTime(), FakeTime(0), Sink()
    start_ns = time.now_ns
    source = Counting(time, cpu, cost_ns=1 * MS, slow_cost_ns=330 * MS)
    made = collector([source], sink, time, cpu, 2.05)
    made.run()
    # A slow tick takes 330 ms: three deadlines pass, and the next tick comes at the one after them, late by 30 ms.
    offsets = [(at - start_ns) / SECOND for at, _ in source.ticks]
    assert offsets[:4] == [0.0, 0.33, 0.4, 0.5]
    assert made.cost.missed_ticks == 4
    assert [row["missed_ticks"] for row in sink.rows(TelemetryKind.HOST)] == [0, 2, 2, 0]


def test_the_row_of_the_host_comes_though_the_tick_that_begins_its_second_is_missed() -> None:
    time, cpu, sink = FakeTime(), FakeTime(0), Sink()
    start_ns = time.unix_ns()
    pause = iter([0] * 10 + [350 * MS] + [0] * 30)
    made = collector([], sink, time, cpu, 2.05)
    wait = time.sleeper(time.now_ns + round(2.05 * SECOND))

    def slow_machine(seconds: float) -> bool:
        time.now_ns += next(pause)
        return wait(seconds)

    made._wait = slow_machine
    made.run()
    rows = sink.rows(TelemetryKind.HOST)
    assert [(row["time_unix_ns"] - start_ns) // MS for row in rows] == [0, 1350, 2000, 2100]
    assert [row["missed_ticks"] for row in rows] == [0, 3, 0, 0]


def test_a_collector_over_its_budget_reads_slow_fields_less_often() -> None:
    time, cpu = FakeTime(), FakeTime(0)
    said: list[str] = []
    source = Counting(time, cpu, cost_ns=1 * MS, slow_cost_ns=80 * MS)
    collector([source], Sink(), time, cpu, 60, said=said).run()
    assert said == [
        "the collector uses more than 5% of a core: fields that are slow to read are now read every 2 s",
    ]
    slow = [at for at, slow in source.ticks if slow]
    assert {later - earlier for earlier, later in pairwise(slow)} == {SECOND, 2 * SECOND}


def test_what_opening_a_driver_costs_is_not_held_against_it() -> None:
    time, cpu = FakeTime(), FakeTime(0)
    said: list[str] = []
    source = Counting(time, cpu, cost_ns=1 * MS, slow_cost_ns=20 * MS, first_cost_ns=900 * MS)
    collector([source], Sink(), time, cpu, 60, said=said).run()
    assert said == []


def test_days_take_no_more_memory_than_minutes() -> None:
    """A day, looked at every minute, of two GPUs with processes that come and go, samples, XIDs and refusals."""
    time, cpu = FakeTime(), FakeTime(0)
    devices = [FakeDevice(), FakeDevice(uuid="GPU-2", fails={"ecc": "UNKNOWN", "temperature": "NOT_SUPPORTED"})]
    said: list[str] = []
    source = NvmlSource(
        FakeNvml(*devices),
        Remarks(said.append),
        host="h",
        axis=time,  # type: ignore[arg-type]
        environment={},
        monotonic_ns=time.monotonic_ns,
    )
    sizes: list[int] = []
    day = iter(range(1_440))

    def live() -> None:
        number = next(day)
        for device in devices:
            device.asked.clear()
            device.processes = [(1000 + number, 1 << 30)]
            device.samples = [(time.unix_ns() // 1000, number % 100)]
            device.xids += [31] if number % 100 == 0 else []
        if number in (240, 1_438):
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])

    tracemalloc.start()
    try:
        wait = time.sleeper(time.now_ns + 86_340 * SECOND, live)
        made = collector([source], Forgetting(), time, cpu, 0, interval_ns=60 * SECOND, wait=wait)
        made.run()
    finally:
        tracemalloc.stop()
    assert made.cost.ticks >= 1_430
    assert len(sizes) == 2
    assert sizes[1] - sizes[0] < 50_000
    assert len(said) <= 3


def test_every_row_of_a_gpu_leaves_once_a_second_with_known_columns() -> None:
    time, cpu, sink = FakeTime(), FakeTime(0), Sink()
    start_ns = time.unix_ns()
    source = NvmlSource(
        FakeNvml(FakeDevice(), FakeDevice(uuid="GPU-2")),
        Remarks(lambda line: pytest.fail(line)),
        host="h",
        axis=time,  # type: ignore[arg-type]
        environment={},
        monotonic_ns=time.monotonic_ns,
    )
    collector([source], sink, time, cpu, 2.35).run()
    rows = sink.rows(TelemetryKind.GPU)
    for uuid in ("GPU-b6ac", "GPU-2"):
        times = [row["time_unix_ns"] - start_ns for row in rows if row["gpu_uuid"] == uuid]
        assert times == [number * 100 * MS for number in range(24)]
    for kind, found in sink.puts:
        names = {column.name for column in COLUMNS[kind]}
        assert all(set(row) <= names for row in found)
    with_gpm = [(row["time_unix_ns"] - start_ns) // SECOND for row in rows if "tensor_activity" in row]
    assert with_gpm == [1, 1, 2, 2]
    assert len(sink.rows(TelemetryKind.GPU_PROCESSES)) == 2 * 3
    assert len(sink.rows(TelemetryKind.HOST)) == 4
