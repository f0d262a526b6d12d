"""What a rule of the verdict finds: a reason with its severity, its number and a sentence. Every threshold is here.

Times are bounded, not guessed. Where a chunk has no stamp of its own the record holds the interval in which it came,
so the true percentile lies between the percentile of the earliest and of the latest possible times: ``Thresholds``
says when that is too far. Times stamped by the process itself are off by as much as its loop was late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from vllm_locust.verdict.evidence import Evidence


class Status(StrEnum):
    VALID = "valid"
    DEGRADED = "degraded"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The first of a pair is degraded, the second invalid. What is equal to a threshold passes.

    A percentile that could be off (a shift) by more than 1 % or by more than 1 ms makes a run degraded. Invalid is a
    number that could mislead: off by more than 5 % and by more than 1 ms as well, since 5 % of 5 ms is 0.25 ms, on
    which no decision hangs; or off by more than 20 %, whatever that is in time. The p99.9 alone makes no run invalid:
    it stands on one value in a thousand, and the sentence tells how far it could be off.
    """

    shift_share: tuple[float, float] = (0.01, 0.05)
    shift_ns: int = 1_000_000
    shift_share_alone: float = 0.20
    shift_floor_ns: int = 50_000
    """What is less than the proven error of a stamp is no shift."""
    cause_cpu_fraction: float = 0.70
    """A worker that uses more of a core in its busiest seconds has more load than it can read in time."""
    cause_run_delay_share: float = 0.05
    """A worker that waits longer for its core finds several chunks when it gets it. An idle machine has below 1 %."""
    schedule_lag_p99_ns: tuple[int, int] = (10_000_000, 100_000_000)
    achieved_shortfall: tuple[float, float] = (0.01, 0.05)
    stage_deviation: tuple[float, float] = (0.01, 0.05)
    """Of the requests sent in a stage from those planned for it, where it is more than ``stage_deviation_floor``."""
    stage_deviation_floor: int = 2
    """Requests at the edges of a stage fall to this or that side by a microsecond."""
    gap_cv_deviation: tuple[float, float] = (0.10, 0.50)
    """Of the gaps between requests as sent from those planned, where a hold has at least ``gap_cv_arrivals``."""
    gap_cv_arrivals: int = 100
    gap_cv_lag_p99_ns: int = 1_000_000
    """Requests that are not later than this (p99) move no percentile by more, however small the gaps are."""
    receive_lag_p99_ns: int = 10_000_000
    user_stamp_share: tuple[float, float] = (0.001, 0.01)
    """Of the requests: fewer of them move no percentile that is told without a flag."""
    user_stamp_lag_p99_ns: tuple[int, int] = (1_000_000, 10_000_000)
    cpu_fraction_p95: float = 0.90
    run_delay_share: float = 0.10
    probe_cpu_fraction: float = 0.95
    """Mean over a probe of a search. A worker that uses more of a core cannot be told from a slow server."""
    probe_run_delay_share: float = 0.25
    """Of a probe. What a worker that waits so long for its core measures hangs on who else wants it."""
    gc_pause_ns: int = 20_000_000
    telemetry_silence: float = 0.10
    """Of the window. What lies beside the requests may have a gap."""
    clock_step_ns: int = 100_000_000
    clock_uncertainty_ns: int = 10_000_000


THRESHOLDS: Final = Thresholds()
EXTREME: Final = "p99_9"


@dataclass(frozen=True, slots=True)
class Reason:
    code: str
    severity: Status
    sentence: str
    value: float | None
    fails_run: bool = False
    """Exit code 1, whatever else applies."""
    by_full_slots: bool = False
    """The user's own limit is the cause (``-u``), and not the generator."""

    def as_json(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "severity": str(self.severity),
            "sentence": self.sentence,
            "value": self.value,
            "fails_run": self.fails_run,
        }


Rule = Callable[[Evidence, Thresholds], Reason | None]
"""None: nothing speaks against the run."""


def severity_by(value: float, pair: tuple[float, float]) -> Status | None:
    if value <= pair[0]:
        return None
    return Status.DEGRADED if value <= pair[1] else Status.INVALID


def time_text(value_ns: float) -> str:
    for size, unit in ((1e9, "s"), (1e6, "ms")):
        if value_ns >= size:
            return f"{number_text(value_ns / size, 4)} {unit}"
    return f"{number_text(value_ns / 1e3, 3)} µs"


def percent_text(share: float) -> str:
    return f"{number_text(share * 100, 3)} %"


def number_text(value: float, digits: int) -> str:
    """With so many significant digits, never in exponential form: 12.3, 0.0123, 1,234."""
    text = f"{value:,.{digits}g}"
    if "e" not in text:
        return text
    return f"{value:,.0f}" if abs(value) >= 1 else f"{value:.7f}"
