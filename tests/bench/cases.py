"""The cases of the benchmark. Each returns rows for the report; what could not run is a row that says why."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.bench.clients.client import Client
from tests.bench.measure import Plan, Run, RunFailure, measure
from tests.bench.placement import Placement
from tests.bench.truth import Schedule

SERVER_LIMIT_TOKENS_PER_S = 120_000
"""What the truth server sends on schedule with room to spare."""
CEILING_ERROR_MS = 0.05
WITHIN = "within"
_REQUEST_S = 5.0


@dataclass(frozen=True, slots=True)
class Bench:
    """What all cases share."""

    work: Path
    placement: Placement
    window_s: float
    tries: int

    def beside_neighbours(self) -> Bench:
        """For cases that disturb the client on purpose: no repeats, and no priority over what disturbs it."""
        return replace(self, tries=1, placement=replace(self.placement, priority=False))

    def run(self, client: Client, plan: Plan, label: str) -> Run | str:
        """The run, or the reason why there is none."""
        print(f"  {label}: {client.name} …", file=sys.stderr, flush=True)
        try:
            return measure(client, plan, self.work / label, self.placement, tries=self.tries)
        except (RunFailure, RuntimeError, OSError, ValueError, KeyError) as error:
            print(f"    no result: {error}", file=sys.stderr, flush=True)
            return str(error).splitlines()[0] if str(error) else type(error).__name__


@dataclass(frozen=True, slots=True)
class Row:
    """One client at one load. ``run`` is the reason where there is no result."""

    case: str
    client: str
    streams: int
    chunks_per_s_per_stream: float
    run: Run | str
    yardstick_us: float | None = None
    """CPU per token of the C client at the same load."""
    note: str = ""


def schedule_for(streams: int, tokens_per_s: float) -> Schedule:
    """Requests of about five seconds whose streams together send ``tokens_per_s``."""
    gap_us = round(1e6 * streams / tokens_per_s)
    return Schedule(tokens=max(2, round(_REQUEST_S * 1e6 / gap_us)), gap_us=gap_us)


def schedule_within(window_s: float, gap_us: int) -> Schedule:
    """Requests of five seconds, or shorter ones where the window would not hold a whole one, and so no TTFT."""
    return Schedule(tokens=min(5_000_000, round((window_s - 1) * 1e6)) // gap_us, gap_us=gap_us)


def matrix(bench: Bench, clients: Sequence[Client], streams: Iterable[int]) -> Iterator[Row]:
    """Every client at every number of streams: 50 chunks/s each, 25 above 1,000 streams."""
    for count in streams:
        schedule = schedule_within(bench.window_s, 20_000 if count <= 1000 else 40_000)
        yardstick: float | None = None
        for client in clients:
            run = bench.run(client, Plan(schedule, count, bench.window_s), f"matrix-{count}")
            if client.name == "epoll-c" and isinstance(run, Run):
                yardstick = run.cpu_us_per_token
            yield Row("matrix", client.name, count, 1e6 / schedule.gap_us, run, yardstick)


def ceiling(bench: Bench, client: Client, *, streams: int = 1000, start: float = 50_000) -> Iterator[Row]:
    """The most tokens whose chunk times are right to 0.05 ms at p99: up in steps of 20 %, then halving the step."""
    good: float | None = None
    bad: float | None = None
    rate = start
    for _ in range(12):
        schedule = schedule_for(streams, rate)
        run = bench.run(client, Plan(schedule, streams, min(bench.window_s, 6.0)), f"ceiling-{rate:.0f}")
        fits = isinstance(run, Run) and _within_ceiling(run)
        yield Row("ceiling", client.name, streams, 1e6 / schedule.gap_us, run, note=WITHIN if fits else "beyond")
        if fits:
            good = rate
        else:
            bad = rate
        if (bad is None and rate == SERVER_LIMIT_TOKENS_PER_S) or (bad and good and bad / good < 1.05):
            return
        if bad is None:
            rate = min(rate * 1.2, SERVER_LIMIT_TOKENS_PER_S)
        elif good is None:
            rate /= 1.3
        else:
            rate = (good + bad) / 2


def highest_within(rows: Iterable[Row], client: str) -> float | None:
    """Tokens/s reached at the highest load that was within the ceiling's error."""
    return max(
        (
            row.run.tokens_per_s
            for row in rows
            if row.case == "ceiling" and row.client == client and row.note == WITHIN and isinstance(row.run, Run)
        ),
        default=None,
    )


def _within_ceiling(run: Run) -> bool:
    """By the times alone: a closed loop whose client is at its limit lags behind the schedule, and the tokens that were
    really sent say how much it carried.
    """
    error = run.accuracy.chunk_error
    return error is not None and error.p99 <= CEILING_ERROR_MS


def overload(bench: Bench, client: Client, limit_tokens_per_s: float) -> Row:
    """Twice what the process carries: by rate, and where the server cannot send that, by hogs on the client's core."""
    rate = min(2 * limit_tokens_per_s, SERVER_LIMIT_TOKENS_PER_S)
    hogs = round(2 * limit_tokens_per_s / rate) - 1
    schedule = schedule_for(1000, rate)
    shared = bench.beside_neighbours()
    with cpu_hogs(bench.placement.client_core, hogs):
        run = shared.run(client, Plan(schedule, 1000, bench.window_s), "overload")
    note = f"{rate:,.0f} tokens/s offered, {hogs} CPU hogs beside it"
    return Row("overload", client.name, 1000, 1e6 / schedule.gap_us, run, note=note)


def hog(bench: Bench, clients: Sequence[Client], streams: int = 100) -> Iterator[Row]:
    """The same load without and with a busy neighbour on the client's core: 20 chunks/s per stream, which every
    transport holds when it is alone, so that what moves is the neighbour's doing.
    """
    shared = bench.beside_neighbours()
    schedule = schedule_within(bench.window_s, 50_000)
    for client in clients:
        for hogs in (0, 1):
            with cpu_hogs(bench.placement.client_core, hogs):
                run = shared.run(client, Plan(schedule, streams, bench.window_s), f"hog-{hogs}")
            note = "CPU hog on its core" if hogs else "alone"
            yield Row("hog", client.name, streams, 1e6 / schedule.gap_us, run, note=note)


@contextmanager
def cpu_hogs(core: int, count: int) -> Iterator[None]:
    argv = ["taskset", "-c", str(core), sys.executable, "-c", "while True: pass"]
    hogs = [subprocess.Popen(argv) for _ in range(count)]
    try:
        yield
    finally:
        for process in hogs:
            process.kill()
            process.wait()


@dataclass(frozen=True, slots=True)
class Doubling:
    """CPU of one unit at a size and at twice the size. Linear cost is a ratio of at most 2."""

    client: str
    what: str
    unit: str
    cpu_us: float | None
    cpu_us_double: float | None

    @property
    def ratio(self) -> float | None:
        if self.cpu_us is None or self.cpu_us_double is None or self.cpu_us == 0:
            return None
        return self.cpu_us_double / self.cpu_us


def linearity(bench: Bench, client: Client) -> Iterator[Doubling]:
    """1 MB prompts, 300 kB events, 100,000-token answers, each beside its half."""
    calm = replace(bench, tries=1)

    def cpu(plan: Plan, label: str, per: float) -> float | None:
        run = calm.run(client, plan, label)
        return run.cpu_us_per_token * per if isinstance(run, Run) and run.cpu_us_per_token is not None else None

    def prompt(size: int) -> float | None:
        schedule = Schedule(tokens=5, gap_us=5_000)
        return cpu(Plan(schedule, 8, bench.window_s, prompt_bytes=size), f"prompt-{size}", 5)

    def event(size: int) -> float | None:
        schedule = Schedule(tokens=100, event_bytes=size)
        return cpu(Plan(schedule, 4, bench.window_s), f"event-{size}", 1)

    def answer(tokens: int) -> float | None:
        schedule = Schedule(tokens=tokens, gap_us=200)
        return cpu(Plan(schedule, 4, schedule.request_s - 4), f"answer-{tokens}", tokens)

    name = client.name
    yield Doubling(name, "prompt of 0.5 and 1 MB", "request", prompt(500_000), prompt(1_000_000))
    yield Doubling(name, "event of 150 and 300 kB", "event", event(150_000), event(300_000))
    yield Doubling(name, "answer of 50,000 and 100,000 tokens", "answer", answer(50_000), answer(100_000))


def live_views() -> Iterator[dict[str, float]]:
    """What looking at a run costs its master, in a process of its own, since Locust patches the one that imports it."""
    for workers in (5, 50, 200):
        command = [sys.executable, "-m", "tests.bench.live_view", "--workers", str(workers)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        yield json.loads(done.stdout.splitlines()[-1])
