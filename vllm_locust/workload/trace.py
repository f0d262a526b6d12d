"""Recorded request times and lengths. Traces carry no text: it is generated to the recorded length."""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from vllm_locust.errors import WorkloadError
from vllm_locust.workload.generated import Plan
from vllm_locust.workload.json_rows import ReadReport, read_rows
from vllm_locust.workload.spec import TraceLayout, TraceSpec

_CSV_COLUMNS: dict[TraceLayout, tuple[str, str, str]] = {
    "burstgpt": ("timestamp", "request tokens", "response tokens"),
    "azure": ("timestamp", "contexttokens", "generatedtokens"),
}
_DATE = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9})\d*)?(Z|[+-]\d\d:?\d\d)?")
_MAX_TOKENS = 1 << 31


@dataclass(frozen=True, slots=True)
class TraceRow:
    time_ns: int
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[object, ...] | None = None


def plan_trace(spec: TraceSpec) -> Plan:
    filters: Counter[str] = Counter()
    warnings: list[str] = []
    rows = _rows(spec, filters, warnings)
    if not rows:
        reasons = ", ".join(f"{name} {count:,}" for name, count in sorted(filters.items()) if count) or "no rows"
        raise WorkloadError(f"trace {spec.file} holds nothing usable ({reasons}); {_EXPECTED}")
    times = np.array([row.time_ns for row in rows], np.int64)
    early = int((np.diff(times) < 0).sum())
    if early:
        warnings.append(f"{spec.file.name}: {early:,} rows are earlier than the row before them; sorted by time")
    order = np.argsort(times, kind="stable")
    times = times[order]
    return Plan(
        kind="trace",
        turn=np.zeros(len(rows), np.int64),
        prompt_tokens=np.array([row.input_tokens for row in rows], np.int64)[order],
        output_tokens=np.array([row.output_tokens for row in rows], np.int64)[order],
        blocks=_blocks(rows, order.tolist()),
        block_tokens=spec.block_tokens,
        offset_ns=np.rint((times - times[0]) / spec.speed).astype(np.int64),
        filters=dict(sorted(filters.items())),
        warnings=tuple(warnings),
    )


def _blocks(rows: list[TraceRow], order: list[int]) -> tuple[tuple[int, ...], ...] | None:
    """Hash ids may be any JSON value; numbered in order of appearance they fit a column."""
    if all(row.hash_ids is None for row in rows):
        return None
    numbers: dict[object, int] = {}
    return tuple(tuple(numbers.setdefault(h, len(numbers)) for h in rows[i].hash_ids or ()) for i in order)


_EXPECTED = (
    'known are JSON lines with "timestamp" (ms), "input_length" and "output_length" (Mooncake), and CSV with '
    "Timestamp, Request tokens and Response tokens (BurstGPT) or TIMESTAMP, ContextTokens and GeneratedTokens (Azure)"
)


def _rows(spec: TraceSpec, filters: Counter[str], warnings: list[str]) -> list[TraceRow]:
    report = ReadReport(0)
    rows: list[TraceRow] = []
    try:
        report.file_bytes = spec.file.stat().st_size
        layout = spec.layout if spec.layout != "auto" else detect_layout(spec.file)
        for parsed in _mooncake(spec.file, report) if layout == "mooncake" else _csv(spec.file, layout):
            fault = "bad_row" if parsed is None else _fault(parsed)
            if fault is not None:
                filters[fault] += 1
            elif parsed is not None:
                if len(rows) == spec.max_rows:
                    warnings.append(
                        f"{spec.file.name}: only its first {spec.max_rows:,} usable rows are used (max_rows)"
                    )
                    break
                rows.append(parsed)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"trace {spec.file} cannot be read ({error}); check the path and the file") from None
    if report.bad_lines:
        filters["bad_row"] += report.bad_lines
    if report.damage is not None:
        warnings.append(f"{spec.file.name} ({report.file_bytes:,} bytes) is damaged: {report.damage}")
    return rows


def _fault(row: TraceRow) -> str | None:
    if row.input_tokens == 0:
        return "empty_prompt"
    # BurstGPT marks failed requests with an answer of no tokens.
    return "no_answer" if row.output_tokens == 0 else None


def detect_layout(file: Path) -> TraceLayout:
    """By the first line: a JSON object, or a CSV header."""
    with file.open(encoding="utf-8-sig", newline="") as stream:
        first = stream.readline(1 << 20).strip()
    if first.startswith("{"):
        return "mooncake"
    header = {name.strip().lower() for name in next(csv.reader([first]), [])}
    for layout, columns in _CSV_COLUMNS.items():
        if header.issuperset(columns):
            return layout
    raise WorkloadError(f"trace {file}: its columns ({first[:200]}) are of no known layout; {_EXPECTED}")


def _mooncake(file: Path, report: ReadReport) -> Iterator[TraceRow | None]:
    for row in read_rows(file, report):
        yield _mooncake_row(row)


def _mooncake_row(row: Any) -> TraceRow | None:
    try:
        hash_ids = row.get("hash_ids")
        blocks = None if hash_ids is None else tuple(hash_ids)
        hash(blocks)
        return TraceRow(
            _ns(row["timestamp"], 1_000_000), _tokens(row["input_length"]), _tokens(row["output_length"]), blocks
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _csv(file: Path, layout: TraceLayout) -> Iterator[TraceRow | None]:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream)
        header = [name.strip().lower() for name in next(reader, [])]
        missing = [name for name in _CSV_COLUMNS[layout] if name not in header]
        if missing:
            raise WorkloadError(f"trace {file}: layout {layout} needs the columns {', '.join(missing)}; {_EXPECTED}")
        time, prompt, output = (header.index(name) for name in _CSV_COLUMNS[layout])
        for row in reader:
            try:
                time_ns = _date_ns(row[time]) if layout == "azure" else _ns(row[time], 1_000_000_000)
                yield TraceRow(time_ns, _tokens(row[prompt]), _tokens(row[output]))
            except (IndexError, ValueError):
                if row:
                    yield None


def _ns(value: float | str, unit_ns: int) -> int:
    number = float(value)
    if not math.isfinite(number) or abs(number) * unit_ns >= 1 << 62:
        raise ValueError(f"{value!r} is not a time")
    return round(number * unit_ns)


def _date_ns(text: str) -> int:
    match = _DATE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a date")
    zone = "" if match[4] in (None, "Z") else match[4]
    moment = datetime.fromisoformat(f"{match[1]}T{match[2]}{zone}")
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return int(moment.timestamp()) * 1_000_000_000 + int((match[3] or "0").ljust(9, "0"))


def _tokens(value: float | str) -> int:
    number = float(value)
    if not (0 <= number < _MAX_TOKENS) or number != int(number):
        raise ValueError(f"{value!r} is not a number of tokens")
    return int(number)
