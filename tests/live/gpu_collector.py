"""The collector on a real GPU: ``python -m tests.live.gpu_collector [SECONDS]`` samples it idle and under real loads
into an embedded Valkey, and prints what the columns said, what was missing and why, and what it cost.

With ``OUT`` set, rows of each phase are left there as ``gpu_rows.json``, to be kept as samples for tests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.live.gpu_load import KINDS
from vllm_locust import clock
from vllm_locust.clock import WallAxis
from vllm_locust.collect.gpu_source import Remarks
from vllm_locust.collect.nvml import NvmlSource, open_nvml
from vllm_locust.store.embedded import start_embedded
from vllm_locust.store.redis_url import redis_options
from vllm_locust.store.telemetry_schema import decode_telemetry
from vllm_locust.store.telemetry_store import TelemetryStore
from vllm_locust.telemetry import TelemetryKind

ROOT = Path(__file__).parents[2]
REPEATS = 40
Row = Mapping[str, Any]


@dataclass
class Phase:
    """What was sampled between two moments."""

    name: str
    start_unix_ns: int
    end_unix_ns: int
    gpu: list[Row] = field(default_factory=list)
    processes: list[Row] = field(default_factory=list)

    def values(self, column: str, uuid: str) -> list[float]:
        return [row[column] for row in self.gpu if row["gpu_uuid"] == uuid and row[column] is not None]

    def mean(self, column: str, uuid: str) -> float | None:
        values = self.values(column, uuid)
        return fmean(values) if values else None

    @property
    def uuids(self) -> list[str]:
        return sorted({row["gpu_uuid"] for row in self.gpu})


@dataclass
class Measured:
    phases: dict[str, Phase]
    host: list[Row]
    said: str
    """By the collector, on its standard error."""


@contextmanager
def _load(kind: str, seconds: float) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.live.gpu_load", kind, str(seconds)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    try:
        if process.stdout.readline().strip() != "READY":
            raise RuntimeError(f"the load {kind} did not start")
        yield
    finally:
        process.wait()
        process.stdout.close()


def measure(seconds: float, kinds: tuple[str, ...] = KINDS) -> Measured:
    """Sample ``seconds`` of each phase: idle, and each kind of load."""
    valkey = start_embedded()
    collector = subprocess.Popen(
        [sys.executable, "-m", "vllm_locust", "collect", "--redis-url", valkey.url],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    phases = {}
    try:
        clock.sleep(2.0)
        phases["idle"] = _spend("idle", seconds)
        for kind in kinds:
            try:
                with _load(kind, seconds + 2):
                    clock.sleep(1.0)
                    phases[kind] = _spend(kind, seconds)
            except RuntimeError as error:
                print(error)
        clock.sleep(2.5)
        collector.send_signal(signal.SIGTERM)
        _, said = collector.communicate(timeout=20)
        return Measured(phases, _sort_rows(valkey.url, phases), said)
    finally:
        collector.kill()
        collector.wait()
        valkey.stop()


def _spend(name: str, seconds: float) -> Phase:
    start_ns = clock.unix_ns()
    clock.sleep(seconds)
    return Phase(name, start_ns, clock.unix_ns())


def _sort_rows(url: str, phases: dict[str, Phase]) -> list[Row]:
    """Each row to its phase; those of the host are returned."""
    store = TelemetryStore(redis_options(url))
    host: list[Row] = []
    after = {"gpu": "0-0", "host": "0-0"}
    while entries := store.read_telemetry(after, count=100):
        for entry in entries:
            after[entry.stream] = entry.entry_id
            batch = decode_telemetry(entry.payload or b"")
            for row in batch.rows.to_pylist():
                if batch.header.kind is TelemetryKind.HOST:
                    host.append(row)
                    continue
                for phase in phases.values():
                    if phase.start_unix_ns <= row["time_unix_ns"] < phase.end_unix_ns:
                        (phase.gpu if batch.header.kind is TelemetryKind.GPU else phase.processes).append(row)
    store.close()
    return host


def reading_costs() -> list[tuple[str, float, float]]:
    """Each reading of the first GPU: CPU and wall time in microseconds, the mean of many."""
    source = NvmlSource(open_nvml(), Remarks(print), host="h", axis=WallAxis(), gpus="0")
    device = source.devices[0]
    slow = [*device.slow, ("utilization_samples", device.utilization_samples), ("processes", device.processes)]
    costs = []
    for name, call in [*device.fast, *slow]:
        call()
        clock.sleep(0.2)
        cpu_ns = wall_ns = 0
        for _ in range(REPEATS):
            clock.sleep(0.02)
            cpu_before_ns, before_ns = clock.thread_cpu_ns(), clock.monotonic_ns()
            call()
            wall_ns += clock.monotonic_ns() - before_ns
            cpu_ns += clock.thread_cpu_ns() - cpu_before_ns
        costs.append((name, cpu_ns / REPEATS / 1e3, wall_ns / REPEATS / 1e3))
    source.close()
    return costs


def _print_phases(measured: Measured) -> None:
    columns = [name for name in next(iter(measured.phases.values())).gpu[0] if name not in ("host", "time_unix_ns")]
    for uuid in measured.phases["idle"].uuids:
        print(f"\n{uuid}: mean of each column (values that were there / rows)")
        for column in columns:
            cells = []
            for phase in measured.phases.values():
                values = [row[column] for row in phase.gpu if row["gpu_uuid"] == uuid]
                known = [value for value in values if value is not None]
                numbers = [value for value in known if isinstance(value, (int, float))]
                shown = f"{fmean(numbers):.5g}" if numbers else str(known[-1] if known else None)[:24]
                cells.append(f"{phase.name} {shown} ({len(known)}/{len(values)})")
            print(f"  {column:<30}" + " | ".join(cells))
    for phase in measured.phases.values():
        names = sorted({(row["pid"], row["name"], row["memory_bytes"]) for row in phase.processes}, key=str)
        print(f"processes, {phase.name}: {names[:6]}")


def _print_costs(title: str) -> list[tuple[str, float, float]]:
    costs = reading_costs()
    print(f"\n{title}: CPU µs, wall µs")
    for name, cpu_us, wall_us in costs:
        print(f"  {name:<22}{cpu_us:>10.1f}{wall_us:>10.1f}")
    return costs


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    measured = measure(seconds)
    _print_phases(measured)
    own = [row["collector_cpu_fraction"] for row in measured.host if row["collector_cpu_fraction"] is not None]
    print(f"\nhost rows {len(measured.host)}, last {dict(measured.host[-1])}")
    print(f"collector: mean {fmean(own):.4f} and at most {max(own):.4f} of a core over a second")
    print(f"missed ticks: {sum(row['missed_ticks'] for row in measured.host)}")
    print(f"\nit said:\n{measured.said}")
    costs = {"idle": _print_costs("cost of each reading, idle")}
    with _load("matmul", 30):
        costs["matmul"] = _print_costs("cost of each reading, matmul")
    if out := os.environ.get("OUT"):
        kept: dict[str, Any] = {name: phase.gpu[:25] for name, phase in measured.phases.items()}
        kept |= {"processes": [row for phase in measured.phases.values() for row in phase.processes[-2:]]}
        kept |= {"host": measured.host[:3], "said": measured.said, "costs_us": costs}
        (Path(out) / "gpu_rows.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
