"""How much of a core a worker has used and waited for, by its own counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from vllm_locust.json_fields import JsonFields


@dataclass(frozen=True, slots=True)
class CoreTime:
    """Counters in ns ``at_ns`` after the worker began; ``waited_ns`` is None where nobody tells it."""

    at_ns: int
    used_ns: int
    waited_ns: int | None

    def to_message(self) -> dict[str, Any]:
        return {"at_ns": self.at_ns, "used_ns": self.used_ns, "waited_ns": self.waited_ns}

    @classmethod
    def from_message(cls, message: object, path: str) -> Self:
        """Raises ValueError, naming the field, for anything that ``to_message`` cannot have made."""
        given = JsonFields.of(message, path)
        return cls(given.count("at_ns"), given.count("used_ns"), given.count_or_none("waited_ns"))

    def used_share(self, since: CoreTime) -> float | None:
        """Of one core, from ``since`` until now; None where there is no time between them."""
        if self.at_ns <= since.at_ns:
            return None
        return (self.used_ns - since.used_ns) / (self.at_ns - since.at_ns)

    def waited_share(self, since: CoreTime) -> float | None:
        """Of the time, ready to run and without a core; None as for ``used_share``, and where nobody tells it."""
        if self.waited_ns is None or since.waited_ns is None or self.at_ns <= since.at_ns:
            return None
        return (self.waited_ns - since.waited_ns) / (self.at_ns - since.at_ns)
