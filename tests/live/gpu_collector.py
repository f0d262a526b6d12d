"""The collector on a real GPU: ``python -m tests.live.gpu_collector SECONDS OUT [--costs] [--dry]``.

Samples so many seconds of each phase, idle and under real loads, then a load run beside the same phases with its
report, then what it all costs. Each result is printed and lies in the directory OUT as soon as it is there: rows of
each phase as ``phase_NAME.jsonl.gz``, the run's report and tables in ``run/``, ``costs.json``, ``progress.log``. What
does not fit into ``LIMIT_S`` is left out, and said. ``--costs`` is only the last part, on idle GPUs and without torch;
``--dry`` takes the fake driver and no torch.
"""

from __future__ import annotations

import gzip
import importlib
import json
import os
import platform
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.collect.fake_nvml import FakeDevice, FakeNvml
from tests.live.gpu_costs import Cost, reading_costs
from tests.live.gpu_phases import Collected, GpuLoad, Phase, collector, spend
from tests.live.gpu_run import run_beside
from vllm_locust import clock
from vllm_locust.collect.nvml import open_nvml

LIMIT_S = 345.0
_SHOWN = (
    *("utilization", "memory_bandwidth_utilization", "sm_activity", "sm_occupancy", "tensor_activity"),
    *("dram_activity", "power_w", "energy_j", "sm_clock_mhz", "temperature_c", "memory_used_bytes"),
    *("pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s", "nvlink_tx_bytes_per_s", "throttle_reasons", "ecc_errors"),
)
_RUN_FILES = ("report.txt", "report.html", "summary.json", "run.json")
_RUN_TABLES = ("gpu.parquet", "gpu_processes.parquet", "host.parquet", "server.parquet")


class Diary:
    """Prints and keeps what happens, and knows how much time is left."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out = out
        self._log = (out / "progress.log").open("w", encoding="utf-8")
        self._started_ns = clock.monotonic_ns()

    @property
    def elapsed_s(self) -> float:
        return (clock.monotonic_ns() - self._started_ns) / 1e9

    def say(self, line: str) -> None:
        text = f"[{self.elapsed_s:6.1f} s] {line}"
        print(text, flush=True)
        self._log.write(f"{text}\n")
        self._log.flush()

    def attempt(self, what: str, needs_s: float, action: Callable[[], None]) -> None:
        """Where it fails, or there is no time for it, the next one still has its turn."""
        if self.elapsed_s + needs_s > LIMIT_S:
            self.say(f"{what}: left out, it needs {needs_s:.0f} s")
            return
        self.say(f"{what} …")
        try:
            action()
        except Exception:  # noqa: BLE001 - told in full; a fault of one step must not cost the results of the others
            self.say(f"{what} FAILED\n{traceback.format_exc()}")

    def write_json(self, name: str, content: object) -> None:
        (self.out / name).write_text(json.dumps(content, indent=1), encoding="utf-8")


def _keep(diary: Diary, phase: Phase) -> None:
    with gzip.open(diary.out / f"phase_{phase.name}.jsonl.gz", "wt", encoding="utf-8") as file:
        for kind, rows in (("gpu", phase.gpu), ("gpu_processes", phase.processes), ("host", phase.host)):
            file.writelines(json.dumps({"kind": kind} | dict(row)) + "\n" for row in rows)
    for uuid in phase.uuids:
        diary.say(f"{phase.name}, {uuid}: mean (values that were there / rows)")
        for column in _SHOWN:
            values = [row[column] for row in phase.gpu if row["gpu_uuid"] == uuid]
            known = [value for value in values if value is not None]
            numbers = [value for value in known if isinstance(value, (int, float))]
            shown = f"{fmean(numbers):.5g}" if numbers else str(known[-1] if known else None)
            diary.say(f"    {column:<30}{shown} ({len(known)}/{len(values)})")
    names = sorted({(row["pid"], str(row["name"]), row["memory_bytes"]) for row in phase.processes})
    own = [row["collector_cpu_fraction"] for row in phase.host if row["collector_cpu_fraction"] is not None]
    missed = sum(row["missed_ticks"] for row in phase.host)
    diary.say(f"    processes {names[:4]}; collector {fmean(own) if own else None} of a core, {missed} missed ticks")


def _phases(diary: Diary, collected: Collected, load: GpuLoad, seconds: float) -> None:
    for kind in ("idle", *load.kinds):
        diary.attempt(
            f"phase {kind}", seconds + 5, lambda kind=kind: _keep(diary, spend(collected, load, kind, seconds))  # type: ignore[misc]
        )  # fmt: skip


def _run(diary: Diary, collected: Collected, load: GpuLoad, seconds: float) -> None:
    directory = diary.out / "load_run"
    directory.mkdir(exist_ok=True)
    try:
        kinds = ("idle", *load.kinds)
        exit_code, late_s = run_beside(collected.url, load, kinds, seconds, directory)
        diary.say(f"stages are {kinds}; Locust ended with {exit_code}; loads began {late_s} s after their stages")
    finally:
        kept = diary.out / "run"
        kept.mkdir(exist_ok=True)
        for path in [directory / "locust.log", *(directory / "run" / name for name in (*_RUN_FILES, *_RUN_TABLES))]:
            if path.exists():
                shutil.copy(path, kept / path.name)
        shutil.rmtree(directory)
    report = (kept / "report.txt").read_text(encoding="utf-8")
    diary.say(f"of the report, which is in {kept}:{report[report.index(chr(10) + 'GPU ') :][:2400]}")


def _reading_costs(diary: Diary, load: GpuLoad | None, *, dry: bool) -> None:
    found: dict[str, list[Cost]] = {}
    for kind in _cost_kinds(load):
        if load is not None and kind != "idle":
            load.start(kind, 20.0)
        found[kind] = reading_costs(FakeNvml(FakeDevice()) if dry else open_nvml())
        diary.write_json("costs.json", found)
        diary.say(f"cost of each reading, {kind}: CPU µs, wall µs")
        for name, cpu_us, wall_us in found[kind]:
            diary.say(f"    {name:<22}{cpu_us:>10.1f}{wall_us:>10.1f}")
    if load is not None:
        load.await_end("matmul", 60.0)


def _cost_kinds(load: GpuLoad | None) -> tuple[str, ...]:
    return ("idle",) if load is None else ("idle", "matmul")


def _eight(diary: Diary, load: GpuLoad | None, seconds: float, *, dry: bool) -> None:
    eight = [f"GPU-{place}" for place in range(8)]
    module = ("tests.collect.fake_collector", *eight) if dry else ("tests.live.gpu_costs",)
    found = {}
    with collector(*module) as collected:
        for kind in _cost_kinds(load):
            phase = spend(collected, load, kind, seconds)
            own = [row["collector_cpu_fraction"] for row in phase.host if row["collector_cpu_fraction"] is not None]
            found[kind] = {"cpu_fraction": own, "missed_ticks": sum(row["missed_ticks"] for row in phase.host)}
            diary.write_json("eight_gpus.json", found)
            diary.say(f"eight GPUs, {kind}: {fmean(own):.4f} of a core, {found[kind]['missed_ticks']} missed ticks")
        diary.say(f"the collector of eight said:\n{collected.end()}")


def _facts(diary: Diary, load: str, *, dry: bool) -> None:
    facts: dict[str, Any] = {"load": load, "python": platform.python_version(), "cores": os.cpu_count()}
    if not dry:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        facts |= {"driver": nvml.nvmlSystemGetDriverVersion(), "nvml": nvml.nvmlSystemGetNVMLVersion()}
        nvml.nvmlShutdown()
    diary.write_json("facts.json", facts)
    diary.say(str(facts))


def measure_all(seconds: float, out: Path, *, dry: bool) -> None:
    diary = Diary(out)
    diary.say("torch is loaded; this may take minutes" if not dry else "a dry run")
    load = GpuLoad(dry=dry)
    try:
        _facts(diary, load.what, dry=dry)
        with collector(*(("tests.collect.fake_collector", "GPU-1") if dry else ())) as collected:
            _phases(diary, collected, load, seconds)
            diary.attempt(
                "the load run", (1 + len(load.kinds)) * seconds + 30, lambda: _run(diary, collected, load, seconds)
            )
            said = collected.end()
        (out / "collector_said.txt").write_text(said, encoding="utf-8")
        diary.say(f"the collector said:\n{said}")
        diary.attempt("cost of each reading", 35.0, lambda: _reading_costs(diary, load, dry=dry))
        diary.attempt("eight GPUs", 2 * seconds + 10, lambda: _eight(diary, load, seconds, dry=dry))
    finally:
        load.stop()
        diary.say("end")


def measure_costs(seconds: float, out: Path, *, dry: bool) -> None:
    """On idle GPUs, without torch."""
    diary = Diary(out)
    _facts(diary, "none", dry=dry)
    diary.attempt("cost of each reading", 15.0, lambda: _reading_costs(diary, None, dry=dry))
    diary.attempt("eight GPUs", seconds + 10, lambda: _eight(diary, None, seconds, dry=dry))


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    if len(words) != 2:
        raise SystemExit(__doc__)
    measure = measure_costs if "--costs" in sys.argv[1:] else measure_all
    measure(float(words[0]), Path(words[1]).resolve(), dry="--dry" in sys.argv[1:])


if __name__ == "__main__":
    main()
