"""What must never leave the process that uses it: the API key and the way to the Redis password."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from vllm_locust.errors import UsageError

KEY_VARIABLE: Final = "OPENAI_API_KEY"


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
        text = os.environ.get(KEY_VARIABLE, "")
        return _key_in(text, KEY_VARIABLE) if text else None
    try:
        text = Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"--api-key-file {file} is no UTF-8 text; write the key alone into it") from None
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"--api-key-file {file} cannot be read: {reason}; give a readable file") from None
    return _key_in(text, f"--api-key-file {file}")


def _key_in(text: str, where: str) -> str:
    key = text.strip()
    if not key or not key.isprintable() or not key.isascii():
        raise UsageError(f"{where} does not hold one line with a key; write the key alone into it")
    return key


def _password_file(file: str | None) -> Path | None:
    if not file:
        return None
    path = Path(file)
    if not os.access(path, os.R_OK):
        raise UsageError(f"--redis-password-file {file} cannot be read; give a readable file")
    return path
