"""What workers tell the master, as values that are believed only once they were looked at.

A payload has come over a connection without a login, maybe from a worker of another version: whatever is not exactly
what a worker of this version says is a ValueError that names the field.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from vllm_locust.json_fields import JsonFields

MAX_TEXT: Final = 4096
MAX_MOVED_NS: Final = 1 << 63
_READY_FIELDS: Final = ("run_id", "error", "schedule_fingerprint", "host")
_COUNTS: Final = ("last_seq", "durable_seq", "requests", "unstorable_values")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The answer to the order to prepare. With an ``error`` the worker cannot take part."""

    run_id: str
    error: str | None = None
    schedule_fingerprint: str | None = None
    host: str

    @classmethod
    def from_message(cls, message: object) -> Self:
        fields = JsonFields.of(message, keys=_READY_FIELDS)
        return cls(
            run_id=_text(fields, "run_id"),
            error=_text_or_none(fields, "error"),
            schedule_fingerprint=_text_or_none(fields, "schedule_fingerprint"),
            host=_text(fields, "host"),
        )

    def to_message(self) -> dict[str, Any]:
        return asdict(self) | {"error": None if self.error is None else self.error[:MAX_TEXT]}


def read_last_words(message: object) -> dict[str, Any]:
    """What a worker says when it has flushed: how many batches and requests there were, and where its spool lies."""
    fields = JsonFields.of(message, keys=("run_id", "worker_id", *_COUNTS, "spool_path", "wall_clock_moved_ns"))
    moved_ns = fields.value("wall_clock_moved_ns")
    if isinstance(moved_ns, bool) or not isinstance(moved_ns, int) or abs(moved_ns) > MAX_MOVED_NS:
        raise ValueError("wall_clock_moved_ns is not a time in nanoseconds")
    return {
        "run_id": _text(fields, "run_id"),
        "worker_id": _text(fields, "worker_id"),
        **{name: fields.count(name) for name in _COUNTS},
        "spool_path": _text_or_none(fields, "spool_path"),
        "wall_clock_moved_ns": moved_ns,
    }


def _text(fields: JsonFields, key: str) -> str:
    text = fields.text(key)
    if len(text) > MAX_TEXT or not _is_storable(text):
        raise ValueError(f"{fields.name(key)} is longer than {MAX_TEXT} characters, or no Unicode text")
    return text


def _text_or_none(fields: JsonFields, key: str) -> str | None:
    return None if fields.value(key) is None else _text(fields, key)


def _is_storable(text: str) -> bool:
    """Without lone surrogates, which no file takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
