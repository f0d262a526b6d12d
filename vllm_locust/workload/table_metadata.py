"""What goes with a cached table: counts by filter, warnings, a digest of the content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

_KEY = b"vllm_locust"


@dataclass(frozen=True, slots=True)
class TableMetadata:
    digest: str
    """SHA-256 of what the table was made from, or of the table: the same on every machine."""
    filters: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    """The vocabulary of generated text, so that only the process which builds the table needs a tokenizer."""
    settings: Mapping[str, Any] = field(default_factory=dict)


def with_metadata(table: pa.Table, metadata: TableMetadata) -> pa.Table:
    return table.replace_schema_metadata({_KEY: json.dumps(asdict(metadata)).encode()})


def metadata_of(table: pa.Table) -> TableMetadata:
    values = json.loads((table.schema.metadata or {})[_KEY])
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
