"""Server-sent events out of a byte stream, split as the WHATWG specification says, at a cost linear in the bytes."""

from __future__ import annotations

import re
from typing import NamedTuple

_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\n|\r")
_MESSAGE = b"message"


class Event(NamedTuple):
    data: bytes
    """The data lines, joined with LF."""
    type: bytes
    """``b"message"`` unless an ``event:`` line said otherwise."""


class EventDecoder:
    """Feed it the body in pieces of any size; each call returns the events that piece completed.

    An event ends with its blank line, never with the end of the body: what is then ``pending`` is discarded, as the
    specification demands. Bytes stay bytes: a split inside a UTF-8 character cannot hurt.

    One addition to the specification: llama.cpp reports an error in a field ``error:`` in place of ``data:``. It is
    an event of type ``error`` here; the specification would drop it, and the stream would look truncated.
    """

    __slots__ = ("_after_cr", "_data", "_in_event", "_parts", "_started", "_type", "comments", "held_bytes")

    def __init__(self) -> None:
        self.comments = 0
        self.held_bytes = 0
        """Fed since the last event ended: what an event without an end takes."""
        self._parts: list[bytes] = []
        """Pieces of the line that has not ended yet. A list, since growing one bytes object would cost the square."""
        self._data: list[bytes] = []
        self._type = b""
        self._in_event = False
        self._after_cr = False
        self._started = False

    @property
    def pending(self) -> bool:
        """Whether bytes of an unfinished event (or of an unfinished line) are held."""
        return self._in_event or bool(self._parts)

    @property
    def between_events(self) -> bool:
        """Whether nothing at all is held, so that the next byte begins an event."""
        return self._started and not (self._in_event or self._parts or self._after_cr)

    def feed(self, data: bytes) -> list[Event]:
        if (
            data.startswith(b"data: ")
            and data.endswith(b"\n\n")
            and data.find(b"\n") == len(data) - 2
            and not self._in_event
            and not self._parts
            and b"\r" not in data
        ):
            self._started = True
            self._after_cr = False
            return [Event(data[6:-2], _MESSAGE)]
        return self._feed_any(data)

    def _feed_any(self, data: bytes) -> list[Event]:
        self.held_bytes += len(data)
        if not self._started:
            data = self._strip_bom(data)
        if self._after_cr and data:
            self._after_cr = False
            if data.startswith(b"\n"):
                data = data[1:]
        if not data:
            return []
        if b"\r" in data:
            self._after_cr = data.endswith(b"\r")
            lines = _LINE_END.split(data)
        else:
            lines = data.split(b"\n")
        rest = lines.pop()
        events: list[Event] = []
        if lines and self._parts:
            self._parts.append(lines[0])
            lines[0] = b"".join(self._parts)
            self._parts = []
        for line in lines:
            if line:
                self._on_line(line)
            else:
                self._on_blank_line(events)
        if rest:
            self._parts.append(rest)
        return events

    def _strip_bom(self, data: bytes) -> bytes:
        """Hold the first bytes back for as long as they may still become a byte order mark."""
        head = b"".join(self._parts) + data
        if len(head) < len(_BOM) and _BOM.startswith(head):
            self._parts = [head] if head else []
            return b""
        self._started = True
        self._parts = []
        return head.removeprefix(_BOM)

    def _on_line(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if not name:
            self.comments += 1
            return
        self._in_event = True
        if value.startswith(b" "):
            value = value[1:]
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._type = value
        elif name == b"error":
            self._data.append(value)
            self._type = b"error"

    def _on_blank_line(self, events: list[Event]) -> None:
        self.held_bytes = 0
        if self._data:
            events.append(Event(b"\n".join(self._data), self._type or _MESSAGE))
            self._data = []
        self._type = b""
        self._in_event = False
