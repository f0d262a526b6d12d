"""Whether the measurement can be trusted: rules over numbers about the generator itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from vllm_locust.verdict.delivered_load import DELIVERED_LOAD_RULES
from vllm_locust.verdict.evidence import Evidence, Shift
from vllm_locust.verdict.reason import (
    EXTREME,
    THRESHOLDS,
    Reason,
    Rule,
    Status,
    Thresholds,
    percent_text,
    severity_by,
    time_text,
)


@dataclass(frozen=True, slots=True)
class Verdict:
    status: Status
    reasons: tuple[Reason, ...]

    def as_json(self) -> dict[str, Any]:
        return {"status": str(self.status), "reasons": [reason.as_json() for reason in self.reasons]}


def judge(evidence: Evidence, thresholds: Thresholds = THRESHOLDS) -> Verdict:
    """The worst severity of all reasons, the worst first."""
    found = [reason for rule in RULES if (reason := rule(evidence, thresholds)) is not None]
    reasons = tuple(sorted(found, key=lambda r: (r.severity is not Status.INVALID, not r.fails_run)))
    if any(reason.severity is Status.INVALID for reason in reasons):
        return Verdict(Status.INVALID, reasons)
    return Verdict(Status.DEGRADED if reasons else Status.VALID, reasons)


def exit_code(verdict: Verdict, slo_missed: bool) -> int:
    """Of a run that was started at all (bad usage is 2, and comes first). An SLO that measured nothing is not met."""
    if any(reason.fails_run for reason in verdict.reasons):
        return 1
    if verdict.status is Status.INVALID:
        return 4
    undecided = any(reason.code == "slo_undecided" for reason in verdict.reasons)
    return 3 if slo_missed or undecided else 0


def _nothing_measured(evidence: Evidence, _: Thresholds) -> Reason | None:
    if evidence.window_ok:
        return None
    if not evidence.attempted:
        sentence = "Nothing was measured: no request was sent."
    elif not evidence.window_requests:
        sentence = f"Nothing was measured: none of the {evidence.attempted} requests falls into the measurement window."
    else:
        sentence = f"Nothing was measured: all {evidence.window_requests} requests of the window failed."
    return Reason("nothing_measured", Status.INVALID, sentence, 0, fails_run=True)


def _too_many_failures(evidence: Evidence, _: Thresholds) -> Reason | None:
    if evidence.max_failures is None or not evidence.attempted:
        return None
    share = evidence.failed / evidence.attempted
    if share <= evidence.max_failures:
        return None
    cut_off = f", of which {evidence.unfinished} unfinished at the end of the drain" if evidence.unfinished else ""
    sentence = (
        f"{evidence.failed} of {evidence.attempted} requests failed{cut_off} ({percent_text(share)}); "
        f"--max-failures allows {percent_text(evidence.max_failures)}."
    )
    return Reason("too_many_failures", Status.DEGRADED, sentence, share, fails_run=True)


def _records_lost(evidence: Evidence, _: Thresholds) -> Reason | None:
    lost = [f"{evidence.batches_lost} batches of records"] if evidence.batches_lost else []
    if evidence.records_lost:
        lost.append(f"at least {evidence.records_lost} single requests")
    if not lost:
        return None
    sentence = f"{' and '.join(lost)} that workers made or sent are in no file of the run."
    total = evidence.batches_lost + evidence.records_lost
    return Reason("records_lost", Status.INVALID, sentence, total, fails_run=True)


def _spool_left(evidence: Evidence, _: Thresholds) -> Reason | None:
    if not evidence.spooled_batches:
        return None
    names = f" ({', '.join(evidence.spools[:10])})" if evidence.spools else ""
    sentence = (
        f"{evidence.spooled_batches} record batches still lie in workers' spool files{names}: copy their spool/ here "
        "and complete the run with `vllm-locust merge RUN --spool DIR`."
    )
    return Reason("spool_left", Status.INVALID, sentence, evidence.spooled_batches, fails_run=True)


def _values_unstorable(evidence: Evidence, _: Thresholds) -> Reason | None:
    if not evidence.unstorable_values:
        return None
    sentence = (
        f"{evidence.unstorable_values} values of records fit no column of requests.parquet (a count beyond "
        "64 bits, a text that is no Unicode): they are null or changed there, and in no number of the report."
    )
    return Reason("values_unstorable", Status.DEGRADED, sentence, evidence.unstorable_values)


def _workers_missing(evidence: Evidence, _: Thresholds) -> Reason | None:
    missing = evidence.workers_missing
    if not missing:
        return None
    of = "" if evidence.workers_expected is None else f" of {evidence.workers_expected}"
    sentence = f"{len(missing)}{of} workers were missing for part of the run or at its end: {', '.join(missing[:10])}."
    return Reason("workers_missing", Status.INVALID, sentence, len(missing), fails_run=True)


def _coalesced(evidence: Evidence, thresholds: Thresholds) -> Reason | None:
    judged = [(severity, shift) for shift in evidence.shifts if (severity := _shift_severity(shift, thresholds))]
    if not judged:
        return None
    severity = Status.INVALID if any(found is Status.INVALID for found, _ in judged) else Status.DEGRADED
    worst = max(
        (shift for found, shift in judged if found is severity), key=lambda shift: (shift.share, shift.shift_ns)
    )
    touched = "" if (share := evidence.coalesced_share) is None else f" {percent_text(share)} of the gaps are touched."
    sentence = (
        f"One read brought several chunks, so {worst.percentile.replace('_', '.')} of {worst.metric} could be off "
        f"by up to {time_text(worst.shift_ns)} ({percent_text(worst.share)} of {time_text(worst.reported_ns)}): "
        f"{_coalescing_cause(evidence, thresholds)}.{touched}"
    )
    return Reason("coalesced", severity, sentence, worst.share)


def _shift_severity(shift: Shift, thresholds: Thresholds) -> Status | None:
    found = _shift_size(shift, thresholds)
    return Status.DEGRADED if found is Status.INVALID and shift.percentile == EXTREME else found


def _shift_size(shift: Shift, thresholds: Thresholds) -> Status | None:
    if shift.shift_ns <= thresholds.shift_floor_ns:
        return None
    degraded, invalid = thresholds.shift_share
    long = shift.shift_ns > thresholds.shift_ns
    if shift.share > thresholds.shift_share_alone or (shift.share > invalid and long):
        return Status.INVALID
    return Status.DEGRADED if shift.share > degraded or long else None


def _coalescing_cause(evidence: Evidence, thresholds: Thresholds) -> str:
    cpu, delay = evidence.cpu_fraction_p95, evidence.run_delay_share
    if cpu is None:
        return "no worker reported its condition in the window, so the cause is not known"
    if cpu > thresholds.cause_cpu_fraction:
        return f"the load was more than the worker processes could read in time (CPU p95 {percent_text(cpu)}), add some"
    if delay is not None and delay > thresholds.cause_run_delay_share:
        return f"something else took the core from a worker for {percent_text(delay)} of the time"
    return (
        "the workers had time to spare, so the server, or what lies between, most likely sent chunks in bursts, or the "
        "server's own process was not given a core"
    )


def _user_stamps(evidence: Evidence, thresholds: Thresholds) -> Reason | None:
    lag = evidence.loop_lag_p99_ns
    if lag is None:
        return None
    by_share = severity_by(evidence.user_stamp_share, thresholds.user_stamp_share)
    by_lag = severity_by(lag, thresholds.user_stamp_lag_p99_ns)
    if by_share is None or by_lag is None:
        return None
    severity = Status.INVALID if by_share is by_lag is Status.INVALID else Status.DEGRADED
    sentence = (
        f"{percent_text(evidence.user_stamp_share)} of the requests were stamped by the process and not by the kernel, "
        f"and the process's loop was up to {time_text(lag)} late (p99): times are too long by as much."
    )
    return Reason("user_stamps", severity, sentence, lag)


def _receive_lag(evidence: Evidence, thresholds: Thresholds) -> Reason | None:
    lag = evidence.receive_lag_p99_ns
    if lag is None or lag <= thresholds.receive_lag_p99_ns:
        return None
    sentence = (
        f"Bytes waited up to {time_text(lag)} (p99) until the process read them. "
        "The kernel's stamps do not depend on it, but the process has no head-room."
    )
    return Reason("receive_lag", Status.DEGRADED, sentence, lag)


def _health_missing(evidence: Evidence, _: Thresholds) -> Reason | None:
    if evidence.health_samples != 0 or not evidence.window_requests:
        return None
    sentence = "No worker reported its own condition in the window: nothing vouches for the generator."
    return Reason("health_missing", Status.DEGRADED, sentence, 0)


def _cpu_saturated(evidence: Evidence, thresholds: Thresholds) -> Reason | None:
    cpu = evidence.cpu_fraction_p95
    if cpu is None or cpu <= thresholds.cpu_fraction_p95:
        return None
    who = "A worker" if evidence.cpu_worker is None else f"Worker {evidence.cpu_worker}"
    sentence = f"{who} used {percent_text(cpu)} of a core in its busiest seconds (p95): add worker processes."
    return Reason("cpu_saturated", Status.DEGRADED, sentence, cpu)


def _run_delay(evidence: Evidence, thresholds: Thresholds) -> Reason | None:
    share = evidence.run_delay_share
    if share is None or share <= thresholds.run_delay_share:
        return None
    sentence = f"A worker waited for a core {percent_text(share)} of the time: something else runs on this machine."
    return Reason("run_delay", Status.DEGRADED, sentence, share)


def _gc_pause(evidence: Evidence, thresholds: Thresholds) -> Reason | None:
    pause = evidence.gc_pause_max_ns
    if pause is None or pause <= thresholds.gc_pause_ns:
        return None
    return Reason(
        "gc_pause", Status.DEGRADED, f"Garbage collection stopped a worker for {time_text(pause)} in a second.", pause
    )


def _clock_stepped(evidence: Evidence, thresholds: Thresholds) -> Reason | None:
    step = evidence.clock_step_max_ns
    if step is None or step <= thresholds.clock_step_ns:
        return None
    sentence = (
        f"A host's wall clock was set by {time_text(step)} during the run: durations are right, "
        "but its series may be shifted against those of other hosts."
    )
    return Reason("clock_stepped", Status.DEGRADED, sentence, step)


def _clock_uncertain(evidence: Evidence, thresholds: Thresholds) -> Reason | None:
    uncertainty = evidence.clock_uncertainty_max_ns
    if uncertainty is None or uncertainty <= thresholds.clock_uncertainty_ns:
        return None
    sentence = f"Clocks of hosts could only be compared to ±{time_text(uncertainty)}: their series may be shifted."
    return Reason("clock_uncertain", Status.DEGRADED, sentence, uncertainty)


def _telemetry_missing(evidence: Evidence, thresholds: Thresholds) -> Reason | None:
    silent = {what: share for what, share in evidence.telemetry_silence.items() if share > thresholds.telemetry_silence}
    if not silent:
        return None
    worst = max(silent.values())
    sentence = (
        f"Nothing came of {', '.join(sorted(silent)[:10])} for up to {percent_text(worst)} of the window: what the "
        "report says of them is not of all of it. The requests' own numbers do not depend on that."
    )
    return Reason("telemetry_missing", Status.DEGRADED, sentence, worst)


def _stopped_early(evidence: Evidence, _: Thresholds) -> Reason | None:
    if evidence.stopped_early is None:
        return None
    return Reason("stopped_early", Status.DEGRADED, f"The run was stopped early: {evidence.stopped_early}.", None)


def _slo_undecided(evidence: Evidence, _: Thresholds) -> Reason | None:
    undecided = list(dict.fromkeys(evidence.slos_undecided))
    if not undecided:
        return None
    sentence = f"Nothing was measured that decides the SLO {', '.join(undecided)}: it counts as missed."
    return Reason("slo_undecided", Status.DEGRADED, sentence, len(undecided))


def _capacity_unknown(evidence: Evidence, _: Thresholds) -> Reason | None:
    if evidence.capacity_unknown is None:
        return None
    sentence = f"The search says nothing of the capacity. {evidence.capacity_unknown}"
    return Reason("capacity_unknown", Status.INVALID, sentence, None, fails_run=True)


def _search_given_up(evidence: Evidence, _: Thresholds) -> Reason | None:
    if evidence.search_given_up is None:
        return None
    sentence = f"{evidence.search_given_up} What it found before is not as narrow as was asked for."
    return Reason("search_given_up", Status.DEGRADED, sentence, None, fails_run=True)


def _token_sources(evidence: Evidence, _: Thresholds) -> Reason | None:
    sources = sorted(evidence.token_sources)
    if len(sources) > 1:
        sentence = f"Tokens were counted in different ways ({', '.join(sources)}): token rates mix them."
        return Reason("token_source_mixed", Status.DEGRADED, sentence, len(sources))
    if sources == ["chunks"]:
        sentence = "The server reported no usage, so each chunk counts as one token: give --tokenizer to count them."
        return Reason("tokens_are_chunks", Status.DEGRADED, sentence, None)
    return None


RULES: Final[tuple[Rule, ...]] = (
    _nothing_measured,
    _too_many_failures,
    _records_lost,
    _spool_left,
    _values_unstorable,
    _workers_missing,
    _coalesced,
    _user_stamps,
    *DELIVERED_LOAD_RULES,
    _receive_lag,
    _health_missing,
    _cpu_saturated,
    _run_delay,
    _gc_pause,
    _clock_stepped,
    _clock_uncertain,
    _telemetry_missing,
    _stopped_early,
    _slo_undecided,
    _capacity_unknown,
    _search_given_up,
    _token_sources,
)
