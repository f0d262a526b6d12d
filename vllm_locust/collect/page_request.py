"""Asks a server for its page of metrics: one bounded GET. Whatever goes wrong is a ``PageFailed`` that says what.

The API key is told only to a server that asks for it, and redirects are not followed: so it goes nowhere else.
"""

from __future__ import annotations

import socket
import ssl
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Final

from vllm_locust import clock
from vllm_locust.metrics_page import MetricsPage
from vllm_locust.protocol import without_key

MAX_BODY_BYTES: Final = 8 << 20
"""After it is unpacked. A vLLM with eight engines writes below half a megabyte."""
_ACCEPT: Final = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.9,*/*;q=0.1"
_PIECE: Final = 65_536
_GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS


_IsLate = Callable[[], bool]


class PageFailed(Exception):
    """The page could not be read. The message says why, without the address."""


@dataclass(frozen=True, slots=True)
class Page:
    text: str
    began_ns: int
    """On the monotonic axis: after the connection was made, before the request was sent."""
    ended_ns: int


def request_page(
    page: MetricsPage,
    *,
    tls: ssl.SSLContext,
    timeout_s: float,
    api_key: str | None = None,
    max_bytes: int = MAX_BODY_BYTES,
) -> Page:
    """``api_key`` is sent in a second attempt, where the first is answered with 401 or 403."""
    try:
        status, answer = _attempt(page, tls, timeout_s, None, max_bytes)
        if status in (401, 403) and api_key is not None:
            status, answer = _attempt(page, tls, timeout_s, api_key, max_bytes)
    except (OSError, HTTPException, zlib.error, PageFailed) as error:
        # A server may repeat the key where a status line or a header belongs.
        raise PageFailed(without_key(_words(error, timeout_s), api_key)) from None
    if status in (401, 403):
        fix = "set OPENAI_API_KEY or --api-key-file" if api_key is None else "it refuses the API key"
        raise PageFailed(f"it answered {status}: {fix}")
    if status != 200:
        raise PageFailed(f"it answered {status}")
    if answer.text.lstrip()[:1] in ("{", "["):
        raise PageFailed("it answered JSON; TensorRT-LLM has its metrics at /prometheus/metrics")
    return answer


def _words(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"it did not answer within {timeout_s:g} s"
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return words or type(error).__name__


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connection(page: MetricsPage, tls: ssl.SSLContext, timeout_s: float) -> HTTPConnection:
    if page.socket_path is not None:
        return _UnixConnection(page.socket_path, timeout_s)
    if page.scheme == "https":
        return HTTPSConnection(page.host, page.port, timeout=timeout_s, context=tls)
    return HTTPConnection(page.host, page.port, timeout=timeout_s)


def _attempt(
    page: MetricsPage, tls: ssl.SSLContext, timeout_s: float, api_key: str | None, max_bytes: int
) -> tuple[int, Page]:
    headers = {"Host": page.authority, "Accept": _ACCEPT, "Accept-Encoding": "gzip", "Connection": "close"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    connection = _connection(page, tls, timeout_s)
    try:
        connection.connect()
        with _cut_off(connection.sock, timeout_s) as is_late:
            began_ns = clock.monotonic_ns()
            try:
                connection.request("GET", page.path, headers=headers)
                response = connection.getresponse()
                body = _body(response, max_bytes)
            except (OSError, HTTPException, PageFailed):
                if is_late():
                    raise TimeoutError from None
                raise
            # A body without a length ends with its connection, so one that was cut off looks like a whole one.
            if is_late():
                raise TimeoutError
            ended_ns = clock.monotonic_ns()
    finally:
        connection.close()
    return response.status, Page(body.decode("utf-8", "replace"), began_ns, ended_ns)


@contextmanager
def _cut_off(sock: socket.socket, timeout_s: float) -> Iterator[_IsLate]:
    """Ends what is read from the socket after a time: its own timeout starts anew with each byte."""
    late = threading.Event()

    def end() -> None:
        late.set()
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(timeout_s, end)
    timer.start()
    try:
        yield late.is_set
    finally:
        timer.cancel()


def _body(response: HTTPResponse, max_bytes: int) -> bytes:
    encoding = response.getheader("Content-Encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", "deflate", ""):
        raise PageFailed(f"its body is packed as {encoding[:40]!r}, which was not asked for")
    unpack = zlib.decompressobj(_GZIP_OR_ZLIB) if encoding in ("gzip", "deflate") else None
    body = bytearray()
    while piece := response.read1(_PIECE):
        body += piece if unpack is None else unpack.decompress(piece, max_bytes + 1 - len(body))
        if len(body) > max_bytes or (unpack is not None and unpack.unconsumed_tail):
            raise PageFailed(f"its page is larger than {max_bytes >> 20} MiB")
    if response.length or (unpack is not None and not unpack.eof):
        raise PageFailed("its body ends in the middle")
    return bytes(body)
