"""Connections of the kernel transport: opened here, kept alive between requests, never used when the server may have
left.

All waiting is gevent's; the sockets themselves are plain non-blocking ones, so that the receiver can read them
directly.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
from typing import Any
from urllib.parse import SplitResult

import gevent
from gevent import socket as gevent_socket

from vllm_locust import clock
from vllm_locust.config import Target
from vllm_locust.load.proxy import proxy_authorization, proxy_for
from vllm_locust.load.receiver import READ_BYTES, enable_stamps, raw_socket
from vllm_locust.load.transport import IDLE_LIMIT_NS

RESOLVED_FOR_NS = 60_000_000_000


class Connection:
    """An open connection. ``tls`` is None for plain HTTP; ``absolute_form`` is set where a proxy needs whole
    addresses.
    """

    def __init__(
        self, sock: Any, tls: TlsChannel | None, *, stamps: bool, proxy_headers: tuple[tuple[str, str], ...] | None
    ) -> None:
        self.sock = sock
        self.tls = tls
        self.stamps = stamps
        self.proxy_headers = proxy_headers
        """Headers for a forward proxy; None when there is none between us and the server."""
        self.idle_since_ns = 0
        self.idle_limit_ns = IDLE_LIMIT_NS

    def send(self, data: bytes) -> None:
        """Hand everything to the kernel, waiting where it must. Raises OSError."""
        send_all(self.sock, data if self.tls is None else self.tls.encrypt(data))

    def note_keep_alive(self, header: str | None) -> None:
        """``Keep-Alive: timeout=N`` shortens the time for which the connection may be reused."""
        match = re.search(r"timeout=([0-9]+)", header or "")
        if match and len(match[1]) < 10:
            self.idle_limit_ns = min(IDLE_LIMIT_NS, max(0, int(match[1]) * 1_000_000_000 - 1_000_000_000))

    def alive(self) -> bool:
        """Still usable: not idle for too long, and neither closed by the server nor holding bytes nobody asked for."""
        if clock.monotonic_ns() - self.idle_since_ns > self.idle_limit_ns:
            return False
        try:
            return self.sock.recv(1, socket.MSG_PEEK) is None
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        self.sock.close()


class TlsChannel:
    """TLS over memory buffers, so that the ciphertext is read by the receiver with the kernel's stamp."""

    def __init__(self, context: ssl.SSLContext, server_hostname: str) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_hostname)

    def handshake(self, sock: Any) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                send_all(sock, self._outgoing.read())
                data = receive(sock)
                if not data:
                    raise ConnectionResetError("the server closed the connection during the TLS handshake") from None
                self._incoming.write(data)
            else:
                send_all(sock, self._outgoing.read())
                return

    def encrypt(self, data: bytes) -> bytes:
        self._tls.write(data)
        return self._outgoing.read()

    def decrypt(self, data: bytes) -> bytes:
        """Plain bytes of the records completed by ``data``. Raises ssl.SSLError for a broken record."""
        self._incoming.write(data)
        parts = []
        while True:
            try:
                part = self._tls.read(READ_BYTES)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLZeroReturnError:
                break
            if not part:
                break
            parts.append(part)
        return b"".join(parts)


class ConnectionPool:
    """Idle connections per server, the most recently used first, and the way to new ones."""

    def __init__(self, tls_context: ssl.SSLContext, proxy: str | None) -> None:
        self._tls_context = tls_context
        self._proxy = proxy
        self._idle: dict[Target, list[Connection]] = {}
        self._addresses: dict[tuple[str, int], tuple[int, list[Any]]] = {}

    def take(self, target: Target) -> Connection | None:
        """An idle connection that is known to be alive, or None."""
        idle = self._idle.get(target)
        while idle:
            connection = idle.pop()
            if connection.alive():
                return connection
            connection.close()
        return None

    def give(self, target: Target, connection: Connection) -> None:
        connection.idle_since_ns = clock.monotonic_ns()
        self._idle.setdefault(target, []).append(connection)

    def open(self, target: Target, timeout_ns: int | None) -> Connection:
        """Connect, through the proxy where one is set, TLS included. Raises OSError (TimeoutError when it took too
        long).
        """
        try:
            with gevent.Timeout(None if timeout_ns is None else timeout_ns / 1e9, TimeoutError("connect timed out")):
                return self._open(target)
        except UnicodeError as error:
            raise OSError(f"no host can have this name: {error}") from None

    def _open(self, target: Target) -> Connection:
        if target.socket_path is not None:
            sock = raw_socket(socket.AF_UNIX, socket.SOCK_STREAM)
            return self._wrap(sock, target.socket_path, target, None)
        proxy = proxy_for(self._proxy, target)
        host, port = (target.host, target.port) if proxy is None else (proxy.hostname or "", proxy.port or 80)
        errors: list[OSError] = []
        for family, _, _, _, address in self._resolve(host, port):
            try:
                return self._wrap(raw_socket(family, socket.SOCK_STREAM), address, target, proxy)
            except ConnectionRefusedError as error:
                errors.append(error)
            except OSError as error:
                if isinstance(error, TimeoutError | ssl.SSLError):
                    raise
                errors.append(error)
        raise errors[0]

    def _wrap(self, sock: Any, address: Any, target: Target, proxy: SplitResult | None) -> Connection:
        try:
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stamps = sock.family != socket.AF_UNIX and enable_stamps(sock)
            _connect(sock, address)
            proxy_headers = None if proxy is None else tuple(proxy_authorization(proxy).items())
            tls = None
            if target.scheme == "https":
                if proxy_headers is not None:
                    _tunnel(sock, target, proxy_headers)
                    proxy_headers = None
                tls = TlsChannel(self._tls_context, target.host)
                tls.handshake(sock)
            return Connection(sock, tls, stamps=stamps, proxy_headers=proxy_headers)
        except BaseException:
            sock.close()
            raise

    def _resolve(self, host: str, port: int) -> list[Any]:
        now_ns = clock.monotonic_ns()
        until_ns, addresses = self._addresses.get((host, port), (0, []))
        if now_ns >= until_ns:
            addresses = gevent_socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self._addresses[host, port] = (now_ns + RESOLVED_FOR_NS, addresses)
        return addresses

    def close(self) -> None:
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()


def send_all(sock: Any, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except BlockingIOError:
            gevent_socket.wait_write(sock.fileno())


def receive(sock: Any) -> bytes:
    while True:
        try:
            return sock.recv(READ_BYTES)  # type: ignore[no-any-return]
        except BlockingIOError:
            gevent_socket.wait_read(sock.fileno())


def _connect(sock: Any, address: Any) -> None:
    try:
        sock.connect(address)
    except BlockingIOError:
        gevent_socket.wait_write(sock.fileno())
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code)) from None


def _tunnel(sock: Any, target: Target, headers: tuple[tuple[str, str], ...]) -> None:
    host = f"[{target.host}]" if ":" in target.host else target.host
    place = f"{host}:{target.port}"
    lines = [f"CONNECT {place} HTTP/1.1", f"Host: {place}", *(f"{name}: {value}" for name, value in headers)]
    send_all(sock, ("\r\n".join(lines) + "\r\n\r\n").encode())
    answer = b""
    while b"\r\n\r\n" not in answer:
        data = receive(sock)
        if not data or len(answer) > READ_BYTES:
            raise ConnectionRefusedError("the proxy closed the connection during CONNECT")
        answer += data
    status = answer.split(b"\r\n", 1)[0]
    if not re.match(rb"HTTP/1\.[01] 200\b", status):
        raise ConnectionRefusedError(f"the proxy refused CONNECT: {status.decode('latin-1')}")
