"""A raw-socket server that answers with exactly the bytes, pauses and endings that a script says. One thread each."""

from __future__ import annotations

import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum


class End(Enum):
    KEEP = "keep"
    """Wait for the next request on the connection."""
    CLOSE = "close"
    RESET = "reset"
    BY_CLIENT = "by_client"
    """Wait for the client to close the connection, and note when it did."""


Step = bytes | float | End
"""Bytes to send, seconds to wait, or how to end. A script without an end keeps the connection."""


@dataclass(frozen=True)
class Request:
    name: str
    connection: int
    received_ns: int
    head: bytes
    body: bytes


@dataclass
class ScriptedServer:
    """Answers a POST by the script that its X-Request-Id names, up to the first ``/``, and a GET by the script ``GET``.
    The n-th request with the same name is answered by the script ``name#n``, where there is one.
    """

    scripts: Mapping[str, tuple[Step, ...]]
    listener: socket.socket
    tls: ssl.SSLContext | None = None
    requests: list[Request] = field(default_factory=list)
    sent_ns: dict[str, list[int]] = field(default_factory=dict)
    """Right before each send of a script."""
    hung_up_ns: dict[str, int] = field(default_factory=dict)
    _connections: int = 0
    _open: set[socket.socket] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            with self._lock:
                self._connections += 1
                number = self._connections
                self._open.add(sock)
            threading.Thread(target=self._serve_connection, args=(sock, number), daemon=True).start()

    def _serve_connection(self, sock: socket.socket, number: int) -> None:
        try:
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.tls is not None:
                sock = self.tls.wrap_socket(sock, server_side=True)
            while (request := _read_request(sock, number)) is not None:
                with self._lock:
                    self.requests.append(request)
                    times = sum(earlier.name == request.name for earlier in self.requests)
                if not self._play(sock, request, times):
                    break
        except OSError:
            pass
        finally:
            sock.close()

    def _play(self, sock: socket.socket, request: Request, times: int) -> bool:
        sent_ns = self.sent_ns.setdefault(request.name, [])
        name = request.name.partition("/")[0]
        for step in self.scripts.get(f"{name}#{times}", self.scripts[name]):
            if isinstance(step, float):
                time.sleep(step)
            elif isinstance(step, bytes):
                sent_ns.append(time.monotonic_ns())
                sock.sendall(step)
            elif step is End.RESET:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return False
            elif step is End.CLOSE:
                return False
            elif step is End.BY_CLIENT:
                self._await_close(sock, request.name)
                return False
        return True

    def _await_close(self, sock: socket.socket, name: str) -> None:
        sock.settimeout(10)
        with suppress(ConnectionResetError):
            while sock.recv(65536):
                pass
        self.hung_up_ns[name] = time.monotonic_ns()

    def refuse_from_now_on(self) -> None:
        """Further connections; those that are open stay."""
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.refuse_from_now_on()
        self.listener.close()
        for sock in self._open:
            sock.close()


def _read_request(sock: socket.socket, number: int) -> Request | None:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(65536)
        if not piece:
            return None
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    if head.startswith(b"GET "):
        return Request("GET", number, time.monotonic_ns(), head, body)
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    name = re.search(rb"(?i)\r\nx-request-id: *([^\r]+)", head)
    assert length is not None
    while len(body) < int(length[1]):
        body += sock.recv(65536)
    return Request("POST" if name is None else name[1].decode(), number, time.monotonic_ns(), head, body)


@contextmanager
def serving(
    scripts: Mapping[str, tuple[Step, ...]],
    *,
    family: socket.AddressFamily = socket.AF_INET,
    address: tuple[str, int] | str = ("127.0.0.1", 0),
    tls: ssl.SSLContext | None = None,
) -> Iterator[ScriptedServer]:
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(128)
    server = ScriptedServer(scripts, listener, tls)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(5)


# What scripts are made of

EVENT_STREAM = b"text/event-stream; charset=utf-8"


def head(status: bytes = b"200 OK", *, content_type: bytes | None = EVENT_STREAM, **headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 " + status]
    if content_type is not None:
        lines.append(b"content-type: " + content_type)
    lines += [name.replace("_", "-").encode() + b": " + value for name, value in headers.items()]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"


def chunked(*pieces: bytes) -> tuple[bytes, ...]:
    """A whole chunked 200 stream, one HTTP chunk and one send per piece."""
    return (head(transfer_encoding=b"chunked"), *(chunk(piece) for piece in pieces), LAST_CHUNK)


def whole(body: bytes, status: bytes = b"200 OK", content_type: bytes = b"application/json", **headers: bytes) -> bytes:
    """A whole answer with its length."""
    return head(status, content_type=content_type, content_length=b"%d" % len(body), **headers) + body
