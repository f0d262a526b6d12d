"""What must never leave the process that uses it: the API key and the way to the Redis password."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from vllm_locust.errors import UsageError


@dataclass(frozen=True, slots=True)
class Secrets:
    api_key: str | None = field(repr=False)
    redis_password_file: Path | None

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Self:
        """The key from ``--api-key-file``, else from OPENAI_API_KEY. Raises UsageError for a file that cannot be
        read.
        """
        return cls(_api_key(options.get("api_key_file")), _password_file(options.get("redis_password_file")))


def _api_key(file: str | None) -> str | None:
    if not file:
        return os.environ.get("OPENAI_API_KEY") or None
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file {file} cannot be read: {error}; give a readable file") from None
    if not key or not key.isprintable() or not key.isascii():
        raise UsageError(f"--api-key-file {file} does not hold one line with a key; write the key alone into it")
    return key


def _password_file(file: str | None) -> Path | None:
    if not file:
        return None
    path = Path(file)
    if not os.access(path, os.R_OK):
        raise UsageError(f"--redis-password-file {file} cannot be read; give a readable file")
    return path
