"""Whole searches over real sockets, each with the truth for what it sent:
``python -m tests.simulation.live search|truth DIRECTORY [CASE ...]``.

``search`` runs one search for each case, all of them side by side: on a machine with fewer than two idle cores for each
they disturb one another. ``truth`` finds each capacity by exhaustive simulation with the lengths of the run's own
requests, and prints the table of RESULTS.md. The servers are fast, so that ten minutes hold as much evidence as the
study's hours.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow.parquet as pq

from tests.run.simulated import CHAT, OPEN_LOOP, end_of, simserver, start_locust
from tests.simulation import study
from tests.simulation.offline_server import RecordedLengths
from tests.simulation.probing import Case, OfflineTarget
from vllm_locust.capacity.probe import Probe
from vllm_locust.load_profile import Quantity
from vllm_locust.simserver.settings import parse_settings

BUDGET: Final = "480s"
TRUTH_REQUESTS: Final = 100_000
TRUTH_LOADS: Final = (0.985, 0.9925, 1.0, 1.0075, 1.015)
"""Equal answers make a queue of its own within 2 % of what the server can take."""
COMMON: Final = ("--frontend-ms", "0", "--kv-us-per-token", "0", "--no-enable-prefix-caching")


@dataclass(frozen=True, slots=True)
class LiveCase:
    name: str
    server: tuple[str, ...]
    """Flags of ``vllm-locust simserver``."""
    prompt_tokens: str
    output_tokens: str
    """As a workload file says it."""
    slos: tuple[str, ...]
    near: float
    """Roughly the capacity; a search starts anywhere from a third to three times of it."""
    quantity: Quantity = Quantity.RATE

    @property
    def flags(self) -> tuple[str, ...]:
        return (*COMMON, *self.server)


def lognormal(median: int, sigma: float, most: int) -> str:
    return f"{{distribution: lognormal, median: {median}, sigma: {sigma}, min: 2, max: {most}}}"


def engine(base_ms: float, decode_us: float, prefill_us: float, *more: str) -> tuple[str, ...]:
    step = ("--step-base-ms", f"{base_ms:g}", "--decode-us-per-seq", f"{decode_us:g}")
    return (*step, "--prefill-us-per-token", f"{prefill_us:g}", *more)


CASES: Final = (
    LiveCase(
        "full batch, equal answers", engine(5, 0, 0, "--max-num-seqs", "24"), "20", "40", ("p90(ttft)<=300ms",), 115
    ),
    LiveCase(
        "full batch, p99(ttft)",
        engine(5, 0, 0, "--max-num-seqs", "24"),
        "20",
        lognormal(28, 0.7, 400),
        ("p99(ttft)<=500ms",),
        125,
    ),
    LiveCase(
        "decoding, goodput",
        engine(2, 200, 0, "--max-num-seqs", "128"),
        "20",
        lognormal(24, 0.7, 400),
        ("ttft<=200ms", "tpot<=10ms", "good_fraction>=0.95"),
        120,
    ),
    LiveCase(
        "KV cache, p95(ttft)",
        engine(5, 50, 0, "--max-num-seqs", "128", "--num-gpu-blocks-override", "300", "--max-model-len", "1000"),
        lognormal(100, 0.5, 400),
        lognormal(35, 0.5, 300),
        ("p95(ttft)<=300ms",),
        110,
    ),
    LiveCase(
        "prefill, p99(ttft)",
        engine(2, 50, 20, "--max-num-seqs", "64", "--max-num-batched-tokens", "1024"),
        lognormal(300, 0.6, 3000),
        "4",
        ("p99(ttft)<=400ms",),
        100,
    ),
    LiveCase(
        "two SLOs",
        engine(3, 120, 0, "--max-num-seqs", "128"),
        "20",
        lognormal(28, 0.6, 400),
        ("p99(ttft)<=60ms", "p95(tpot)<=10ms"),
        120,
    ),
    LiveCase(
        "users, p95(tpot)",
        engine(3, 150, 0, "--max-num-seqs", "128"),
        "20",
        lognormal(28, 0.6, 400),
        ("p95(tpot)<=10ms",),
        45,
        Quantity.USERS,
    ),
)


def search(case: LiveCase, directory: Path, seed: int) -> str:
    """One search, its run in ``directory/run``. The end of what Locust printed."""
    directory.mkdir(parents=True, exist_ok=True)
    workload = directory / "lengths.yaml"
    workload.write_text(
        f"kind: synthetic\nconversations: 20000\nprompt_tokens: {case.prompt_tokens}\n"
        f"output_tokens: {case.output_tokens}\n",
        encoding="utf-8",
    )
    start = case.near * math.exp(np.random.default_rng(seed).uniform(-1.1, 1.1))
    rate = case.quantity is Quantity.RATE
    flags = (
        *("--headless", "--only-summary", "--run-dir", "run", "--capacity", "rate" if rate else "users"),
        *("--start-load", f"{start:.4g}" if rate else f"{start:.0f}", "--budget", BUDGET, "--seed", str(seed)),
        *("--workload", str(workload), "--force-length", "--warmup-requests", "50"),
    )
    slos = [word for slo in case.slos for word in ("--slo", slo)]
    with simserver(directory, *case.flags) as server:
        process = start_locust(directory, server.url, *flags, *slos, locustfile=OPEN_LOOP if rate else CHAT)
        run = end_of(process, directory, 700)
    (directory / "output.txt").write_text(run.output, encoding="utf-8")
    return f"{case.name}: exit {run.exit_code}\n{run.output[-600:]}"


def roughly(case: Case) -> float:
    """By bisection: near enough for a line through long simulations around it."""
    low, high = case.capacity / 4, case.capacity * 4
    for seed in range(9):
        load = math.sqrt(low * high)
        probe = Probe(load=load, settle_s=50, window_s=20_000 / load, empty_first=False, why="truth")
        low, high = (load, high) if OfflineTarget(case, seed).probe(probe).held else (low, load)
    return math.sqrt(low * high)


def truth(case: Case) -> tuple[float, float]:
    """The load at which the SLO that is the worst there is just met, and its standard error."""
    near = roughly(case)
    loads = np.array([near * factor for factor in TRUTH_LOADS])
    if case.quantity is Quantity.USERS:
        loads = np.array([math.floor(near) + more for more in (-1, 0, 1, 2)], dtype=np.float64)
    worst = [
        max(study.excess(case, load, TRUTH_REQUESTS, seed).values()) for seed, load in enumerate(loads, start=1000)
    ]
    return study.root(np.log(loads), np.array(worst))


def row(case: LiveCase, directory: Path) -> str:
    """One line of the table, with the true capacity for the lengths that were sent."""
    summary = json.loads((directory / "run" / "summary.json").read_text(encoding="utf-8"))
    found = summary["capacity"]
    table = pq.read_table(
        directory / "run" / "requests.parquet", columns=["prompt_tokens", "output_tokens"]
    ).drop_null()
    lengths = RecordedLengths(tuple(zip(*(column.to_pylist() for column in table.columns), strict=True)))
    offline = Case(case.name, parse_settings(case.flags).engine, lengths, case.slos, case.near, case.quantity)
    true, error = truth(offline)
    covered = found["low"] is not None and found["low"] <= true <= (found["high"] or math.inf)
    off = f"{100 * (found['load'] / true - 1):+.1f} %" if found["load"] else "none"
    return (
        f"| {case.name} | {', '.join(case.slos)} | {true:.4g} ± {error:.2g} | {found['load']:.4g} | {off} "
        f"| {found['low']:.4g} to {found['high']:.4g} | {'yes' if covered else 'no'} | {len(found['probes'])} "
        f"| {sum(probe['requests'] or 0 for probe in found['probes']):,} | {summary['verdict']['status']} |"
    )


def main(words: Sequence[str]) -> None:
    command, root, *wanted = words
    cases = [case for case in CASES if not wanted or any(word in case.name for word in wanted)]
    directories = [Path(root).resolve() / case.name.replace(" ", "_") for case in cases]
    if command == "search":
        with ThreadPoolExecutor(len(cases)) as pool:
            for ended in pool.map(search, cases, directories, range(len(cases))):
                print(ended, flush=True)
    elif command == "truth":
        with Pool() as processes:
            for line in processes.starmap(row, zip(cases, directories, strict=True)):
                print(line, flush=True)
    else:
        raise SystemExit(f"{command}: search or truth")


if __name__ == "__main__":
    main(sys.argv[1:])
