"""What the processes of a run show to others: their arguments, their variables, the sockets they listen on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_LISTEN = "0A"


def with_children(pid: int) -> Iterator[int]:
    """A process and all that it has started, as far as they are there."""
    yield pid
    try:
        children = (_PROC / str(pid) / "task" / str(pid) / "children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from with_children(int(child))


def arguments(pid: int) -> bytes:
    return _read(pid, "cmdline")


def variables(pid: int) -> bytes:
    return _read(pid, "environ")


def _read(pid: int, name: str) -> bytes:
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""


def listeners(pids: set[int]) -> tuple[set[int], set[str]]:
    """The TCP ports, and the paths of the unix sockets, on which these processes listen."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTEN and words[9] in inodes:
                ports.add(int(words[1].rpartition(":")[2], 16))
    udp = {
        words[9]
        for table in ("udp", "udp6")
        for line in (_PROC / "net" / table).read_text().splitlines()[1:]
        if (words := line.split())[9] in inodes
    }
    assert not udp, "a UDP socket"
    paths = set()
    for line in (_PROC / "net" / "unix").read_text().splitlines()[1:]:
        words = line.split()
        listens = int(words[3], 16) & 0x10000
        if listens and words[6] in inodes:
            paths.add(words[7] if len(words) > 7 else "")
    return ports, paths


def _socket_inodes(pid: int) -> Iterator[str]:
    directory = _PROC / str(pid) / "fd"
    try:
        links = list(directory.iterdir())
    except OSError:
        return
    for link in links:
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target[8:-1]
