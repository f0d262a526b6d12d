"""Judgement on a Redis or Valkey that is to carry runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from vllm_locust.checkup.check import Check, failed, ok, warning

LATENCY_NS: Final = 10_000_000
UNCERTAINTY_NS: Final = 10_000_000
"""As the verdict's ``clock_uncertain``."""
NEARLY_FULL: Final = 0.8


@dataclass(frozen=True, slots=True)
class RedisFacts:
    version: str
    role: str
    """``master``, or ``slave`` for a replica."""
    maxmemory_bytes: int | None
    maxmemory_policy: str
    used_bytes: int
    system_bytes: int | None
    saves_to_disk: bool
    """It keeps an append-only file, or has saved since it started."""
    last_save_ok: bool


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """The way to the server, and its clock: add ``offset_ns`` to this host's."""

    latency_median_ns: int
    latency_max_ns: int
    offset_ns: int
    uncertainty_ns: int


def judge_server(facts: RedisFacts) -> Check:
    limit = facts.maxmemory_bytes
    size = "no maxmemory" if limit is None else f"maxmemory {limit / (1 << 20):.0f} MiB, {facts.maxmemory_policy}"
    used = f"{facts.used_bytes / (1 << 20):.0f} MiB used"
    saves = "saves to disk" if facts.saves_to_disk else "saves nothing to disk"
    found = f"version {facts.version}, {facts.role}, {size}, {used}, {saves}"
    figures = {
        "version": facts.version,
        "role": facts.role,
        "maxmemory_bytes": limit,
        "maxmemory_policy": facts.maxmemory_policy,
        "used_bytes": facts.used_bytes,
        "system_bytes": facts.system_bytes,
        "saves_to_disk": facts.saves_to_disk,
        "last_save_ok": facts.last_save_ok,
    }
    if facts.role != "master":
        return failed(
            "Redis", found, "it is a replica, which refuses writes: give the address of its primary", **figures
        )
    fixes = []
    if limit is None:
        fixes.append("set maxmemory (1gb is plenty) and maxmemory-policy noeviction: the kernel ends what outgrows it")
    elif facts.maxmemory_policy.startswith("volatile"):
        fixes.append("set maxmemory-policy noeviction: GPU and server samples expire, and so may be evicted")
    if limit is not None and facts.used_bytes > NEARLY_FULL * limit:
        fixes.append("it is nearly full: raise maxmemory, or remove what others left there")
    if not facts.last_save_ok:
        fixes.append("its last save failed, after which it refuses writes: see its log, or set save ''")
    elif facts.saves_to_disk:
        fixes.append("set save '' and appendonly no: records need no second copy, and a save takes time and memory")
    return warning("Redis", found, "; ".join(fixes), **figures) if fixes else ok("Redis", found, **figures)


def judge_link(link: LinkFacts) -> tuple[Check, Check]:
    """The latency, and the clock beside the server's."""
    found = f"{link.latency_median_ns / 1e6:.2f} ms a round trip (median), {link.latency_max_ns / 1e6:.2f} ms at most"
    figures = {"median_s": link.latency_median_ns / 1e9, "max_s": link.latency_max_ns / 1e9}
    if link.latency_median_ns > LATENCY_NS:
        latency = warning("Redis latency", found, "use a Redis nearer to this host", **figures)
    else:
        latency = ok("Redis latency", found, **figures)
    offset = {"offset_s": link.offset_ns / 1e9, "uncertainty_s": link.uncertainty_ns / 1e9}
    found = f"the Redis server's is {link.offset_ns / 1e6:+.3f} ms from this one, +-{link.uncertainty_ns / 1e6:.3f} ms"
    if link.uncertainty_ns > UNCERTAINTY_NS:
        return latency, warning("clock offset", found, "use a Redis nearer to this host", **offset)
    return latency, ok("clock offset", found, **offset)


def judge_rights(role: str, tried: int, refused: Mapping[str, str]) -> Check:
    """``refused``: each command that the server refused, with its reason."""
    if not refused:
        return ok("Redis rights", f"all {tried} commands of a {role} are allowed", tried=tried, refused={})
    found = f"{len(refused)} of {tried} commands of a {role} are refused: "
    found += "; ".join(
        f"{', '.join(command for command in refused if refused[command] == reason)} ({reason})"
        for reason in dict.fromkeys(refused.values())
    )
    fix = f"give the user the rights of {role} in redis.acl (vllm-locust path redis.acl)"
    if not any("ermission" in reason or "NOPERM" in reason for reason in refused.values()):
        fix = "make the server take writes: see its memory, its disk and whether it is a replica"
    return failed("Redis rights", found, fix, tried=tried, refused=dict(refused))
