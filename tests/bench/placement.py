"""Which core a process runs on, what CPU it used there, and how long it waited for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Placement:
    """One core for the client, one for the server and whatever serves the client (Redis, recorder, master)."""

    client_core: int
    server_core: int
    realtime_server: bool
    """The truth server runs under SCHED_FIFO, so that what shares its core cannot delay it."""
    priority: bool = False
    """The client goes before its neighbours: one process under SCHED_FIFO, several with a low nice value, since under
    SCHED_FIFO they would starve each other."""

    def client_argv(self, argv: list[str], *, alone: bool) -> list[str]:
        nice = ["nice", "-n", "-15"] if self.priority and not alone else []
        return [*_pin(self.client_core, self.priority and alone), *nice, *argv]

    def server_argv(self, argv: list[str]) -> list[str]:
        return [*_pin(self.server_core, self.realtime_server), *argv]

    def support_argv(self, argv: list[str]) -> list[str]:
        return [*_pin(self.server_core, False), *argv]


def _pin(core: int, realtime: bool) -> list[str]:
    return ["taskset", "-c", str(core), *(["chrt", "-f", "10"] if realtime else [])]


def default_placement(priority: bool) -> Placement:
    cores = sorted(os.sched_getaffinity(0))
    # A core's hardware threads share its units: what one of them does would slow the other down.
    apart = [core for core in cores if core not in _siblings(cores[0])]
    if len(cores) < 2:
        raise RuntimeError("the benchmark needs two cores, one for the client and one for the server")
    can = (
        shutil.which("chrt") is not None
        and subprocess.run(["chrt", "-f", "10", "true"], capture_output=True).returncode == 0
    )
    if priority and not can:
        raise RuntimeError("--priority needs chrt and the right to use it (CAP_SYS_NICE): run as root or leave it out")
    return Placement(cores[0], (apart or cores[1:])[0], can, priority)


def _siblings(core: int) -> set[int]:
    """The hardware threads of a core's physical core, itself among them; only itself where Linux does not tell."""
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return {core}
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


@dataclass(frozen=True, slots=True)
class Usage:
    """Counters of a set of processes at one moment."""

    at_ns: int
    cpu_ns: dict[int, int]
    run_delay_ns: dict[int, int]
    rss_bytes: int

    def since(self, earlier: Usage) -> UsageShare:
        wall = self.at_ns - earlier.at_ns
        cpu = sum(self.cpu_ns[p] - earlier.cpu_ns.get(p, 0) for p in self.cpu_ns)
        delay = sum(self.run_delay_ns[t] - earlier.run_delay_ns.get(t, 0) for t in self.run_delay_ns)
        return UsageShare(earlier.at_ns, self.at_ns, cpu, delay / wall, self.rss_bytes)


@dataclass(frozen=True, slots=True)
class UsageShare:
    start_ns: int
    end_ns: int
    cpu_ns: int
    run_delay_share: float
    """Time spent waiting for a core per second, over all threads: above 1 it is the client's own crowd."""
    rss_bytes: int

    @property
    def wall_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def cpu_share(self) -> float:
        return self.cpu_ns / (self.end_ns - self.start_ns)


def usage(pids: list[int]) -> Usage:
    """Whole-process CPU (ended threads included) and each live thread's run-queue wait. Ended processes drop out."""
    cpu: dict[int, int] = {}
    delay: dict[int, int] = {}
    rss = 0
    at = time.monotonic_ns()
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            for task in os.listdir(f"/proc/{pid}/task"):
                delay[int(task)] = int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        cpu[pid] = (int(fields[11]) + int(fields[12])) * _TICK_NS
        rss += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return Usage(at, cpu, delay, rss)


def process_tree(root: int) -> list[int]:
    """``root`` and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(entry))
    tree = [root]
    for pid in tree:
        tree.extend(children.get(pid, []))
    return tree
