"""One HTTP/1.1 answer on the kernel transport: frames to events, each with its stamp. No socket, no clock.

llhttp (through httptools) decides every framing. One shape that makes up nearly all reads of a token stream, exactly
one whole HTTP chunk, is taken apart here first; it leaves the parser where it was, between two chunks.
"""

from __future__ import annotations

from operator import itemgetter

import httptools

from vllm_locust.completion.chunk_template import unquoted
from vllm_locust.completion.reader import MOST_ALIKE, CompletionReader
from vllm_locust.load.receiver import Read
from vllm_locust.load.transport import ERROR_BODY_BYTES, MAX_EVENT_BYTES, TOO_LONG, Exchange
from vllm_locust.outcome import Outcome
from vllm_locust.protocol import error_text, is_event_stream
from vllm_locust.sse import EventDecoder


class HttpAnswer:
    """Feed it reads until ``complete``; ``exchange`` then holds the outcome."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.complete = False
        self.reusable = False
        self.keep_alive: str | None = None
        self._completion: CompletionReader = exchange.completion
        self._parser = httptools.HttpResponseParser(self)
        self._decoder: EventDecoder | None = None
        self._headers: dict[bytes, bytes] = {}
        self._bodies: list[bytes] = []
        self._collected = bytearray()
        self._between_chunks = False
        self.plain = False
        """Between two chunks of the body and between two events at once: ``only_event`` may look at the next read."""
        self._message_ended = False
        self._keep_alive = False
        self._extra = False
        self._stamp_ns = 0
        self.lag_max_ns = 0
        """The longest receive lag of a read."""

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._extra = self._message_ended
        status = self._parser.get_status_code()
        self.exchange.http_status = status
        if status < 200:
            return
        if self.exchange.headers_ns is None:
            self.exchange.headers_ns = self._stamp_ns
        header = self._headers.get
        self.exchange.retry_after = _text(header(b"retry-after"))
        self.keep_alive = _text(header(b"keep-alive"))
        self._between_chunks = header(b"transfer-encoding", b"").lower() == b"chunked"
        coding = _text(header(b"content-encoding")) or "identity"
        if status == 200 and coding.lower() != "identity":
            self.exchange.error = f"the answer is compressed ({coding}), which hides when its tokens came"

    def on_chunk_header(self) -> None:
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        self._between_chunks = True

    def on_body(self, body: bytes) -> None:
        self._bodies.append(body)

    def on_message_complete(self) -> None:
        self._between_chunks = False
        if (self.exchange.http_status or 0) < 200:
            self._headers.clear()
            return
        self._message_ended = True
        self._keep_alive = self._parser.should_keep_alive()

    # the reads

    def feed(self, read: Read) -> None:
        """Take one read of plain (decrypted) bytes. Sets ``complete`` at the end of the answer."""
        data, stamp_ns, _, _, _ = read
        self._stamp_ns = stamp_ns
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._end(Outcome.BAD_RESPONSE, f"not HTTP/1.1: {error}")
            return
        if self._bodies:
            body = self._bodies[0] if len(self._bodies) == 1 else b"".join(self._bodies)
            self._bodies.clear()
            self._take_body(body, read)
        self.plain = self._between_chunks and self._decoder is not None and self._decoder.between_events
        if self._message_ended and not self.complete:
            self._finish(stamp_ns)

    def take_plain(self, reads: list[Read], at: int) -> int:
        """Take the reads from ``at`` on for as long as each is made of whole HTTP chunks that hold one event each.
        Returns the index of the first that is not.
        """
        if not self.plain:
            return at
        at = self._take_single(reads, at)
        if at == len(reads):
            return at
        # This process was late: a read brought several chunks, and the next ones most likely do too.
        pieces: list[Read] = []
        for data, stamp_ns, floor_ns, stamped, lag_ns in reads[at:]:
            chunks = whole_chunks(data) if stamped else None
            if chunks is None:
                break
            pieces += [(chunk, stamp_ns, floor_ns, True, lag_ns) for chunk in chunks]
            pieces[-1] = (chunks[-1], stamp_ns, stamp_ns, True, lag_ns)
            at += 1
        self._take_single(pieces, 0, in_pieces=True)
        return at

    def _take_single(self, reads: list[Read], at: int, *, in_pieces: bool = False) -> int:
        """``take_plain`` for reads of one HTTP chunk each. ``in_pieces``: some are pieces of a read, and their floor is
        the stamp itself where that is their own.
        """
        number = len(reads)
        while (at := self._take_alike(reads, at, in_pieces)) < number:
            data, stamp_ns, floor_ns, stamped, lag_ns = reads[at]
            event_data = only_event(data) if stamped else None
            if event_data is None:
                break
            self._completion.on_data(event_data, stamp_ns, stamp_ns - floor_ns if in_pieces else 0)
            if lag_ns > self.lag_max_ns:
                self.lag_max_ns = lag_ns
            at += 1
        return at

    def _take_alike(self, reads: list[Read], at: int, in_pieces: bool) -> int:
        """``_take_single`` for as long as each read holds the chunk that is expected next: most reads of a stream end
        here, so it is all in one loop.
        """
        completion = self._completion
        expected = completion.expected()
        if expected is None:
            return at
        template, count = expected
        run = reads[at : at + MOST_ALIKE]
        prefix = template.prefix
        prefix_size = len(prefix)
        head_of = _heads.get
        insides: list[bytes] = []
        suffixes = template.suffixes(count, len(run), _END)
        for (data, _, _, stamped, _), suffix in zip(run, suffixes, strict=True):
            head = head_of(len(data))
            if head is None or not stamped or not data.startswith(head) or not data.endswith(suffix):
                break
            start, end = len(head) + prefix_size, len(data) - len(suffix)
            if start >= end or not data.startswith(prefix, len(head)):
                break
            insides.append(data[start:end])
        texts, number = unquoted(insides)
        if number:
            stamps_ns, lags_ns = zip(*map(_STAMP_AND_LAG, run[:number]), strict=True)
            self.lag_max_ns = max(self.lag_max_ns, *lags_ns)
            widths_ns = [stamp - floor for _, stamp, floor, _, _ in run[:number]] if in_pieces else [0] * number
            completion.on_alike(texts, stamps_ns, widths_ns)
        return at + number

    @property
    def streaming(self) -> bool:
        """In the middle of a stream of tokens whose end the framing will tell: nothing hangs on parsing at once."""
        return self.plain and bool(self._completion.chunk_ns)

    def end_of_stream(self, stamp_ns: int, error: OSError | None) -> None:
        """The server closed the connection, or it broke."""
        headers = self._headers
        framed = b"content-length" in headers or b"transfer-encoding" in headers
        ended_by_close = error is None and self.exchange.headers_ns is not None and not framed
        told_its_error = self._completion.outcome() is Outcome.ERROR_EVENT
        if ended_by_close or told_its_error or self._completion.done_ns is not None:
            self._finish(stamp_ns)
        elif self.exchange.headers_ns is None:
            self._end(Outcome.DISCONNECTED, _reason(error, "the server closed the connection before it answered"))
        else:
            self._end(Outcome.DISCONNECTED, _reason(error, "the connection ended inside the answer's body"))
        self.reusable = False

    def release(self) -> None:
        """Let go of the parser, which holds this object in turn. No read may follow."""
        del self._parser

    def _take_body(self, body: bytes, read: Read) -> None:
        status = self.exchange.http_status
        if self._decoder is None and status == 200 and not self._collected and self._is_event_stream():
            self._decoder = EventDecoder()
        if self._decoder is not None:
            self._take_events(body, read)
            return
        if status != 200:
            self._collected += body[: max(0, ERROR_BODY_BYTES - len(self._collected))]
            return
        self._collected += body
        if len(self._collected) > MAX_EVENT_BYTES:
            self._end(Outcome.BAD_RESPONSE, TOO_LONG)

    def _is_event_stream(self) -> bool:
        return is_event_stream(_text(self._headers.get(b"content-type")))

    def _take_events(self, body: bytes, read: Read) -> None:
        decoder = self._decoder
        assert decoder is not None
        events = decoder.feed(body)
        if decoder.held_bytes > MAX_EVENT_BYTES:
            self._end(Outcome.BAD_RESPONSE, TOO_LONG)
            return
        _, stamp_ns, floor_ns, _, _ = read
        if len(events) == 1 and not decoder.pending:
            self._completion.on_event(events[0], stamp_ns)
            return
        # Only the bytes that came last have a stamp: the last event's, unless the start of a further one followed it.
        last = len(events) - (0 if decoder.pending else 1)
        for index, event in enumerate(events):
            self._completion.on_event(event, stamp_ns, 0 if index == last else stamp_ns - floor_ns)

    def _finish(self, stamp_ns: int) -> None:
        exchange = self.exchange
        self.reusable = not self._extra and self._keep_alive
        if exchange.http_status != 200:
            words = error_text(bytes(self._collected))
            self._end(Outcome.HTTP_ERROR, words or f"status {exchange.http_status} with an empty body")
            return
        if exchange.error is not None:
            self._end(Outcome.BAD_RESPONSE, exchange.error)
            return
        if self._decoder is None and (self._collected or not self._is_event_stream()):
            self._completion.on_body(bytes(self._collected), stamp_ns)
        self._completion.on_end(stamp_ns)
        self._end(self._completion.outcome(), self._completion.error)

    def _end(self, outcome: Outcome, error: str | None) -> None:
        self.exchange.outcome = outcome
        self.exchange.error = error
        self.complete = True


def only_event(data: bytes) -> bytes | None:
    """The event's data, if ``data`` is exactly one HTTP chunk that holds exactly one event, of one ``data: `` line
    ended by LF, with the chunk's size as every server writes it; else None.
    """
    head = _heads.get(len(data))
    if head is None or not data.startswith(head) or not data.endswith(_END):
        return None
    event_data = data[len(head) : -4]
    return None if b"\n" in event_data or b"\r" in event_data else event_data


def whole_chunks(data: bytes) -> list[bytes] | None:
    """``data`` taken apart, if it is nothing but whole HTTP chunks that each hold exactly one event, as ``only_event``
    knows them; else None. Several come when a read was late: the parser's way costs four times as much, and a process
    that is late would fall further behind.
    """
    chunks = []
    at, end = 0, len(data)
    while at < end:
        size = _sizes.get(data[at : data.find(b"\r\n", at, at + 6)])
        if size is None or at + size > end:
            return None
        chunk = data[at : at + size]
        if only_event(chunk) is None:
            return None
        chunks.append(chunk)
        at += size
    return chunks or None


def _head_of(size: int) -> tuple[int, bytes]:
    """The length of a chunk of ``size`` bytes with its frame, and how it begins."""
    head = b"%x\r\n" % size
    return len(head) + size + 2, head + b"data: "


_STAMP_AND_LAG = itemgetter(1, 4)
_END = b"\n\n\r\n"
_heads = dict(_head_of(size) for size in range(len(b"data: \n\n"), 8192))
"""By the length of the whole chunk. Larger ones are rare, and take the long way."""
_sizes = {head[: head.index(b"\r\n")]: size for size, head in _heads.items()}
"""The length of the whole chunk by its size as its first line says it."""


def _reason(error: OSError | None, closed: str) -> str:
    return closed if error is None else f"{closed}: {error.strerror or error}"


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
