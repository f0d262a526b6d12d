"""A comparison as Markdown for a pull request. Text from outside cannot become markup."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from vllm_locust.report import comparison_rows as rows
from vllm_locust.report.text import printable

Json = Mapping[str, Any]
_MARKUP: Final = re.compile(r"([\\`*_\[\]<>|~&$])")
_MENTION: Final = "@\u200b"
"""Names nobody."""
_SIGNS: Final = {"passed": "✅ passed", "failed": "❌ failed", "undecided": "⚠️ undecided"}
_BOLD: Final = ("worse", "better")


def render_markdown(result: Json) -> str:
    return "\n".join(_lines(result)) + "\n"


def _lines(result: Json) -> Iterator[str]:
    for comparison in result["comparisons"]:
        yield f"### {plain(rows.heading(result, comparison))}"
        yield ""
        for gate in comparison["gates"]:
            yield f"- {_SIGNS[gate['status']]}: {plain(rows.gate_sentence(gate))}"
        yield from (f"- {plain(note)}" for note in rows.notes(comparison))
        for stage in comparison["stages"]:
            yield ""
            yield f"Stage {plain(stage['name'])}"
            yield ""
            yield from _table(
                rows.HEADINGS, [(f"`{one['quantity']}`", *rows.cells(one)) for one in stage["differences"]]
            )
        yield ""
    yield plain(rows.words_of_method(result["comparisons"]))


def render_scaling_markdown(scaling: Json) -> str:
    body = [(plain(f"{scaling['tag']}={point['size']}"), *rows.scaling_cells(point)) for point in scaling["points"]]
    lines = [*_table(rows.SCALING_HEADINGS, body), ""]
    return "\n".join([*lines, *(f"- {plain(remark)}" for remark in rows.scaling_remarks(scaling))]) + "\n"


def _table(headings: Sequence[str], body: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(("", *headings)) + " |"
    yield "|---" + "|---:" * len(headings) + "|"
    for name, *line in body:
        yield "| " + " | ".join((name, *(f"**{cell}**" if cell in _BOLD else plain(cell) for cell in line))) + " |"


def plain(text: str) -> str:
    return _MARKUP.sub(r"\\\1", printable(text)).replace("@", _MENTION)
