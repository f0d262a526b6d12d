"""Rules of the verdict: was the load the one that the schedule asked for, and sent when it asked for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from vllm_locust.verdict.evidence import Delivery, Evidence
from vllm_locust.verdict.reason import (
    Reason,
    Rule,
    Status,
    Thresholds,
    number_text,
    percent_text,
    severity_by,
    time_text,
)


def _schedule_lag(evidence: Evidence, thresholds: Thresholds) -> Reason | None:
    lag = evidence.generator_lag_p99_ns
    severity = None if lag is None else severity_by(lag, thresholds.schedule_lag_p99_ns)
    if lag is None or severity is None:
        return None
    sentence = (
        f"Requests were sent up to {time_text(lag)} after they were due (p99): the generator was late, add workers."
    )
    return Reason("schedule_lag", severity, sentence, lag)


def _slots_full(evidence: Evidence, thresholds: Thresholds) -> Reason | None:
    wait = evidence.slot_wait_p99_ns
    if wait is None or wait <= thresholds.schedule_lag_p99_ns[0]:
        return None
    sentence = (
        f"Requests were sent up to {time_text(wait)} after they were due (p99) because every slot was busy: "
        "TTFT from schedule includes the wait; raise -u to send them in time."
    )
    return Reason("slots_full", Status.DEGRADED, sentence, wait, by_full_slots=True)


def _rate_missed(evidence: Evidence, thresholds: Thresholds) -> Reason | None:
    if not evidence.planned_arrivals or evidence.sent_in_time is None:
        return None
    shortfall = (evidence.planned_arrivals - evidence.sent_in_time) / evidence.planned_arrivals
    severity = severity_by(shortfall, thresholds.achieved_shortfall)
    if severity is None:
        return None
    dropped = f", {evidence.arrivals_dropped} were dropped" if evidence.arrivals_dropped else ""
    sentence = (
        f"{evidence.sent_in_time} of {evidence.planned_arrivals} planned arrivals were sent in time "
        f"({percent_text(shortfall)} short{dropped}): the load was not the one asked for."
    )
    return _unless_slots_full(evidence, thresholds, Reason("rate_missed", severity, sentence, shortfall))


def _stage_rate(evidence: Evidence, thresholds: Thresholds) -> Reason | None:
    """Of one stage among several: what the others make up for, the whole window does not show."""
    if len(evidence.deliveries) < 2:
        return None
    judged = [one for one in evidence.deliveries if abs(one.sent - one.planned) > thresholds.stage_deviation_floor]
    worst = max(judged, key=lambda one: abs(one.deviation), default=None)
    severity = None if worst is None else severity_by(abs(worst.deviation), thresholds.stage_deviation)
    if worst is None or severity is None:
        return None
    sentence = (
        f"In stage {worst.stage} {worst.sent} requests were sent where {worst.planned} were planned "
        f"({percent_text(abs(worst.deviation))} {'more' if worst.deviation > 0 else 'fewer'}): "
        "its load was not the one asked for."
    )
    return _unless_slots_full(evidence, thresholds, Reason("stage_rate", severity, sentence, worst.deviation))


def _arrival_process(evidence: Evidence, thresholds: Thresholds) -> Reason | None:
    lag, wait = evidence.generator_lag_p99_ns, evidence.slot_wait_p99_ns or 0
    if lag is None or max(lag, wait) <= thresholds.gap_cv_lag_p99_ns:
        return None
    judged = [one for one in evidence.deliveries if one.is_hold and one.planned >= thresholds.gap_cv_arrivals]
    worst: Delivery | None = max(judged, key=lambda one: abs(one.gap_cv_deviation), default=None)
    severity = None if worst is None else severity_by(abs(worst.gap_cv_deviation), thresholds.gap_cv_deviation)
    if worst is None or severity is None or worst.sent_gap_cv is None or worst.planned_gap_cv is None:
        return None
    sentence = (
        f"In stage {worst.stage} the gaps between requests vary by {number_text(worst.sent_gap_cv, 3)} of their mean, "
        f"and by {number_text(worst.planned_gap_cv, 3)} in the plan: the arrival process was not the one asked for."
    )
    return _unless_slots_full(
        evidence, thresholds, Reason("arrival_process", severity, sentence, worst.gap_cv_deviation)
    )


def _unless_slots_full(evidence: Evidence, thresholds: Thresholds, reason: Reason) -> Reason:
    """Where every slot was busy the user's own limit is the cause, and not the generator."""
    if not _slots_were_the_cause(evidence, thresholds):
        return reason
    sentence = f"{reason.sentence} Every slot was busy: raise -u."
    return replace(reason, severity=Status.DEGRADED, sentence=sentence, by_full_slots=True)


def _slots_were_the_cause(evidence: Evidence, thresholds: Thresholds) -> bool:
    """Whether arrivals waited for a slot, or were dropped for want of one, by more than the generator was late."""
    lag, wait = evidence.generator_lag_p99_ns or 0, evidence.slot_wait_p99_ns or 0
    matters, invalid = thresholds.schedule_lag_p99_ns
    if lag > invalid:
        return False
    dropped = evidence.arrivals_dropped > thresholds.achieved_shortfall[0] * (evidence.planned_arrivals or 0)
    return dropped or wait > max(lag, matters)


def _arrivals_lost(evidence: Evidence, _: Thresholds) -> Reason | None:
    lost = evidence.arrivals_lost
    if lost is None:
        sentence = (
            "The trace could not be read again at the merge, so nobody looked for arrivals that were lost: "
            "give the merge the same workload."
        )
        return Reason("arrivals_unchecked", Status.DEGRADED, sentence, None)
    if not lost:
        return None
    sentence = (
        f"{lost} planned arrivals are lost: no worker sent or dropped them on record, because the worker whose share "
        "they were had gone or its records are missing (arrivals.parquet names them)."
    )
    return Reason("arrivals_lost", Status.INVALID, sentence, lost, fails_run=True)


def _arrivals_doubled(evidence: Evidence, _: Thresholds) -> Reason | None:
    if not evidence.arrivals_doubled:
        return None
    sentence = (
        f"{evidence.arrivals_doubled} arrivals of the schedule are on record more than once: two workers had the same "
        "share, and the load was higher than the plan."
    )
    return Reason("arrivals_doubled", Status.INVALID, sentence, evidence.arrivals_doubled)


def _arrivals_misplaced(evidence: Evidence, _: Thresholds) -> Reason | None:
    if not evidence.arrivals_misplaced:
        return None
    sentence = (
        f"{evidence.arrivals_misplaced} arrivals are on record with another time than the schedule has for them: "
        "a worker followed another schedule."
    )
    return Reason("arrivals_misplaced", Status.INVALID, sentence, evidence.arrivals_misplaced)


DELIVERED_LOAD_RULES: Final[tuple[Rule, ...]] = (
    _schedule_lag,
    _slots_full,
    _rate_missed,
    _stage_rate,
    _arrival_process,
    _arrivals_lost,
    _arrivals_doubled,
    _arrivals_misplaced,
)
