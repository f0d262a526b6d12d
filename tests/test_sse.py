"""The decoder against a naive reading of the whole stream at once, whatever the cuts and the line ends."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.goldens import STREAMS
from vllm_locust.sse import Event, EventDecoder

LINE_ENDS = {"lf": [b"\n"], "crlf": [b"\r\n"], "cr": [b"\r"], "mixed": [b"\n", b"\r", b"\r\n"]}


def oracle(stream: bytes) -> list[Event]:
    """WHATWG 9.2.6, on the whole stream, line by line. The field ``error`` is our one addition."""
    text = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    events, data, kind = [], b"", b""
    for line in text.split(b"\n")[:-1]:
        if line == b"":
            if data:
                events.append(Event(data[:-1], kind or b"message"))
            data = kind = b""
        elif not line.startswith(b":"):
            name, _, value = line.partition(b":")
            value = value[1:] if value[:1] == b" " else value
            if name in (b"data", b"error"):
                data += value + b"\n"
            if name == b"event":
                kind = value
            if name == b"error":
                kind = b"error"
    return events


def decoded(*pieces: bytes) -> list[Event]:
    decoder = EventDecoder()
    return [event for piece in pieces for event in decoder.feed(piece)]


def respelled(stream: bytes, ends: list[bytes]) -> bytes:
    """The stream with its LFs replaced by these line ends in turn. CR never meets LF: that would be one end."""
    lines = stream.split(b"\n")
    cycle = itertools.cycle(ends)
    return b"".join(line + next(cycle) for line in lines[:-1]) + lines[-1]


@pytest.mark.parametrize("spelling", LINE_ENDS)
@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.stem)
def test_a_cut_at_any_byte_and_any_line_end_gives_the_same_events(path: Path, spelling: str) -> None:
    original = path.read_bytes()
    expected = oracle(original)
    assert expected[-1] == Event(b"[DONE]", b"message")
    assert len(expected) == original.count(b"data: ")
    stream = respelled(original, LINE_ENDS[spelling])
    for cut in range(len(stream) + 1):
        assert decoded(stream[:cut], stream[cut:]) == expected, cut


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 4096])
def test_pieces_of_any_size_give_the_same_events(size: int) -> None:
    for path, ends in itertools.product(STREAMS, LINE_ENDS.values()):
        stream = b"\xef\xbb\xbf" + respelled(path.read_bytes(), ends)
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert decoded(*pieces) == oracle(stream)


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: x\n\n", [(b"x", b"message")]),
        (b"data:x\n\n", [(b"x", b"message")]),
        (b"data:  x\n\n", [(b" x", b"message")]),
        (b"data\n\n", [(b"", b"message")]),
        (b"data:\n\n", [(b"", b"message")]),
        (b"data: \n\n", [(b"", b"message")]),
        (b"data: a\ndata: b\n\n", [(b"a\nb", b"message")]),
        (b"data\ndata\n\n", [(b"\n", b"message")]),
        (b"data: a\nid: 7\nretry: 9\nwhatever: z\n\n", [(b"a", b"message")]),
        (b"event: error\ndata: a\n\ndata: b\n\n", [(b"a", b"error"), (b"b", b"message")]),
        (b"data: a\nevent: ping\n\n", [(b"a", b"ping")]),
        (b"event: lost\n\ndata: b\n\n", [(b"b", b"message")]),
        (b"event\ndata: b\n\n", [(b"b", b"message")]),
        (b": keep-alive\n\ndata: b\n\n", [(b"b", b"message")]),
        (b"data: a\n: between\ndata: b\n\n", [(b"a\nb", b"message")]),
        (b"error: {}\n\n", [(b"{}", b"error")]),
        (b"\n\n\r\n\rdata: a\n\n\n\n", [(b"a", b"message")]),
        (b"data: a\x0bb\x0cc\x85d\xe2\x80\xa8e\n\n", [(b"a\x0bb\x0cc\x85d\xe2\x80\xa8e", b"message")]),
        (b"data: a\n", []),
        (b"data: a", []),
        (b"data: a\n\ndata: b\n", [(b"a", b"message")]),
        (b"data: a\r\ndata: b\r\nevent: x\r\n\r\ndata: c\r\n\r\n", [(b"a\nb", b"x"), (b"c", b"message")]),
        (b"data: a\rdata: b\revent: x\r\rdata: c\r\r", [(b"a\nb", b"x"), (b"c", b"message")]),
        (b"data: a\r\r", [(b"a", b"message")]),
        (b"data: a\r\n\r", [(b"a", b"message")]),
        (b"data: a\n\r\n", [(b"a", b"message")]),
        (b"Data: a\n\n", []),
        (b" data: a\n\n", []),
        (b"\xef\xbb\xbfdata: a\n\n", [(b"a", b"message")]),
        (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\n", []),
        (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [(b"a", b"message")]),
        (b"\xef\xbb", []),
        (b"\xef\xbbdata: a\n\n", []),
    ],
)
def test_spellings(stream: bytes, expected: list[tuple[bytes, bytes]]) -> None:
    assert oracle(stream) == expected
    assert decoded(stream) == expected
    for cut in range(1, len(stream)):
        assert decoded(stream[:cut], stream[cut:]) == expected
    assert decoded(*(stream[i : i + 1] for i in range(len(stream)))) == expected


_WORDS = st.sampled_from(
    [
        b"data",
        b"event",
        b"error",
        b"id",
        b":",
        b": ",
        b" ",
        b"x",
        b"\xef\xbb\xbf",
        b"\xc3",
        b"\n",
        b"\r",
        b"\r\n",
        b"\n\n",
    ]
)


@settings(max_examples=200)
@given(st.lists(_WORDS, max_size=40), st.lists(st.integers(0, 60), max_size=8))
def test_any_bytes_in_any_pieces(words: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(words)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    assert decoded(*(stream[a:b] for a, b in itertools.pairwise(edges))) == oracle(stream)


def test_comments_are_counted_and_are_no_events() -> None:
    decoder = EventDecoder()
    assert decoder.feed(b": keep-alive\n\n: keep-") == []
    assert decoder.comments == 1
    assert decoder.feed(b"alive\n\n:\ndata: a\n\n") == [Event(b"a", b"message")]
    assert decoder.comments == 3


def test_pending_tells_whether_a_read_ended_inside_an_event() -> None:
    decoder = EventDecoder()
    steps = [
        (b"", False),
        (b"d", True),
        (b"ata: a\n", True),
        (b"\n", False),
        (b"data: a\n\n", False),
        (b"data: a\n\ndata", True),
        (b": b\n\n", False),
        (b"data: a\r\r", False),
        (b"\n", False),
        (b"id: 1\n", True),
        (b"\n", False),
        (b": comment\n", False),
        (b"\n", False),
        (b"data: a\n\ndata: b\n\n", False),
    ]
    for piece, pending in steps:
        decoder.feed(piece)
        assert decoder.pending is pending, piece


def test_a_large_event_is_not_copied_on_every_read() -> None:
    """Work grows with the bytes: the held pieces stay pieces, and are joined once, at the end of the line."""
    decoder = EventDecoder()
    pieces = [b"data: ", *(b"x" for _ in range(300_000))]
    for piece in pieces:
        assert decoder.feed(piece) == []
    assert len(decoder._parts) == len(pieces)
    assert decoder.feed(b"\n\n") == [Event(b"x" * 300_000, b"message")]
    assert decoder._parts == []


def test_what_an_event_without_an_end_takes_is_known() -> None:
    decoder = EventDecoder()
    decoder.feed(b"data: a\n\n")
    assert decoder.held_bytes == 0
    for _ in range(5):
        assert decoder.feed(b"data: " + b"x" * 94) == []
    assert decoder.held_bytes == 500
    decoder.feed(b"\n\n")
    assert decoder.held_bytes == 0
    decoder.feed(b": comment\n" * 10 + b"\n")
    assert decoder.held_bytes == 0
