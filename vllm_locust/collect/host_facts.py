"""What the kernel says of this host's cores and clock, asked once."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from vllm_locust import clock
from vllm_locust.checkup.host import ClockFacts, CpuFacts

_CLOCK_SOURCE: Final = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_STA_UNSYNC: Final = 0x40


def cpu_facts(watch_s: float, *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> CpuFacts:
    """Takes ``watch_s`` seconds, over which the stolen time is measured."""
    before = _ticks(proc)
    clock.sleep(watch_s)
    after = _ticks(proc)
    steal: float | None = None
    if before is not None and after is not None and after[1] > before[1]:
        steal = (after[0] - before[0]) / (after[1] - before[1])
    loads = _text(proc / "loadavg").split()
    return CpuFacts(
        cores=len(os.sched_getaffinity(0)),
        quota_cores=_quota_cores(proc, cgroup),
        load_1m=float(loads[0]) if loads else None,
        steal_fraction=steal,
    )


def _ticks(proc: Path) -> tuple[int, int] | None:
    """Stolen and in all, of all cores."""
    words = _text(proc / "stat").partition("\n")[0].split()
    if len(words) < 9 or words[0] != "cpu":
        return None
    ticks = [int(word) for word in words[1:9]]
    return ticks[7], sum(ticks)


def _quota_cores(proc: Path, cgroup: Path) -> float | None:
    """Of this process's control group, of the second version and of the first."""
    groups = dict(
        line.split(":", 2)[1:] for line in _text(proc / "self" / "cgroup").splitlines() if line.count(":") > 1
    )
    for place in (cgroup / groups.get("", "/").lstrip("/"), cgroup):
        quota, _, period = _text(place / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            return int(quota) / int(period)
    for place in (cgroup / "cpu" / groups.get("cpu,cpuacct", groups.get("cpu", "/")).lstrip("/"), cgroup / "cpu"):
        quota, period = (_text(place / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit():
            return int(quota) / int(period)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


class Timex(ctypes.Structure):
    """``struct timex`` of Linux on 64 bits."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        *((name, ctypes.c_long) for name in ("offset", "freq", "maxerror", "esterror")),
        ("status", ctypes.c_int),
        *((name, ctypes.c_long) for name in ("constant", "precision", "tolerance", "tv_sec", "tv_usec", "tick")),
        *((name, ctypes.c_long) for name in ("ppsfreq", "jitter")),
        ("shift", ctypes.c_int),
        *((name, ctypes.c_long) for name in ("stabil", "jitcnt", "calcnt", "errcnt", "stbcnt")),
        ("tai", ctypes.c_int),
        ("unused", ctypes.c_int * 11),
    )


def ask_kernel_clock(timex: Any) -> int:
    """``adjtimex(2)`` that changes nothing. -1 where it is refused."""
    return int(ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex)))


def clock_facts(moved_ns: int, *, ask: Callable[[Any], int] = ask_kernel_clock) -> ClockFacts:
    timex = Timex()
    told = ask(timex) >= 0
    return ClockFacts(
        synchronized=not timex.status & _STA_UNSYNC if told else None,
        max_error_ns=timex.maxerror * 1000 if told else None,
        source=_text(_CLOCK_SOURCE).strip() or None,
        moved_ns=moved_ns,
    )
