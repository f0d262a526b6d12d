"""The ``sse`` transport: urllib3 connections (what ``requests`` is made of) and sseclient-py, for comparison.

A stamp is the process's own clock when the read returned that completed the event.
"""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Iterator

import orjson
import sseclient
import urllib3.connection
from urllib3.exceptions import HTTPError

from vllm_locust import clock
from vllm_locust.config import Target
from vllm_locust.load.attempt import READ_BYTES, Attempt, Watchdog, root_os_error
from vllm_locust.load.proxy import proxy_authorization, proxy_for
from vllm_locust.load.transport import IDLE_LIMIT_NS, Call, Exchange, ReceiveLag
from vllm_locust.outcome import Outcome
from vllm_locust.sse import Event

_Connection = urllib3.connection.HTTPConnection


class _UnixConnection(_Connection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def _new_conn(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(self._path)
        except BaseException:
            sock.close()
            raise
        return sock


class _Pieces:
    """A body as sseclient-py reads it: an iterable of bytes, each as soon as it is there."""

    def __init__(self, response: urllib3.BaseHTTPResponse, attempt: Attempt) -> None:
        self._response = response
        self._attempt = attempt
        self.stamp_ns = 0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        self._attempt.reading()
        piece = self._response.read1(READ_BYTES)
        if not piece:
            raise StopIteration
        self.stamp_ns = self._attempt.read(len(piece))
        return piece


class SseTransport:
    """See ``Transport``. Idle connections per target, the most recently used first; no limit to their number."""

    name = "sse"

    def __init__(self, tls_context: ssl.SSLContext, proxy: str | None = None) -> None:
        self.receive_lag = ReceiveLag()
        self._tls_context = tls_context
        self._proxy = proxy
        self._watchdog = Watchdog()
        self._idle: dict[Target, list[tuple[int, _Connection]]] = {}

    def perform(self, call: Call) -> Exchange:
        attempt = Attempt(call)
        reusable = False
        connection: _Connection | None = None
        try:
            with self._watchdog.watching(attempt):
                connection = self._take(call.target)
                if self._connect(attempt, connection):
                    reusable = self._exchange(attempt, connection)
        finally:
            if connection is not None:
                if reusable:
                    self._idle.setdefault(call.target, []).append((clock.monotonic_ns(), connection))
                else:
                    connection.close()
        return attempt.exchange

    def read_arrived(self) -> None:
        """Each stream is read by its own greenlet."""

    def close(self) -> None:
        self._watchdog.close()
        for idle in self._idle.values():
            for _, connection in idle:
                connection.close()
        self._idle.clear()

    def _take(self, target: Target) -> _Connection:
        """A kept-alive connection that the server has not closed, or a new one that is not connected yet."""
        idle = self._idle.get(target)
        while idle:
            since_ns, connection = idle.pop()
            if clock.monotonic_ns() - since_ns < IDLE_LIMIT_NS and connection.is_connected:
                return connection
            connection.close()
        if target.socket_path is not None:
            return _UnixConnection(target.socket_path)
        proxy = proxy_for(self._proxy, target)
        host, port = (target.host, target.port) if proxy is None else (proxy.hostname or "", proxy.port or 80)
        if target.scheme == "http":
            return _Connection(host, port)
        secure = urllib3.connection.HTTPSConnection(host, port, ssl_context=self._tls_context)
        if proxy is not None:
            secure.set_tunnel(target.host, target.port, headers=proxy_authorization(proxy), scheme="http")
        return secure

    def _connect(self, attempt: Attempt, connection: _Connection) -> bool:
        if connection.sock is not None:
            return True
        attempt.connecting()
        try:
            connection.connect()
        except (OSError, HTTPError, http.client.HTTPException) as error:
            attempt.never_connected(root_os_error(error) or OSError(str(error)))
            return False
        return True

    def _exchange(self, attempt: Attempt, connection: _Connection) -> bool:
        """Send the request and read the answer. True if the connection can be used again."""
        broken = self._send(attempt, connection)
        try:
            response = connection.getresponse()
        except http.client.RemoteDisconnected:
            attempt.disconnected(broken)
            return False
        except http.client.HTTPException as error:
            attempt.exchange.fail(Outcome.BAD_RESPONSE, f"not HTTP/1.1: {error!r}")
            return False
        except OSError as error:
            attempt.disconnected(broken or error)
            return False
        attempt.answered(response.status, response.headers.get("retry-after"))
        try:
            self._read(attempt, response)
        except (OSError, HTTPError, http.client.HTTPException) as error:
            attempt.disconnected(root_os_error(error))
            return False
        return broken is None and connection.sock is not None and response.closed

    def _send(self, attempt: Attempt, connection: _Connection) -> OSError | None:
        """An answer that comes before the whole request was read (413, say) still counts: the error is kept for
        later.
        """
        call = attempt.call
        target = call.target
        place = f"{target.prefix}{call.path}"
        headers = {
            "Host": target.authority,
            "Accept": "text/event-stream, application/json",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
            **dict(call.headers),
        }
        proxy = proxy_for(self._proxy, target)
        if proxy is not None and target.scheme == "http":
            place = f"http://{target.authority}{place}"
            headers |= proxy_authorization(proxy)
        body = orjson.dumps(call.payload)
        attempt.sending()
        try:
            connection.request("POST", place, body, headers, preload_content=False, decode_content=False)
        except OSError as error:
            return error
        return None

    def _read(self, attempt: Attempt, response: urllib3.BaseHTTPResponse) -> None:
        if attempt.refuse_compressed(response.headers.get("content-encoding")):
            return
        pieces = _Pieces(response, attempt)
        if not attempt.is_event_stream(response.headers.get("content-type")):
            attempt.finish_body(b"".join(pieces))
            return
        deliver = attempt.completion.on_event
        try:
            for event in sseclient.SSEClient(pieces).events():
                attempt.take(deliver, Event(event.data.encode(), event.event.encode()), pieces.stamp_ns)
        except UnicodeDecodeError as error:
            attempt.exchange.fail(Outcome.BAD_RESPONSE, f"sseclient-py cannot read the stream: {error}")
        else:
            attempt.finish()
