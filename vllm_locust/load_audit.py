"""Planned and sent load, held against each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_locust.arrival import Integers


@dataclass(frozen=True, slots=True)
class LoadAudit:
    """Whether the load was delivered as planned, in one stretch of time. Coefficients of variation are those of the
    gaps; None where there are fewer than two.
    """

    achieved_fraction: float | None
    """Sent ÷ planned; None where nothing was planned."""
    planned_gap_cv: float | None
    sent_gap_cv: float | None


def audit(planned_ns: Integers, sent_ns: Integers) -> LoadAudit:
    """Hold the times at which arrivals were due in a stretch of time against those at which requests were sent in it,
    both on one axis. What the process asks for at a steady rate is ``Schedule.gap_cv``: compare it on holds only.
    """
    return LoadAudit(
        achieved_fraction=len(sent_ns) / len(planned_ns) if len(planned_ns) else None,
        planned_gap_cv=_gap_cv(planned_ns),
        sent_gap_cv=_gap_cv(np.sort(sent_ns)),
    )


def _gap_cv(times_ns: Integers) -> float | None:
    gaps = np.diff(times_ns)
    if len(gaps) < 2 or not np.any(gaps):
        return None
    return float(np.std(gaps) / np.mean(gaps))
