"""Hosts on one machine: network namespaces, each with an address of its own in two networks.

The control network carries what master and workers tell each other, the data network all else, so that one can be cut
without the other. Each is a bridge in a namespace of its own, the switch; a host's link is cut at the switch, and the
host itself sees no more than a cable that was pulled.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "vlfault"
_NETS = {"data": 1, "control": 0}
_IP_TIMEOUT_S = 20


def _ip(*arguments: str) -> str:
    told = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, timeout=_IP_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
    )
    if told.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {told.stderr.strip()}")
    return told.stdout


def why_not() -> str | None:
    """Why there can be no namespaces here; None where there can."""
    if shutil.which("ip") is None:
        return "there is no program ip: install the package iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"{_PREFIX}{os.getpid()}probe"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "del", probe)
    except OSError as error:
        return f"network namespaces are not allowed here: {error}"
    return None


@dataclass(frozen=True)
class Host:
    name: str
    namespace: str
    switch: str
    number: int

    @property
    def address(self) -> str:
        """In the data network."""
        return f"10.77.{_NETS['data']}.{self.number}"

    @property
    def control_address(self) -> str:
        return f"10.77.{_NETS['control']}.{self.number}"

    def on(self, own_disk: tuple[Path, Path] | None = None) -> tuple[str, ...]:
        """What stands before a command that is to run on this host. ``own_disk``: a directory of its own, and where
        its processes find it, in the place of what lies there.
        """
        enter = ("ip", "netns", "exec", self.namespace)
        if own_disk is None:
            return enter
        for directory in own_disk:
            directory.mkdir(exist_ok=True)
        mount = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
        return (*enter, "sh", "-c", mount, "sh", *map(str, own_disk))

    def link(self, net: str, *, up: bool) -> None:
        """Plug the host's cable into the switch, or pull it: ``net`` is ``data`` or ``control``."""
        _ip("-n", self.switch, "link", "set", f"{net[0]}{self.number}", "up" if up else "down")


class Network:
    """As many hosts as names. ``close`` removes them with all that still runs on them."""

    def __init__(self, *names: str) -> None:
        sweep()
        self._base = f"{_PREFIX}{os.getpid()}"
        self._switch = f"{self._base}switch"
        self.hosts: dict[str, Host] = {}
        try:
            self._build(names)
        except BaseException:
            self.close()
            raise

    def _build(self, names: Sequence[str]) -> None:
        _ip("netns", "add", self._switch)
        for net in _NETS:
            _ip("-n", self._switch, "link", "add", net, "type", "bridge")
            _ip("-n", self._switch, "link", "set", net, "up")
        for number, name in enumerate(names, 1):
            host = self.hosts[name] = Host(name, f"{self._base}{name}", self._switch, number)
            _ip("netns", "add", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            for net, third in _NETS.items():
                port = f"{net[0]}{number}"
                peer = ("peer", "name", net, "netns", host.namespace)
                _ip("-n", self._switch, "link", "add", port, "type", "veth", *peer)
                _ip("-n", self._switch, "link", "set", port, "master", net, "up")
                _ip("-n", host.namespace, "addr", "add", f"10.77.{third}.{number}/24", "dev", net)
                _ip("-n", host.namespace, "link", "set", net, "up")

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def close(self) -> None:
        for host in self.hosts.values():
            _remove(host.namespace)
        _remove(self._switch)


def _remove(namespace: str) -> None:
    with suppress(OSError):
        for pid in map(int, _ip("netns", "pids", namespace).split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    with suppress(OSError):
        _ip("netns", "del", namespace)


def sweep() -> None:
    """Remove what a test process has left behind that is no more."""
    for name in {line.split()[0] for line in _ip("netns", "list").splitlines() if line}:
        owner = re.match(rf"{_PREFIX}([0-9]+)", name)
        if owner is not None and not Path(f"/proc/{owner[1]}").exists():
            _remove(name)
    for line in Path("/proc/mounts").read_text().splitlines():
        source, path, *_ = line.split()
        owner = re.fullmatch(rf"{_PREFIX}([0-9]+)", source)
        if owner is not None and not Path(f"/proc/{owner[1]}").exists():
            subprocess.run(["umount", "-l", path], check=False, timeout=_IP_TIMEOUT_S)
