"""The ``openai`` transport: the official SDK as its users run it, for fidelity and comparison.

A stamp is the process's own clock when the SDK hands a chunk over, after it has parsed it: what a user of the SDK
measures.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import httpx2
import openai

from vllm_locust import clock
from vllm_locust.config import Target
from vllm_locust.load.attempt import Attempt, Watchdog, root_os_error
from vllm_locust.load.proxy import proxy_for
from vllm_locust.load.transport import IDLE_LIMIT_NS, Call, Exchange, ReceiveLag
from vllm_locust.outcome import Outcome
from vllm_locust.sse import Event

KEEPALIVE_EXPIRY_S = IDLE_LIMIT_NS / 1e9
"""Kept-alive connections are not reused after this long: uvicorn, and so vLLM, closes them after 5 s."""

_NO_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_EXPIRY_S)
_DONE = Event(b"[DONE]", b"message")
_ANSWER_CUT = ("Server disconnected", "peer closed connection")


class _Body(httpx2.SyncByteStream):
    """The answer's bytes on their way into the SDK.

    The SDK closes a stream at ``[DONE]`` without reading the end of the body, which would cost a connection per
    request. So ``close`` waits for ``finish``, which reads what is left; and whether the SDK stopped early tells that
    it saw ``[DONE]``, which it does not show to its users.
    """

    def __init__(self, stream: httpx2.SyncByteStream, attempt: Attempt) -> None:
        self._stream = stream
        self._pieces = iter(stream)
        self._attempt = attempt
        self.exhausted = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        self._attempt.reading()
        try:
            piece = next(self._pieces)
        except StopIteration:
            self.exhausted = True
            raise
        self._attempt.read(len(piece))
        return piece

    def close(self) -> None:
        """See ``finish``."""

    def drain(self) -> None:
        while not self.exhausted:
            next(self, b"")

    def finish(self) -> None:
        self._stream.close()


class _Running:
    """The attempt of this greenlet and, once it has been answered, the answer's body."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.body: _Body | None = None

    def trace(self, name: str, info: dict[str, Any]) -> None:
        """httpcore's report of its steps. A CONNECT to a proxy belongs to the connection, not to the request."""
        if name in ("connection.connect_tcp.started", "connection.connect_unix_socket.started"):
            self.attempt.connecting()
        elif name == "http11.send_request_headers.started" and info["request"].method != b"CONNECT":
            self.attempt.sending()


_RUNNING: ContextVar[_Running] = ContextVar("running")


class _Hook(httpx2.BaseTransport):
    """Between the SDK and the network: says when the request was sent, and keeps hold of the body."""

    def __init__(self, transport: httpx2.HTTPTransport) -> None:
        self._transport = transport

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        running = _RUNNING.get()
        request.extensions["trace"] = running.trace
        response = self._transport.handle_request(request)
        running.attempt.answered(response.status_code, response.headers.get("retry-after"))
        assert isinstance(response.stream, httpx2.SyncByteStream)
        running.body = response.stream = _Body(response.stream, running.attempt)
        return response

    def close(self) -> None:
        self._transport.close()


class OpenAITransport:
    """See ``Transport``. One client per target, shared by all users, with the SDK's own retries switched off."""

    name = "openai"

    def __init__(self, tls_context: ssl.SSLContext, proxy: str | None = None) -> None:
        self.receive_lag = ReceiveLag()
        self._tls_context = tls_context
        self._proxy = proxy
        self._watchdog = Watchdog()
        self._clients: dict[Target, openai.OpenAI] = {}

    def perform(self, call: Call) -> Exchange:
        attempt = Attempt(call)
        running = _Running(attempt)
        token = _RUNNING.set(running)
        try:
            with self._watchdog.watching(attempt):
                self._perform(running)
        finally:
            _RUNNING.reset(token)
            if running.body is not None:
                running.body.finish()
        return attempt.exchange

    def read_arrived(self) -> None:
        """Each stream is read by its own greenlet."""

    def close(self) -> None:
        self._watchdog.close()
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def _client(self, target: Target) -> openai.OpenAI:
        client = self._clients.get(target)
        if client is None:
            proxy = proxy_for(self._proxy, target)
            transport = httpx2.HTTPTransport(
                verify=self._tls_context,
                trust_env=False,
                limits=_NO_LIMITS,
                proxy=None if proxy is None else proxy.geturl(),
                uds=target.socket_path,
            )
            place = "http://localhost" if target.socket_path is not None else target.url
            client = self._clients[target] = openai.OpenAI(
                api_key="unused",
                base_url=f"{place}/v1",
                max_retries=0,
                timeout=None,
                http_client=httpx2.Client(
                    transport=_Hook(transport), trust_env=False, timeout=None, follow_redirects=False
                ),
            )
        return client

    def _perform(self, running: _Running) -> None:
        attempt = running.attempt
        try:
            response = self._create(attempt.call)
        except openai.APIStatusError as error:
            attempt.finish_body(error.response.content)
            return
        except openai.APIConnectionError as error:
            self._failed(attempt, error)
            return
        try:
            self._read(running, response)
        except (openai.APIConnectionError, httpx2.TransportError) as error:
            self._failed(attempt, error)

    def _create(self, call: Call) -> Any:
        """The SDK's raw response: its ``parse`` gives the stream of chunks, its headers say whether it is one."""
        client = self._client(call.target)
        resource: Any = client.chat.completions if call.path.endswith("/chat/completions") else client.completions
        headers: dict[str, Any] = {"Authorization": openai.Omit(), "Accept-Encoding": "identity", **dict(call.headers)}
        payload = dict(call.payload)
        known = {key: payload.pop(key) for key in ("model", "messages", "prompt", "stream") if key in payload}
        return resource.with_raw_response.create(**known, extra_body=payload, extra_headers=headers)

    def _read(self, running: _Running, response: Any) -> None:
        attempt, body = running.attempt, running.body
        assert body is not None
        http_response: httpx2.Response = response.http_response
        if attempt.refuse_compressed(http_response.headers.get("content-encoding")):
            return
        if not attempt.is_event_stream(http_response.headers.get("content-type")):
            attempt.finish_body(http_response.read())
        elif not attempt.call.streamed:
            attempt.exchange.fail(Outcome.BAD_RESPONSE, "an event stream came where none was asked for")
        else:
            tripped = _iterate(attempt, body, response)
            body.drain()
            attempt.finish()
            if tripped is not None and not attempt.completion.malformed:
                attempt.exchange.fail(Outcome.BAD_RESPONSE, f"the SDK cannot read the stream: {tripped}")

    def _failed(self, attempt: Attempt, error: Exception) -> None:
        cause = root_os_error(error)
        reason = error.__cause__ or error
        if attempt.exchange.sent_ns is None:
            attempt.never_connected(cause or OSError(str(reason)))
        elif isinstance(reason, httpx2.RemoteProtocolError) and not str(reason).startswith(_ANSWER_CUT):
            attempt.exchange.fail(Outcome.BAD_RESPONSE, f"not HTTP/1.1: {reason}")
        else:
            attempt.disconnected(cause)


def _iterate(attempt: Attempt, body: _Body, response: Any) -> Exception | None:
    """Take the SDK's chunks to the end. Returns what the SDK tripped over, if it did: it cannot go on after that."""
    completion = attempt.completion
    try:
        for chunk in response.parse():
            parsed = chunk.to_dict(warnings=False) if isinstance(chunk, openai.BaseModel) else chunk
            attempt.take(completion.on_chunk, parsed, clock.monotonic_ns())
    except openai.APIConnectionError:
        raise
    except openai.APIError as error:
        completion.on_chunk({"error": error.body}, clock.monotonic_ns())
    except json.JSONDecodeError as error:
        completion.on_event(Event(error.doc.encode(), b"message"), clock.monotonic_ns())
        return error
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        return error
    else:
        if not body.exhausted:
            completion.on_event(_DONE, clock.monotonic_ns())
    return None
