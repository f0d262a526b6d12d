"""One call on a library that blocks the calling greenlet: its times, its timeouts, and what ends it.

The ``sse`` and ``openai`` transports share this. Their stamps are the process's own clock; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import gevent

from vllm_locust import clock
from vllm_locust.completion.reader import CompletionReader
from vllm_locust.load.transport import (
    ERROR_BODY_BYTES,
    MAX_EVENT_BYTES,
    TOO_LONG,
    WATCH_INTERVAL_S,
    Call,
    CutShort,
    Exchange,
    connect_failure,
    exceeded_limit,
)
from vllm_locust.outcome import Outcome
from vllm_locust.protocol import error_text, is_event_stream

READ_BYTES = 65536

_Item = TypeVar("_Item")


class Attempt:
    """A call under way. The transport reports what it does; ``overdue`` and ``finish`` judge it."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.exchange = Exchange(CompletionReader(streamed=call.streamed))
        self.completion = self.exchange.completion
        self.greenlet = gevent.getcurrent()
        self._started_ns = clock.monotonic_ns()
        self._connecting_ns: int | None = None
        self._last_byte_ns: int | None = None
        self._read_began_ns = 0
        self._reads = 0
        self._held_bytes = 0
        """Since the last event."""
        self._last_chunk: tuple[int, int] | None = None
        """The read and the index of the token-bearing chunk that the previous event added."""

    # What the transport reports

    def connecting(self) -> None:
        if self._connecting_ns is None:
            self._connecting_ns = clock.monotonic_ns()

    def sending(self) -> None:
        """The first byte of the request goes to the kernel now."""
        if self.exchange.sent_ns is None:
            self.exchange.sent_ns = clock.monotonic_ns()
            if self._connecting_ns is not None:
                self.exchange.connect_ns = self.exchange.sent_ns - self._connecting_ns

    def answered(self, status: int, retry_after: str | None) -> None:
        self.exchange.headers_ns = self._last_byte_ns = clock.monotonic_ns()
        self.exchange.http_status = status
        self.exchange.retry_after = retry_after

    def reading(self) -> None:
        self._read_began_ns = clock.monotonic_ns()

    def read(self, size: int) -> int:
        """A read returned so many bytes. Returns its stamp. Ends the call where they are too many for one event."""
        self._held_bytes += size
        if self._held_bytes > MAX_EVENT_BYTES:
            raise CutShort(Outcome.BAD_RESPONSE, TOO_LONG)
        self._reads += 1
        self._last_byte_ns = clock.monotonic_ns()
        return self._last_byte_ns

    def take(self, deliver: Callable[[_Item, int], None], item: _Item, stamp_ns: int) -> None:
        """Hand an event or a chunk to the reader. Where a read completed several, only its last has a time of its
        own.
        """
        chunks = self.completion.chunk_ns
        if self._last_chunk is not None and self._last_chunk[0] == self._reads:
            earlier = self._last_chunk[1]
            self.completion.chunk_width_ns[earlier] = max(0, chunks[earlier] - self._read_began_ns)
        before = len(chunks)
        self._held_bytes = 0
        deliver(item, stamp_ns)
        if len(chunks) > before:
            self._last_chunk = (self._reads, before)

    # What it comes to

    def overdue(self, now_ns: int) -> tuple[Outcome, str] | None:
        """The limit this call has exceeded, if any."""
        timeouts, sent_ns = self.call.timeouts, self.exchange.sent_ns
        if sent_ns is None:
            if timeouts.connect_ns is not None and now_ns - self._started_ns > timeouts.connect_ns:
                return (
                    Outcome.TIMEOUT_CONNECT,
                    f"{self.call.target.url}: no connection within the time of --timeout-connect",
                )
            return None
        return exceeded_limit(
            self.call,
            now_ns,
            sent_ns=sent_ns,
            silent_ns=0 if self._last_byte_ns is None else now_ns - self._last_byte_ns,
            has_token=bool(self.completion.chunk_ns),
        )

    def is_event_stream(self, content_type: str | None) -> bool:
        return self.exchange.http_status == 200 and is_event_stream(content_type)

    def refuse_compressed(self, coding: str | None) -> bool:
        """True if it is a compressed 200 answer: its outcome is then set, and its body can go unread."""
        if self.exchange.http_status != 200 or (coding or "identity").lower() == "identity":
            return False
        self.exchange.fail(
            Outcome.BAD_RESPONSE, f"the answer is compressed ({coding}), which hides when its tokens came"
        )
        return True

    def finish(self) -> None:
        """The body of a 200 answer has ended as HTTP says it should."""
        self.completion.on_end(clock.monotonic_ns())
        self.exchange.outcome = self.completion.outcome()
        self.exchange.error = self.completion.error

    def finish_body(self, body: bytes) -> None:
        """The whole body of an answer that is no event stream."""
        if self.exchange.http_status != 200:
            words = error_text(body[:ERROR_BODY_BYTES])
            self.exchange.fail(Outcome.HTTP_ERROR, words or f"status {self.exchange.http_status} with an empty body")
            return
        self.completion.on_body(body, clock.monotonic_ns())
        self.finish()

    def never_connected(self, error: OSError) -> None:
        self.exchange.fail(connect_failure(error), f"{self.call.target.url}: {error.strerror or error}")

    def disconnected(self, error: OSError | None) -> None:
        """The connection is gone. An answer that was complete but for its last frame keeps its own outcome."""
        if self.completion.done_ns is not None or self.completion.outcome() is Outcome.ERROR_EVENT:
            self.finish()
            return
        answered = self.exchange.headers_ns is not None
        where = "the connection ended inside the answer's body"
        where = where if answered else "the server closed the connection before it answered"
        self.exchange.fail(Outcome.DISCONNECTED, where if error is None else f"{where}: {error.strerror or error}")

    def cut(self, cut: CutShort) -> None:
        if self.completion.done_ns is not None:
            self.finish()
        else:
            self.exchange.fail(cut.outcome, cut.reason)


class Watchdog:
    """Holds running attempts against their timeouts: one scan per process instead of a timer per read.

    It runs in the hub, where no greenlet is in the middle of anything, and so can never hit a greenlet that has just
    left.
    """

    def __init__(self) -> None:
        self._running: set[Attempt] = set()
        self._timer: Any = gevent.get_hub().loop.timer(WATCH_INTERVAL_S, WATCH_INTERVAL_S, ref=False)
        self._timer.start(self._check)

    @contextmanager
    def watching(self, attempt: Attempt) -> Iterator[None]:
        """Within this block ``CutShort``, from here or from whoever has lost patience, ends the attempt."""
        self._running.add(attempt)
        try:
            yield
        except CutShort as cut:
            attempt.cut(cut)
        finally:
            self._running.discard(attempt)

    def _check(self) -> None:
        now_ns = clock.monotonic_ns()
        for attempt in list(self._running):
            verdict = attempt.overdue(now_ns)
            if verdict is not None and attempt in self._running:
                self._running.discard(attempt)
                attempt.greenlet.throw(CutShort(*verdict))

    def close(self) -> None:
        self._timer.stop()
        self._timer.close()


def root_os_error(error: BaseException | None) -> OSError | None:
    """The operating system's error at the bottom of a library's chain of wrappers, if there is one."""
    found = None
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and (found is None or error.errno is not None):
            found = error
        error = error.__cause__ or error.__context__
    return found
