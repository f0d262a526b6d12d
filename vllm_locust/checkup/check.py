"""What one check of a host found, and all of them as a table or as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

SCHEMA: Final = 1


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"
    """It was not looked at; ``fix`` says what it would take."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: Status
    found: str
    fix: str | None = None
    """What to do; None where nothing is to be done."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The numbers behind ``found``, strict JSON values; null where one is not known."""


def ok(name: str, found: str, **figures: Any) -> Check:
    return Check(name, Status.OK, found, None, figures)


def warning(name: str, found: str, fix: str, **figures: Any) -> Check:
    return Check(name, Status.WARNING, found, fix, figures)


def failed(name: str, found: str, fix: str, **figures: Any) -> Check:
    return Check(name, Status.FAILED, found, fix, figures)


def skipped(name: str, found: str, fix: str) -> Check:
    return Check(name, Status.SKIPPED, found, fix)


def has_failed(checks: Sequence[Check]) -> bool:
    return any(check.status is Status.FAILED for check in checks)


def table(checks: Sequence[Check]) -> str:
    """A line for each check, and one more with what to do where there is something; then how many there are of each."""
    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        lines.append(f"{check.status.value:<8} {check.name:<{width}}  {check.found}")
        if check.fix is not None:
            lines.append(f"{'':<8} {'':<{width}}  -> {check.fix}")
    counts = Counter(check.status for check in checks)
    lines.append(", ".join(f"{counts[status]} {status.value}" for status in Status if counts[status]))
    return "\n".join(lines)


def as_json(checks: Sequence[Check], *, host: str, role: str | None) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "host": host,
        "role": role,
        "failed": has_failed(checks),
        "checks": [
            {
                "name": check.name,
                "status": check.status.value,
                "found": check.found,
                "fix": check.fix,
                "figures": dict(check.figures),
            }
            for check in checks
        ],
    }
