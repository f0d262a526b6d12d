"""Judgement on a host: what it gives to a load generator, and what of that would move its numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from vllm_locust.checkup.check import Check, failed, ok, skipped, warning
from vllm_locust.duration import seconds

BUSY_FRACTION: Final = 0.5
"""Load of the cores before the test. A worker near a whole core is late, whoever else uses it."""
STEAL_FRACTION: Final = 0.01
CLOCK_MAX_ERROR_NS: Final = 10_000_000
"""As the verdict's ``clock_uncertain``."""
CLOCK_MOVED_NS: Final = 1_000_000
STAMP_LAG_NS: Final = 1_000_000
FREE_FAILED_BYTES: Final = 100 << 20
FREE_WARNING_BYTES: Final = 2 << 30
FSYNC_NS: Final = 100_000_000
_STEADY_SOURCES: Final = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "xen", "ptp_kvm")


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Limits of one process; None for no limit."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True, slots=True)
class CpuFacts:
    cores: int
    """That this process may run on."""
    quota_cores: float | None
    """What a control group allows; None for no quota."""
    load_1m: float | None
    steal_fraction: float | None
    """Of all time in the last moments, taken by the hypervisor for others."""


@dataclass(frozen=True, slots=True)
class ClockFacts:
    synchronized: bool | None
    """As the kernel says; None where it does not."""
    max_error_ns: int | None
    source: str | None
    moved_ns: int
    """How far the wall clock left the monotonic one while the checks ran."""


@dataclass(frozen=True, slots=True)
class StampFacts:
    """Lags are read - stamp. None where nothing was stamped."""

    reads: int
    stamped: int
    lag_median_ns: int | None
    lag_max_ns: int | None


@dataclass(frozen=True, slots=True)
class DiskFacts:
    directory: str
    free_bytes: int
    fsync_ns: int
    """The median of writing and syncing a megabyte."""


def judge_descriptors(limits: Descriptors, *, users: int, processes: int, spare: int) -> Check:
    """``spare``: what a process opens besides a connection for each of its users."""
    needed = math.ceil(users / processes) + spare
    found = (
        f"{limits.soft or 'unlimited'} soft, {limits.hard or 'unlimited'} hard; "
        f"{needed} needed for {users} users in {processes} process{'es' if processes > 1 else ''}"
    )
    figures = {"soft": limits.soft, "hard": limits.hard, "needed": needed}
    if limits.hard is not None and limits.hard < needed:
        return failed("descriptors", found, f"set ulimit -Hn {needed}, or use more processes", **figures)
    return ok("descriptors", found, **figures)


def judge_ports(ports: int | None, *, users: int) -> Check:
    """A connection to one address takes a local port of this host, whatever process makes it."""
    if ports is None:
        return skipped("local ports", "the kernel does not tell their range", "look at net.ipv4.ip_local_port_range")
    found = f"{ports} for one address, {users} needed for {users} users"
    figures = {"ports": ports, "needed": users}
    fix = "widen it: sysctl -w net.ipv4.ip_local_port_range='1024 65535', or use several hosts or --target addresses"
    if users > ports:
        return failed("local ports", found, fix, **figures)
    if users > ports * 0.8:
        return warning("local ports", f"{found}; closed connections hold theirs for a minute", fix, **figures)
    return ok("local ports", found, **figures)


def judge_cpu(cpu: CpuFacts, *, processes: int) -> Check:
    parts = [f"{cpu.cores} core{'s' if cpu.cores > 1 else ''}"]
    parts += [] if cpu.load_1m is None else [f"load {cpu.load_1m:.2f}"]
    parts += [] if cpu.steal_fraction is None else [f"steal {cpu.steal_fraction:.1%}"]
    fixes = []
    if cpu.quota_cores is not None:
        parts.append(f"quota of {cpu.quota_cores:g} cores")
        fixes.append("drop the CPU limit (cpu.max, limits.cpu): the kernel stops the process to keep to it")
    if processes > cpu.cores:
        fixes.append(f"use at most {cpu.cores} processes here: one for each core")
    if cpu.load_1m is not None and cpu.load_1m > BUSY_FRACTION * cpu.cores:
        fixes.append("find what else runs here (top) and end it, or use another host")
    if cpu.steal_fraction is not None and cpu.steal_fraction > STEAL_FRACTION:
        fixes.append("move to a host whose cores are not shared with others")
    figures = {
        "cores": cpu.cores,
        "quota_cores": cpu.quota_cores,
        "load_1m": cpu.load_1m,
        "steal_fraction": cpu.steal_fraction,
    }
    found = ", ".join(parts)
    return warning("CPU", found, "; ".join(fixes), **figures) if fixes else ok("CPU", found, **figures)


def judge_clock(clock: ClockFacts) -> Check:
    """Times of hosts are compared over the Redis server's clock, so that a wrong one is no failure."""
    said = {True: "synchronized", False: "not synchronized", None: "synchronization unknown"}[clock.synchronized]
    error_ms = None if clock.max_error_ns is None else clock.max_error_ns / 1e6
    parts = [said if error_ms is None or not clock.synchronized else f"{said} to {error_ms:.3g} ms"]
    parts.append(f"source {clock.source or 'unknown'}")
    fixes = []
    if clock.synchronized is False:
        fixes.append("start chrony or systemd-timesyncd, and let it slew rather than step")
    elif clock.max_error_ns is not None and clock.max_error_ns > CLOCK_MAX_ERROR_NS:
        fixes.append("give chrony a nearer time server")
    if clock.source is not None and clock.source not in _STEADY_SOURCES:
        fixes.append(f"{clock.source} is slow and may jump: boot with clocksource=tsc where the CPU has a steady one")
    if abs(clock.moved_ns) > CLOCK_MOVED_NS:
        parts.append(f"set by {clock.moved_ns / 1e6:.3g} ms during the checks")
        fixes.append("wait until it no longer steps")
    figures = {
        "synchronized": clock.synchronized,
        "max_error_s": seconds(clock.max_error_ns),
        "source": clock.source,
        "moved_s": clock.moved_ns / 1e9,
    }
    found = ", ".join(parts)
    return warning("clock", found, "; ".join(fixes), **figures) if fixes else ok("clock", found, **figures)


def judge_stamps(stamps: StampFacts) -> Check:
    figures = {
        "reads": stamps.reads,
        "stamped": stamps.stamped,
        "lag_median_s": seconds(stamps.lag_median_ns),
        "lag_max_s": seconds(stamps.lag_max_ns),
    }
    if stamps.lag_median_ns is None or stamps.lag_max_ns is None or stamps.stamped < stamps.reads:
        found = f"{stamps.stamped} of {stamps.reads} loopback reads were stamped"
        fix = "use a Linux kernel itself (no gVisor): without stamps, times are those of the reading process"
        return warning("kernel stamps", found, fix, **figures)
    lags = (
        f"read {stamps.lag_median_ns / 1e3:.0f} us after the stamp (median), {stamps.lag_max_ns / 1e3:.0f} us at most"
    )
    found = f"all {stamps.reads} loopback reads were stamped; {lags}"
    if stamps.lag_median_ns > STAMP_LAG_NS:
        return warning("kernel stamps", found, "this host is too busy or too slow to read in time", **figures)
    return ok("kernel stamps", found, **figures)


def judge_disk(name: str, disk: DiskFacts) -> Check:
    free, sync_ms = f"{disk.free_bytes / (1 << 30):.1f} GiB", disk.fsync_ns / 1e6
    found = f"{free} free in {disk.directory}, {sync_ms:.1f} ms to sync a megabyte"
    figures = {"directory": disk.directory, "free_bytes": disk.free_bytes, "fsync_s": disk.fsync_ns / 1e9}
    if disk.free_bytes < FREE_FAILED_BYTES:
        return failed(name, found, "free some space, or give another --run-dir", **figures)
    if disk.free_bytes < FREE_WARNING_BYTES:
        return warning(name, found, "free some space: a million requests of 200 tokens take about 2 GiB", **figures)
    if disk.fsync_ns > FSYNC_NS:
        return warning(name, found, "use a local disk: records wait longer in Redis and in memory", **figures)
    return ok(name, found, **figures)
