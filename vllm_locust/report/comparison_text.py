"""A comparison as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from vllm_locust.report import comparison_rows as rows
from vllm_locust.report.text import printable

Json = Mapping[str, Any]
_WIDTH: Final = 110


def render_comparison(result: Json) -> str:
    return "\n".join(_lines(result)) + "\n"


def _lines(result: Json) -> Iterator[str]:
    for comparison in result["comparisons"]:
        yield printable(rows.heading(result, comparison))
        yield from _wrapped(rows.notes(comparison))
        for stage in comparison["stages"]:
            yield ""
            yield printable(f"stage {stage['name']}")
            yield from _table(rows.HEADINGS, [(one["quantity"], *rows.cells(one)) for one in stage["differences"]])
        if comparison["gates"]:
            yield ""
        for gate in comparison["gates"]:
            yield from _wrapped([f"{gate['status'].upper()}: {rows.gate_sentence(gate)}"])
        yield ""
    yield from _wrapped([rows.words_of_method(result["comparisons"])])


def render_scaling(scaling: Json) -> str:
    lines = _table(
        rows.SCALING_HEADINGS,
        [(f"{scaling['tag']}={point['size']}", *rows.scaling_cells(point)) for point in scaling["points"]],
    )
    return "\n".join([*lines, *_wrapped(rows.scaling_remarks(scaling))]) + "\n"


def _table(headings: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    table = [("", *headings), *body]
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    ]


def _wrapped(sentences: Iterable[str]) -> Iterator[str]:
    for sentence in sentences:
        yield from textwrap.wrap(printable(f"- {sentence}"), _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
