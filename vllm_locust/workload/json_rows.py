"""Rows of a JSON array or of JSON lines, read in pieces: a cut-off or broken file gives its rows up to the damage."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

_PIECE_BYTES = 4 << 20
_SEPARATOR = re.compile(r"[\s,]*")
_LONGEST_TOKEN = 16
"""A JSON error this close to the end of the text may be a literal, number or escape that is cut off."""


@dataclass(slots=True)
class ReadReport:
    """Filled while the rows are read; complete when they are used up."""

    file_bytes: int
    rows: int = 0
    bad_lines: int = 0
    damage: str | None = None
    """What ended the reading early, in words; None when the whole file was read."""


def read_rows(path: Path, report: ReadReport) -> Iterator[Any]:
    """The elements of a top-level array, or the values of a file of JSON lines."""
    with path.open("rb") as stream:
        start = stream.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
        stream.seek(0)
        if start.startswith(b"["):
            yield from _ArrayReader(stream, report).rows()
        else:
            yield from _lines(stream, report)


def _lines(stream: BinaryIO, report: ReadReport) -> Iterator[Any]:
    for number, line in enumerate(stream):
        content = line.removeprefix(codecs.BOM_UTF8) if number == 0 else line
        if not content.strip():
            continue
        try:
            row = orjson.loads(content)
        except orjson.JSONDecodeError:
            report.bad_lines += 1
            if not line.endswith(b"\n"):
                report.damage = f"its last line is cut off after {len(line):,} bytes"
            continue
        report.rows += 1
        yield row


class _ArrayReader:
    """Decodes the file piece by piece and takes whole elements off the front of the text."""

    def __init__(self, stream: BinaryIO, report: ReadReport) -> None:
        self._stream = stream
        self._report = report
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")("strict")
        self._text = ""
        self._at_end = False
        self._read_bytes = 0

    def rows(self) -> Iterator[Any]:
        decode = json.JSONDecoder().raw_decode
        self._more()
        position = self._text.find("[") + 1
        while True:
            match = _SEPARATOR.match(self._text, position)
            position = match.end() if match else position
            if self._text.startswith("]", position):
                return
            try:
                row, position = decode(self._text, position)
            except json.JSONDecodeError as error:
                self._text, position = self._text[position:], 0
                if not self._may_be_incomplete(error) or not self._more():
                    self._report_damage(error)
                    return
                continue
            except RecursionError:
                self._text = self._text[position:]
                self._stopped("at a row that is nested too deeply")
                return
            self._report.rows += 1
            yield row

    def _may_be_incomplete(self, error: json.JSONDecodeError) -> bool:
        return error.msg.startswith("Unterminated string") or error.pos >= len(error.doc) - _LONGEST_TOKEN

    def _more(self) -> bool:
        """Read on, in pieces that grow with the row, so that a huge row costs no quadratic time."""
        if self._at_end:
            return False
        data = self._stream.read(max(_PIECE_BYTES, len(self._text)))
        self._at_end = not data
        pending = len(self._utf8.getstate()[0])
        try:
            self._text += self._utf8.decode(data)
        except UnicodeDecodeError as error:
            # The text before the bad byte is good; nothing after it is read.
            self._text += error.object[: error.start].decode("utf-8-sig")
            self._at_end = True
            self._report.damage = f"byte {self._read_bytes - pending + error.start:,} is not UTF-8"
            return True
        self._read_bytes += len(data)
        return bool(data)

    def _report_damage(self, error: json.JSONDecodeError) -> None:
        if self._report.damage is None:
            if self._at_end and self._may_be_incomplete(error):
                self._stopped("where the file is cut off")
            else:
                self._stopped(f"at invalid JSON ({error.msg})")

    def _stopped(self, where: str) -> None:
        undecoded = len(self._text.encode("utf-8", "surrogatepass")) + len(self._utf8.getstate()[0])
        unread = self._report.file_bytes - self._read_bytes + undecoded
        self._report.damage = f"reading ended {where}, and its last {unread:,} bytes were not used"
