"""The ``kernel`` transport: HTTP/1.1 on plain sockets, times from the kernel's receive stamps."""

from __future__ import annotations

import logging
import ssl
from heapq import heappop, heappush
from itertools import count

import gevent
import orjson
from gevent.event import Event

from vllm_locust import clock
from vllm_locust.completion.reader import CompletionReader
from vllm_locust.config import Target
from vllm_locust.load.answer import HttpAnswer
from vllm_locust.load.connection import Connection, ConnectionPool
from vllm_locust.load.receiver import STREAM_READ_BYTES, Inbox, Read, Receiver
from vllm_locust.load.transport import (
    WATCH_INTERVAL_S,
    Call,
    CutShort,
    Exchange,
    connect_failure,
    exceeded_limit,
    tokenless_until_ns,
    total_until_ns,
)
from vllm_locust.outcome import Outcome

logger = logging.getLogger(__name__)

PATIENCE_NS = 500_000_000
PATIENCE_ROUNDS = 5
"""Reads are not left unparsed for much longer than this, however few they are: looked at in each so many rounds of the
watchdog, since to look at a thousand streams costs a millisecond.
"""


class _Stream:
    """A call on its way: the answer so far, and the greenlet waiting for its end."""

    __slots__ = (
        "answer",
        "call",
        "connection",
        "exchange",
        "finished",
        "inbox",
        "last_byte_ns",
        "unstamped",
    )

    def __init__(self, call: Call, connection: Connection) -> None:
        self.call = call
        self.connection = connection
        self.exchange = Exchange(CompletionReader(streamed=call.streamed))
        self.answer = HttpAnswer(self.exchange)
        self.inbox = Inbox(connection.sock, connection.stamps, self.consume)
        self.finished = Event()
        self.last_byte_ns = 0
        self.unstamped = not connection.stamps

    def consume(self, reads: list[Read]) -> None:
        try:
            self._feed(reads)
        except Exception:
            # A fault of ours must end its call by name, not leave a user waiting for a timeout.
            logger.exception("The answer to a request could not be parsed")
            self.give_up(Outcome.CLIENT_ERROR, "the answer could not be parsed, see the worker's log")

    def _feed(self, reads: list[Read]) -> None:
        answer = self.answer
        tls = self.connection.tls
        at = 0
        while (at := self._take_plain(reads, at)) < len(reads):
            read = reads[at]
            at += 1
            data, stamp_ns, _, stamped, lag_ns = read
            if answer.complete:
                answer.reusable = False
                break
            if not data:
                answer.end_of_stream(stamp_ns, self.inbox.error)
                break
            self.last_byte_ns = stamp_ns
            if lag_ns > answer.lag_max_ns:
                answer.lag_max_ns = lag_ns
            if not stamped:
                self.unstamped = True
            if tls is not None:
                try:
                    data = tls.decrypt(data)
                except ssl.SSLError as error:
                    answer.end_of_stream(stamp_ns, OSError(f"TLS: {error}"))
                    break
                if not data:
                    continue
                read = (data, *read[1:])
                if answer.take_plain([read], 0):
                    continue
            answer.feed(read)
        if answer.complete:
            self.finished.set()
        # Ciphertext does not show where a body ends.
        patient = tls is None and answer.streaming
        if patient and not self.inbox.patient:
            self.inbox.read_bytes = STREAM_READ_BYTES[0]
        self.inbox.patient = patient

    def _take_plain(self, reads: list[Read], at: int) -> int:
        taken = self.answer.take_plain(reads, at)
        if taken > at:
            self.last_byte_ns = reads[taken - 1][1]
        return taken

    def release(self) -> None:
        """The call is over. Without its cycles it is freed at once, and its memory used again: garbage that waits for
        the collector grows by some 15 MB/s at 50,000 tokens/s, and each next call works in memory that is cold.
        """
        self.inbox.consume = _over
        self.answer.release()

    def overdue(self, now_ns: int) -> tuple[Outcome, str] | None:
        """The limit this call has exceeded, if any. Bytes that wait for the parser count as arrived, as a token
        too.
        """
        sent_ns = self.exchange.sent_ns
        if sent_ns is None:
            return None
        unparsed = self.inbox.reads
        return exceeded_limit(
            self.call,
            now_ns,
            sent_ns=sent_ns,
            silent_ns=now_ns - (unparsed[-1][1] if unparsed else self.last_byte_ns),
            has_token=bool(unparsed or self.exchange.completion.chunk_ns),
        )

    def calm_until_ns(self, now_ns: int) -> int | None:
        """Until when no limit can be reached, whatever happens; None where the call has none."""
        call = self.call
        sent_ns = now_ns if self.exchange.sent_ns is None else self.exchange.sent_ns
        has_token = bool(self.exchange.completion.chunk_ns)
        limits_ns = [] if has_token else [tokenless_until_ns(call, sent_ns)]
        if call.timeouts.idle_ns is not None:
            # Before the first token, which may come right now, silence is no idleness.
            last_ns = self.last_byte_ns if has_token else now_ns
            limits_ns.append((self.inbox.reads[-1][1] if self.inbox.reads else last_ns) + call.timeouts.idle_ns)
        limits_ns.append(total_until_ns(call, sent_ns))
        return min((limit_ns for limit_ns in limits_ns if limit_ns is not None), default=None)

    def give_up(self, outcome: Outcome, reason: str) -> None:
        """End the call now. An answer that was complete but for its last frame keeps its own outcome."""
        if self.answer.complete:
            return
        if self.exchange.completion.done_ns is not None:
            self.answer.end_of_stream(clock.monotonic_ns(), None)
        else:
            self.exchange.fail(outcome, reason)
        self.answer.complete = True
        self.answer.reusable = False
        self.finished.set()


class KernelTransport:
    """See ``Transport``. One receiver, one connection pool and one watchdog for all users of the process."""

    name = "kernel"

    def __init__(self, tls_context: ssl.SSLContext, proxy: str | None = None) -> None:
        self._receiver = Receiver()
        self.receive_lag = self._receiver.receive_lag
        self.read_arrived = self._receiver.poll
        self._pool = ConnectionPool(tls_context, proxy)
        self._running: dict[int, _Stream] = {}
        self._numbers = count()
        self._limits: list[tuple[int, int]] = []
        """A heap: when a call could reach one of its limits at the earliest, and its number."""
        self._heads: dict[tuple[Target, str, bool], bytes] = {}
        self._watchdog = gevent.spawn(self._watch)

    def perform(self, call: Call) -> Exchange:
        started_ns = clock.monotonic_ns()
        connection = self._pool.take(call.target)
        fresh = connection is None
        if connection is None:
            try:
                connection = self._pool.open(call.target, call.timeouts.connect_ns)
            except CutShort as cut:
                return Exchange(CompletionReader(streamed=call.streamed)).fail(cut.outcome, cut.reason)
            except OSError as error:
                return _never_sent(call, error)
        stream = _Stream(call, connection)
        stream.exchange.connect_ns = clock.monotonic_ns() - started_ns if fresh else None
        self._run(stream, self._request_bytes(call, connection))
        if stream.answer.reusable:
            connection.note_keep_alive(stream.answer.keep_alive)
            self._pool.give(call.target, connection)
        else:
            connection.close()
        return stream.exchange

    def _run(self, stream: _Stream, request: bytes) -> None:
        exchange = stream.exchange
        self._receiver.watch(stream.inbox)
        number = next(self._numbers)
        self._running[number] = stream
        try:
            exchange.sent_ns = clock.monotonic_ns()
            self._note_limit(number, stream, exchange.sent_ns)
            try:
                stream.connection.send(request)
            except OSError as error:
                # An answer that came before the whole request was read (413, say) still counts; it or the close is on
                # its way.
                stream.inbox.error = error
            stream.finished.wait()
        except CutShort as cut:
            self._receiver.parse_now(stream.inbox)
            stream.give_up(cut.outcome, cut.reason)
        except gevent.GreenletExit as killed:
            self._receiver.parse_now(stream.inbox)
            stream.give_up(Outcome.ABANDONED, "its user was killed")
            exchange.killed = killed
        except BaseException:
            self._receiver.parse_now(stream.inbox)
            stream.connection.close()
            raise
        finally:
            self._receiver.forget(stream.inbox)
            del self._running[number]
            stream.release()
        exchange.stamp_source = "user" if stream.unstamped else "kernel"
        exchange.receive_lag_max_ns = None if stream.unstamped else stream.answer.lag_max_ns

    def _request_bytes(self, call: Call, connection: Connection) -> bytes:
        body = orjson.dumps(call.payload)
        proxied = connection.proxy_headers is not None
        key = (call.target, call.path, proxied)
        head = self._heads.get(key)
        if head is None:
            target = call.target
            place = f"{target.prefix}{call.path}"
            lines = [
                f"POST {f'http://{target.authority}{place}' if proxied else place} HTTP/1.1",
                f"Host: {target.authority}",
                "Accept: text/event-stream, application/json",
                "Accept-Encoding: identity",
                "Content-Type: application/json",
                *(f"{name}: {value}" for name, value in connection.proxy_headers or ()),
            ]
            head = self._heads[key] = ("\r\n".join(lines) + "\r\n").encode("latin-1")
        own = "".join(f"{name}: {value}\r\n" for name, value in call.headers)
        return b"".join((head, own.encode("latin-1"), b"Content-Length: %d\r\n\r\n" % len(body), body))

    def _note_limit(self, number: int, stream: _Stream, now_ns: int) -> None:
        until_ns = stream.calm_until_ns(now_ns)
        if until_ns is not None:
            # A limit may be past and not exceeded, when what has arrived is not parsed: then look again next time.
            heappush(self._limits, (max(until_ns, now_ns), number))

    def _watch(self) -> None:
        rounds = 0
        while True:
            gevent.sleep(WATCH_INTERVAL_S)
            now_ns = clock.monotonic_ns()
            while self._limits and self._limits[0][0] < now_ns:
                _, number = heappop(self._limits)
                stream = self._running.get(number)
                if stream is None:
                    continue
                verdict = stream.overdue(now_ns)
                if verdict is None:
                    self._note_limit(number, stream, now_ns)
                else:
                    self._receiver.parse_now(stream.inbox)
                    stream.give_up(*verdict)
            rounds += 1
            if rounds % PATIENCE_ROUNDS == 0:
                self._parse_old(now_ns)

    def _parse_old(self, now_ns: int) -> None:
        for stream in list(self._running.values()):
            if stream.inbox.reads and now_ns - stream.inbox.reads[0][1] > PATIENCE_NS:
                self._receiver.parse_soon(stream.inbox)

    def close(self) -> None:
        self._watchdog.kill()
        self._pool.close()
        self._receiver.close()


def _over(_reads: list[Read]) -> None:
    """What arrived after the end of a call is of no interest."""


def _never_sent(call: Call, error: OSError) -> Exchange:
    exchange = Exchange(CompletionReader(streamed=call.streamed))
    words = f"{call.target.url}: {error.strerror or error}"
    if isinstance(error, TimeoutError) and not error.errno:
        return exchange.fail(
            Outcome.TIMEOUT_CONNECT, f"{call.target.url}: no connection within the time of --timeout-connect"
        )
    return exchange.fail(connect_failure(error), words)
