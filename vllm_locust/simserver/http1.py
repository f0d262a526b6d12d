"""HTTP/1.1 on asyncio's transports, as uvicorn speaks it. Every write is its own send, and is stamped."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from enum import Enum
from http import HTTPStatus
from typing import Protocol, cast

import httptools

from vllm_locust import clock

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_INVALID = b"Invalid HTTP request received."
_LINGER_RESET = struct.pack("ii", 1, 0)
_NS_PER_S = 1_000_000_000


class End(Enum):
    """How the connection goes on after an answer."""

    KEEP = "keep"
    CLOSE = "close"
    RESET = "reset"


@dataclass(slots=True)
class HttpRequest:
    method: str
    path: str
    http_version: str
    headers: dict[str, str] = field(default_factory=dict)
    """Names in lower case; of repeated headers the last."""
    body: bytes = b""
    keep_alive: bool = True
    received_unix_ns: int = 0
    received_mono_ns: int = 0


class Handler(Protocol):
    def handle(self, request: HttpRequest, connection: Connection) -> None: ...


class _Date:
    """The date header, formatted once a second."""

    def __init__(self) -> None:
        self._second = -1
        self._text = ""

    def __call__(self) -> str:
        second = clock.unix_ns() // _NS_PER_S
        if second != self._second:
            self._second, self._text = second, formatdate(second, usegmt=True)
        return self._text


_date = _Date()


def head(status: HTTPStatus | int, headers: list[tuple[str, str]]) -> bytes:
    """Status line and headers, the date and server first."""
    lines = [f"HTTP/1.1 {int(status)} {HTTPStatus(status).phrase}", f"date: {_date()}", "server: uvicorn"]
    lines += [f"{name}: {value}" for name, value in headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


@dataclass(slots=True)
class _Write:
    data: bytes
    before: list[int] | None
    after: list[int | None] | None
    count: int


@dataclass(slots=True)
class _Partial:
    """A write of which the kernel took only a part: its time after is not known yet."""

    after: list[int | None]
    count: int


class Connection(asyncio.Protocol):
    """One client connection: requests one after the other, writes in order, and the times of each write.

    The transport's buffer limit is zero: as soon as the kernel does not take all bytes, further writes wait here, so a
    stamp is never that of a copy into a buffer. Under TLS asyncio keeps another buffer of 64 KiB below: the stamps of a
    TLS client that reads too slowly can be early.
    """

    def __init__(self, handler: Handler, connections: set[Connection]) -> None:
        self._handler = handler
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._requests: deque[HttpRequest] = deque()
        self._current = HttpRequest("", "", "")
        self._body: list[bytes] = []
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._paused = False
        self._partial: _Partial | None = None
        self._queue: deque[_Write | End] = deque()
        self.busy = False
        self.closing = False
        self.on_lost: Callable[[], None] | None = None
        """Called when the client goes while its answer is not complete."""
        self.on_complete: Callable[[], None] | None = None
        """Called, instead, when the kernel has taken the whole answer."""

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # asyncio's TLS transport pauses at the limit, its plain one above it.
        self._transport.set_write_buffer_limits(high=0 if transport.get_extra_info("sslcontext") is None else 1, low=0)
        connected = transport.get_extra_info("socket")
        if connected is not None and connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio's signature)
        self._connections.discard(self)
        self.closing = True
        self._queue.clear()
        self._requests.clear()
        del self._parser  # it holds this connection; see Exchange._complete
        on_lost, self.on_lost, self.on_complete = self.on_lost, None, None
        if on_lost is not None:
            on_lost()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._reject()
        except httptools.HttpParserError:
            self._reject()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._partial is not None:
            partial, self._partial = self._partial, None
            partial.after += [clock.monotonic_ns()] * partial.count
        while self._queue and not self._paused:
            item = self._queue.popleft()
            if isinstance(item, End):
                self._finish(item)
            else:
                self._send(item.data, item.before, item.after, item.count)

    # httptools

    def on_message_begin(self) -> None:
        self._current = HttpRequest("", "", "")
        self._body = []

    def on_url(self, url: bytes) -> None:
        self._current.path += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._current.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._current.headers.get("expect", "").lower() == "100-continue":
            self.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        request = self._current
        request.received_mono_ns = clock.monotonic_ns()
        request.received_unix_ns = clock.unix_ns()
        request.method = self._parser.get_method().decode("latin-1")
        request.http_version = self._parser.get_http_version()
        request.keep_alive = bool(self._parser.should_keep_alive())
        request.path = request.path.partition("?")[0]
        request.body = b"".join(self._body)
        self._body = []
        self._requests.append(request)
        self._next()

    # for the server

    def write(
        self,
        data: bytes,
        before: list[int] | None = None,
        after: list[int | None] | None = None,
        count: int = 1,
    ) -> None:
        """Hand bytes to the kernel, now or when it takes them; the lists get ``count`` copies of the times."""
        if self.closing:
            return
        if self._paused:
            self._queue.append(_Write(data, before, after, count))
        else:
            self._send(data, before, after, count)

    def end(self, how: End) -> None:
        """The answer is complete once everything is written."""
        if self.closing:
            return
        if self._paused:
            self._queue.append(how)
        else:
            self._finish(how)

    def close_when_idle(self) -> None:
        """For the end of the server: no further request on this connection."""
        self.closing = self.closing or not self.busy
        if not self.busy and not self._paused:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def _send(self, data: bytes, before: list[int] | None, after: list[int | None] | None, count: int) -> None:
        started = clock.monotonic_ns()
        self._transport.write(data)
        ended = clock.monotonic_ns()
        if self._transport.is_closing():  # the kernel refused: nothing was sent
            return
        if before is not None:
            before += [started] * count
        if after is not None:
            if self._paused:
                self._partial = _Partial(after, count)
            else:
                after += [ended] * count

    def _finish(self, how: End) -> None:
        self.busy = False
        on_complete, self.on_complete, self.on_lost = self.on_complete, None, None
        if on_complete is not None:
            on_complete()
        if how is End.RESET:
            self.closing = True
            connected = self._transport.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
            self._transport.abort()
        elif how is End.CLOSE:
            self.closing = True
            self._transport.close()
        else:
            self._next()

    def _next(self) -> None:
        if not self.busy and not self.closing and self._requests:
            self.busy = True
            self._handler.handle(self._requests.popleft(), self)

    def _reject(self) -> None:
        headers = [("content-type", "text/plain; charset=utf-8"), ("connection", "close")]
        self.write(head(HTTPStatus.BAD_REQUEST, [*headers, ("content-length", str(len(_INVALID)))]) + _INVALID)
        self.end(End.CLOSE)
