"""Preflight of what this machine gives one worker: file descriptors and local ports, a connection per busy user."""

from __future__ import annotations

import contextlib
import math
import resource
from collections import Counter
from collections.abc import Sequence

from vllm_locust.config import Target
from vllm_locust.load.health import open_fds
from vllm_locust.load.proxy import proxy_for

SPARE_DESCRIPTORS = 64
"""For what a run opens besides its users' connections: spool, Redis, name look-ups, connections not closed yet."""
_PORT_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"


def problems(users: int, targets: Sequence[Target], proxy: str | None = None) -> list[str]:
    """Why this process cannot hold a connection for each of ``users`` at the same time, a sentence each. Raises the
    soft limit on descriptors where that helps. What cannot be told is no problem.
    """
    faults = [_descriptor_problem(users), *_port_problems(users, targets, proxy)]
    return [fault for fault in faults if fault is not None]


def _descriptor_problem(users: int) -> str | None:
    in_use = open_fds()
    if in_use is None:
        return None
    needed = users + in_use + SPARE_DESCRIPTORS
    limit = _descriptor_limit()
    if limit is None or limit >= needed:
        return None
    limit = raise_descriptor_limit()
    if limit is None or limit >= needed:
        return None
    return (
        f"-u: {users} users of this worker need {needed} file descriptors, {in_use} that are open and "
        f"{SPARE_DESCRIPTORS} spare ones among them, and it may have {limit}; set ulimit -n {needed} or more, add "
        "workers, or lower -u"
    )


def raise_descriptor_limit() -> int | None:
    """Raise the soft limit to the hard one. Returns the limit that then holds, None for no limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems allow less than the hard limit says: the old one then stands, and is what is returned.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return _descriptor_limit()


def _descriptor_limit() -> int | None:
    return descriptor_limits()[0]


def descriptor_limits() -> tuple[int | None, int | None]:
    """The soft limit and the hard one, None for no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    return None if soft == unlimited else soft, None if hard == unlimited else hard


def _port_problems(users: int, targets: Sequence[Target], proxy: str | None) -> list[str | None]:
    """A connection to one address takes a local port that no other connection to it has."""
    ports = local_ports()
    if ports is None:
        return []
    places = [_address(target, proxy) for target in targets]
    faults: list[str | None] = []
    for place, times in Counter(place for place in places if place is not None).items():
        busy = math.ceil(users * times / len(targets))
        if busy > ports:
            faults.append(
                f"-u: {busy} users of this worker connect to {place}, and this machine has {ports} local ports for one "
                "address (fewer while closed connections are in TIME_WAIT); widen net.ipv4.ip_local_port_range, add "
                "workers on other machines, a --target with another address, or lower -u"
            )
    return faults


def _address(target: Target, proxy: str | None) -> str | None:
    """Where connections for this target go; None for a unix socket."""
    if target.socket_path is not None:
        return None
    between = proxy_for(proxy, target)
    return f"{target.host}:{target.port}" if between is None else f"{between.hostname}:{between.port or 80}"


def local_ports() -> int | None:
    """How many ports the kernel chooses from when a connection is opened, IPv4 and IPv6 alike; None where it does not
    tell.
    """
    try:
        with open(_PORT_RANGE, encoding="ascii") as file:
            low, high = map(int, file.read().split())
    except (OSError, ValueError):
        return None
    return high - low + 1
