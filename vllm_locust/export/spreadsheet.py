"""CSV that a spreadsheet takes as values only, and a table with one line for each run that is brought up to date."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

_BREAKS: Final = str.maketrans("\r\n\0", "   ")
_FORMULA: Final = ("=", "+", "-", "@", "\t", "＝", "＋", "－", "＠")
"""A cell that begins so is a formula to one spreadsheet or another (OWASP, CSV injection)."""


_AFTER_SEPARATOR: Final = re.compile(rf"([;\t][\s\"']*)(?=[{re.escape(''.join(_FORMULA))}])")
"""Where a comma is part of a number, a spreadsheet takes ; for the end of a cell, whatever stands about it."""
_SURROGATES: Final = re.compile("[\ud800-\udfff]")


def cell(value: object) -> str:
    """Nothing for None. A text is kept in one line; one that could be a formula, also after leading blanks, gets an
    apostrophe before it, and so does what another separator would make one of.
    """
    if value is None:
        return ""
    if isinstance(value, (bool, int, float)):
        return str(value)
    text = _AFTER_SEPARATOR.sub(r"\1'", _SURROGATES.sub("\ufffd", str(value).translate(_BREAKS)))
    return f"'{text}" if text.lstrip(" ").startswith(_FORMULA) else text


def table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    return _written(columns, ({name: cell(row.get(name)) for name in columns} for row in rows))


def with_row(text: str, row: Mapping[str, Any], keys: Sequence[str]) -> str:
    """``text``, a table with a heading or nothing, with this row in the place of the one with the same ``keys``, else
    at its end. Columns that the row lacks stay empty, and those that the table lacks come after its own. Raises
    ValueError where the table lacks a column of ``keys``.
    """
    _refuse_other_separators(text.partition("\n")[0], keys[0])
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows = list(reader)
    columns = list(reader.fieldnames or ())
    for key in keys:
        if columns and key not in columns:
            raise ValueError(f"it has no column {key}")
    if any(None in one for one in rows):
        raise ValueError("a line has more cells than the heading")
    columns += [name for name in row if name not in columns]
    new = {name: cell(value) for name, value in row.items()}
    places = [place for place, one in enumerate(rows) if all(one[key] == new[key] for key in keys)]
    if places:
        rows[places[0]] = new
    else:
        rows.append(new)
    return _written(columns, rows)


def _refuse_other_separators(heading: str, key: str) -> None:
    for separator, name in ((";", "semicolons"), ("\t", "tabs")):
        if separator in heading and key in (part.strip(' "\r') for part in heading.split(separator)):
            raise ValueError(f"its cells are parted by {name}, as a spreadsheet saved it; save it with commas")


def _written(columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> str:
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()
