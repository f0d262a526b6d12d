"""What goes with a cached table: counts by filter, warnings, a digest of the content."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa

METADATA_KEY = b"vllm_locust"


@dataclass(frozen=True, slots=True)
class TableMetadata:
    digest: str
    """SHA-256 of what the table was made from, or of the table: the same on every machine."""
    filters: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    """The vocabulary of generated text, so that only the process which builds the table needs a tokenizer."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def metadata_of(table: pa.Table) -> TableMetadata:
    values = json.loads((table.schema.metadata or {})[METADATA_KEY])
    values["warnings"] = tuple(values["warnings"])
    values["words"] = tuple(values["words"])
    return TableMetadata(**values)


def digest_of(*parts: object) -> str:
    """SHA-256 over arrays by their bytes and everything else as JSON."""
    digest = hashlib.sha256()
    for part in parts:
        content = (
            part.tobytes() if isinstance(part, np.ndarray) else json.dumps(part, sort_keys=True, default=str).encode()
        )
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def integers(table: pa.Table, column: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A column of whole numbers as an array; it lies in the mapped file where its type is int64 already."""
    values: np.ndarray[tuple[int], np.dtype[np.int64]] = table[column].to_numpy().astype(np.int64, copy=False)
    return values


class ColumnValues:
    """Single values of a mapped column by row number."""

    def __init__(self, table: pa.Table, column: str) -> None:
        # The last chunk is empty: it carries the metadata.
        self._chunks = [chunk for chunk in table[column].chunks if len(chunk)]
        self._starts = [0, *accumulate(len(chunk) for chunk in self._chunks)]

    def __getitem__(self, row: int) -> Any:
        chunk = bisect_right(self._starts, row) - 1
        return self._chunks[chunk][row - self._starts[chunk]].as_py()
