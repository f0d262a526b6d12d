"""Status line, headers, framing and end of the answer to one completion request, and their times."""

from __future__ import annotations

from http import HTTPStatus

from vllm_locust import clock
from vllm_locust.simserver.http1 import Connection, End, HttpRequest, head
from vllm_locust.simserver.truth import Truth

JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"
_LAST_CHUNK = b"0\r\n\r\n"


def close_headers(http: HttpRequest) -> list[tuple[str, str]]:
    return [] if http.keep_alive else [("connection", "close")]


class Response:
    """``framed=False`` gives neither a length nor chunks: the body ends with the connection."""

    def __init__(self, http: HttpRequest, connection: Connection, truth: Truth, *, framed: bool = True) -> None:
        self._http = http
        self._connection = connection
        self._truth = truth
        self._framed = framed
        self.chunked = framed and http.http_version != "1.0"
        self.done_before: list[int] = []
        self.done_after: list[int | None] = []
        self._headers_before: list[int] = []
        self._headers_after: list[int | None] = []
        self.begun = False

    def begin_stream(self) -> None:
        """Headers of a 200 stream."""
        self.begun = True
        self._truth.http_status = int(HTTPStatus.OK)
        headers = [("content-type", EVENT_STREAM), ("vary", "Origin")]
        if self.chunked:
            headers += [("transfer-encoding", "chunked"), *close_headers(self._http)]
        else:
            headers.append(("connection", "close"))
        self._connection.write(head(HTTPStatus.OK, headers), self._headers_before, self._headers_after)

    def end_stream(self, outcome: str) -> None:
        if self.chunked:
            self._connection.write(_LAST_CHUNK)
        self._truth.outcome = outcome
        self._connection.end(End.KEEP if self.chunked and self._http.keep_alive else End.CLOSE)

    def send(
        self,
        status: HTTPStatus | int,
        body: bytes,
        outcome: str,
        *,
        content_type: str = JSON,
        extra: list[tuple[str, str]] | None = None,
        broken: End | None = None,
    ) -> None:
        """A whole answer; of one that breaks only the first half is sent."""
        self.begun = True
        self._truth.http_status = int(status)
        self._truth.outcome = outcome
        headers = [("content-length", str(len(body)))] if self._framed else [("connection", "close")]
        headers += [("content-type", content_type), ("vary", "Origin"), *(extra or [])]
        headers += close_headers(self._http) if self._framed else []
        self._connection.write(head(status, headers), self._headers_before, self._headers_after)
        sent = body if broken is None else body[: len(body) // 2]
        self._connection.write(sent, self.done_before, self.done_after)
        self._connection.end(broken or (End.KEEP if self._framed and self._http.keep_alive else End.CLOSE))

    def break_off(self, how: End, outcome: str) -> None:
        """End the connection inside the body."""
        self._truth.outcome = outcome
        self._connection.end(how)

    def settle(self) -> None:
        """Everything is sent, or never will be: the truth is complete."""
        truth = self._truth
        truth.headers_before_ns = self._headers_before[-1] if self._headers_before else None
        truth.headers_after_ns = self._headers_after[-1] if self._headers_after else None
        truth.done_before_ns = self.done_before[-1] if self.done_before else None
        truth.done_after_ns = self.done_after[-1] if self.done_after else None
        truth.ended_mono_ns = clock.monotonic_ns()
        truth.settle()
