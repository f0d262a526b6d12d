"""The oracle is ``json.loads`` of the whole text; every damage is made by cutting or changing it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_locust.workload import json_rows
from vllm_locust.workload.json_rows import ReadReport, read_rows

ROWS: list[Any] = [
    {"id": "a", "text": 'quote " backslash \\ {[,]} end'},
    {"id": "b", "nested": [{"x": [1, 2.5, -3e4, True, None]}]},
    {"id": "ünïcode", "text": "日本語 🎉 é"},
    {},
    {"id": "last", "n": 123456},
]


def read(path: Path, content: bytes) -> tuple[list[Any], ReadReport]:
    path.write_bytes(content)
    report = ReadReport(len(content))
    return list(read_rows(path, report)), report


@pytest.fixture(params=[7, 64, 1 << 22])
def piece_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(json_rows, "_PIECE_BYTES", request.param)
    return int(request.param)


@pytest.mark.usefixtures("piece_bytes")
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_a_whole_array_gives_every_row(tmp_path: Path, indent: int | None, bom: bytes) -> None:
    content = bom + json.dumps(ROWS, indent=indent, ensure_ascii=False).encode()
    rows, report = read(tmp_path / "f.json", content)
    assert rows == ROWS
    assert (report.rows, report.bad_lines, report.damage) == (5, 0, None)


@pytest.mark.usefixtures("piece_bytes")
def test_an_array_cut_at_any_byte_gives_the_whole_rows_before_the_cut(tmp_path: Path) -> None:
    content = json.dumps(ROWS, ensure_ascii=False).encode()
    ends: list[int] = []
    for row in ROWS:
        text = json.dumps(row, ensure_ascii=False).encode()
        ends.append(content.index(text, ends[-1] if ends else 0) + len(text))
    for cut in range(1, len(content)):
        rows, report = read(tmp_path / "f.json", content[:cut])
        whole = sum(end <= cut for end in ends)
        assert rows == ROWS[:whole], cut
        assert report.damage is not None
        unused = int(report.damage.split("its last ")[1].split(" ")[0].replace(",", ""))
        # The separator after the last whole row may or may not have been skipped.
        assert cut - (ends[whole - 1] if whole else 1) - unused in (0, 1, 2), (cut, report.damage)


@pytest.mark.usefixtures("piece_bytes")
def test_an_array_ends_at_a_row_that_is_not_json(tmp_path: Path) -> None:
    content = b'[{"a": 1}, {"b": 2}, {"c" 3, "pad": "xxxxxxxxxxxxxxxxxxxxxxxxxxxxx"}, {"d": 4}]'
    rows, report = read(tmp_path / "f.json", content)
    assert rows == [{"a": 1}, {"b": 2}]
    assert report.damage is not None
    assert "invalid JSON" in report.damage


@pytest.mark.usefixtures("piece_bytes")
def test_an_array_ends_at_a_byte_that_is_not_utf8(tmp_path: Path) -> None:
    content = '[{"a": "é"}, {"b": "'.encode() + b"\xff" + b'"}, {"c": 3}]'
    rows, report = read(tmp_path / "f.json", content)
    assert rows == [{"a": "é"}]
    assert report.damage == f"byte {content.index(bytes([255])):,} is not UTF-8"


def test_rows_nested_too_deeply_end_the_reading(tmp_path: Path) -> None:
    rows, report = read(tmp_path / "f.json", b'[{"a": 1}, ' + b"[" * 100_000 + b"]" * 100_000 + b"]")
    assert rows == [{"a": 1}]
    assert report.damage is not None


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_json_lines(tmp_path: Path, newline: bytes) -> None:
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in ROWS]
    rows, report = read(tmp_path / "f.jsonl", b"\xef\xbb\xbf" + newline.join(lines) + newline + newline)
    assert rows == ROWS
    assert (report.rows, report.bad_lines, report.damage) == (5, 0, None)


def test_bad_lines_are_counted_and_a_cut_last_line_is_said(tmp_path: Path) -> None:
    rows, report = read(tmp_path / "f.jsonl", b'{"a": 1}\n{"b": \n{"c": "\xff"}\n{"d": 4}\n{"e": "cut')
    assert rows == [{"a": 1}, {"d": 4}]
    assert report.bad_lines == 3
    assert report.damage == "its last line is cut off after 10 bytes"


def test_a_huge_row_over_many_pieces_is_decoded_a_logarithmic_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows, "_PIECE_BYTES", 64)
    attempts = 0

    class CountingDecoder(json.JSONDecoder):
        def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
            nonlocal attempts
            attempts += 1
            return super().raw_decode(s, idx)

    monkeypatch.setattr(json, "JSONDecoder", CountingDecoder)
    rows, _ = read(tmp_path / "f.json", json.dumps([{"text": "x" * 500_000}]).encode())
    assert len(rows[0]["text"]) == 500_000
    assert attempts < 25
