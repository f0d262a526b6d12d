import re
from pathlib import Path
from typing import Any

import pytest

from vllm_locust.verdict import delivered_load
from vllm_locust.verdict import judge as judge_module
from vllm_locust.verdict.evidence import Delivery, Evidence, Shift
from vllm_locust.verdict.judge import exit_code, judge
from vllm_locust.verdict.reason import Status


def delivery(stage: str, planned: int = 1000, sent: int = 1000, *, hold: bool = True, cv: float = 1.09) -> Delivery:
    """Of Poisson arrivals."""
    return Delivery(stage=stage, is_hold=hold, planned=planned, sent=sent, planned_gap_cv=1.0, sent_gap_cv=cv)


CLEAN: dict[str, Any] = {
    "window_requests": 1000,
    "window_ok": 1000,
    "attempted": 1000,
    "failed": 0,
    "max_failures": 0.05,
    "workers_expected": 2,
    "coalesced_share": 0.001,
    "generator_lag_p99_ns": 10_000_000,
    "planned_arrivals": 1000,
    "sent_in_time": 990,
    "deliveries": (delivery("a", sent=990), delivery("b", planned=100, sent=102)),
    "receive_lag_p99_ns": 10_000_000,
    "user_stamp_share": 0.001,
    "loop_lag_p99_ns": 500_000_000,
    "health_samples": 10,
    "cpu_fraction_p95": 0.90,
    "cpu_worker": "w1",
    "run_delay_share": 0.10,
    "gc_pause_max_ns": 20_000_000,
    "clock_step_max_ns": 100_000_000,
    "clock_uncertainty_max_ns": 10_000_000,
    "telemetry_silence": {"the metrics of http://a": 0.10},
    "token_sources": ("usage",),
}


def shift(reported_ms: float, lowest_ms: float, highest_ms: float | None = None, **names: str) -> Shift:
    return Shift(
        metric=names.get("metric", "ttft"),
        percentile=names.get("percentile", "p99"),
        reported_ns=reported_ms * 1e6,
        lowest_ns=lowest_ms * 1e6,
        highest_ns=(reported_ms if highest_ms is None else highest_ms) * 1e6,
    )


def test_a_clean_run_is_valid_with_every_number_at_its_limit() -> None:
    verdict = judge(Evidence(**CLEAN))
    assert verdict.as_json() == {"status": "valid", "reasons": []}
    assert exit_code(verdict, slo_missed=False) == 0
    assert exit_code(verdict, slo_missed=True) == 3


def test_what_is_not_known_is_no_reason() -> None:
    verdict = judge(Evidence(window_requests=1, window_ok=1, attempted=1, failed=0))
    assert verdict.status is Status.VALID


REASONS: list[tuple[dict[str, Any], str, str, int, str]] = [
    ({"window_ok": 0}, "nothing_measured", "invalid", 1, "all 1000 requests of the window failed"),
    ({"window_ok": 0, "window_requests": 0}, "nothing_measured", "invalid", 1, "none of the 1000 requests"),
    (
        {"window_ok": 0, "window_requests": 0, "attempted": 0, "planned_arrivals": None},
        "nothing_measured",
        "invalid",
        1,
        "no request was sent",
    ),
    (
        {"failed": 51},
        "too_many_failures",
        "degraded",
        1,
        "51 of 1000 requests failed (5.1 %); --max-failures allows 5 %",
    ),
    (
        {"failed": 60, "unfinished": 40},
        "too_many_failures",
        "degraded",
        1,
        "60 of 1000 requests failed, of which 40 unfinished at the end of the drain (6 %); --max-failures",
    ),
    ({"records_lost": 3}, "records_lost", "invalid", 1, "3 single requests"),
    (
        {"batches_lost": 2, "records_lost": 3},
        "records_lost",
        "invalid",
        1,
        "2 batches of records and at least 3 single requests",
    ),
    ({"spooled_batches": 4}, "spool_left", "invalid", 1, "4 record batches"),
    ({"spooled_batches": 4, "spools": ("/d/a.spool", "/d/b")}, "spool_left", "invalid", 1, "(/d/a.spool, /d/b): copy"),
    (
        {"search_given_up": "The search ended early: the server cannot be reached."},
        "search_given_up",
        "degraded",
        1,
        "ended early: the server cannot be reached. What it found before",
    ),
    ({"unstorable_values": 5}, "values_unstorable", "degraded", 0, "5 values of records fit no column"),
    ({"workers_missing": ("a", "b")}, "workers_missing", "invalid", 1, "2 of 2 workers were missing"),
    ({"generator_lag_p99_ns": 11_000_000}, "schedule_lag", "degraded", 0, "11 ms"),
    ({"generator_lag_p99_ns": 101_000_000}, "schedule_lag", "invalid", 4, "101 ms"),
    (
        {"slot_wait_p99_ns": 5_000_000_000},
        "slots_full",
        "degraded",
        0,
        "5 s after they were due",
    ),
    ({"sent_in_time": 989}, "rate_missed", "degraded", 0, "989 of 1000"),
    ({"sent_in_time": 940}, "rate_missed", "invalid", 4, "6 % short"),
    (
        {"sent_in_time": 940, "arrivals_dropped": 60},
        "rate_missed",
        "degraded",
        0,
        "(6 % short, 60 were dropped)",
    ),
    (
        {"deliveries": (delivery("a"), delivery("10/s", sent=985))},
        "stage_rate",
        "degraded",
        0,
        "In stage 10/s 985 requests were sent where 1000 were planned (1.5 % fewer)",
    ),
    (
        {"deliveries": (delivery("a"), delivery("b", sent=1100))},
        "stage_rate",
        "invalid",
        4,
        "(10 % more)",
    ),
    (
        {"deliveries": (delivery("b", cv=0.89),)},
        "arrival_process",
        "degraded",
        0,
        "In stage b the gaps between requests vary by 0.89 of their mean, and by 1 in the plan",
    ),
    ({"deliveries": (delivery("b", cv=1.51),)}, "arrival_process", "invalid", 4, "1.51"),
    ({"arrivals_lost": 3}, "arrivals_lost", "invalid", 1, "3 planned arrivals are lost"),
    ({"arrivals_lost": None}, "arrivals_unchecked", "degraded", 0, "could not be read again"),
    ({"arrivals_doubled": 2}, "arrivals_doubled", "invalid", 4, "2 arrivals of the schedule are on record more"),
    ({"arrivals_misplaced": 2}, "arrivals_misplaced", "invalid", 4, "2 arrivals are on record with another time"),
    ({"receive_lag_p99_ns": 12_000_000}, "receive_lag", "degraded", 0, "12 ms"),
    ({"user_stamp_share": 1.0, "loop_lag_p99_ns": 2_000_000}, "user_stamps", "degraded", 0, "2 ms late"),
    ({"user_stamp_share": 0.5, "loop_lag_p99_ns": 91_000_000}, "user_stamps", "invalid", 4, "91 ms late"),
    ({"user_stamp_share": 0.0101, "loop_lag_p99_ns": 91_000_000}, "user_stamps", "invalid", 4, "1.01 % of the"),
    # Few enough to move no percentile that anyone leans on.
    (
        {"user_stamp_share": 0.01, "loop_lag_p99_ns": 91_000_000},
        "user_stamps",
        "degraded",
        0,
        "1 % of the requests",
    ),
    ({"user_stamp_share": 0.0011, "loop_lag_p99_ns": 91_000_000}, "user_stamps", "degraded", 0, "0.11 % of the"),
    (
        {"slos_undecided": ("p99(tpot)<=1s", "p99(tpot)<=1s", "p50(itl)<=1s")},
        "slo_undecided",
        "degraded",
        3,
        "decides the SLO p99(tpot)<=1s, p50(itl)<=1s: it counts as missed",
    ),
    (
        {"capacity_unknown": "None of the 3 probes counts."},
        "capacity_unknown",
        "invalid",
        1,
        "The search says nothing of the capacity. None of the 3 probes counts.",
    ),
    ({"cpu_fraction_p95": 0.97}, "cpu_saturated", "degraded", 0, "Worker w1 used 97 %"),
    ({"run_delay_share": 0.5}, "run_delay", "degraded", 0, "50 % of the time"),
    ({"health_samples": 0}, "health_missing", "degraded", 0, "No worker reported"),
    ({"gc_pause_max_ns": 21_000_000}, "gc_pause", "degraded", 0, "21 ms"),
    ({"clock_step_max_ns": 2_000_000_000}, "clock_stepped", "degraded", 0, "2 s"),
    ({"clock_uncertainty_max_ns": 15_000_000}, "clock_uncertain", "degraded", 0, "±15 ms"),
    (
        {"telemetry_silence": {"b": 0.2, "a": 0.11, "c": 0.1}},
        "telemetry_missing",
        "degraded",
        0,
        "of a, b for up to 20 %",
    ),
    ({"stopped_early": "Ctrl-C"}, "stopped_early", "degraded", 0, "Ctrl-C"),
    ({"token_sources": ("usage", "chunks")}, "token_source_mixed", "degraded", 0, "chunks, usage"),
    ({"token_sources": ("chunks",)}, "tokens_are_chunks", "degraded", 0, "each chunk counts as one token"),
    (
        {"shifts": (shift(100, 98.9),)},
        "coalesced",
        "degraded",
        0,
        "p99 of ttft could be off by up to 1.1 ms (1.1 %",
    ),
    # 5 % of a gap of 5 ms is a quarter of a millisecond: it must be more than a millisecond too, or very much.
    ({"shifts": (shift(5, 4.7),)}, "coalesced", "degraded", 0, "300 µs (6 % of 5 ms)"),
    ({"shifts": (shift(5, 4),)}, "coalesced", "degraded", 0, "1 ms (20 % of 5 ms)"),
    ({"shifts": (shift(5, 3.99),)}, "coalesced", "invalid", 4, "1.01 ms (20.2 % of 5 ms)"),
    ({"shifts": (shift(1, 0.79),)}, "coalesced", "invalid", 4, "210 µs (21 % of 1 ms)"),
    ({"shifts": (shift(22, 20.9),)}, "coalesced", "degraded", 0, "1.1 ms (5 % of 22 ms)"),
    # In the words of a number, not of a computer.
    ({"shifts": (shift(0.3, 0.3, 3.3),)}, "coalesced", "invalid", 4, "3 ms (1,000 % of 300 µs)"),
    ({"shifts": (shift(1, 1, 20_001),)}, "coalesced", "invalid", 4, "20 s (2,000,000 % of 1 ms)"),
    ({"shifts": (shift(20, 20, 22),)}, "coalesced", "invalid", 4, "2 ms (10 % of 20 ms)"),
    # A millisecond of ten seconds is 0.01 %, and still more than a millisecond.
    ({"shifts": (shift(10_000, 9_998.9),)}, "coalesced", "degraded", 0, "1.1 ms (0.011 %"),
]
"""What changes in a clean run, the reason's code and the run's status, its exit code, and what is told of it."""


@pytest.mark.parametrize(("changes", "code", "status", "exits", "number"), REASONS)
def test_each_reason_alone(changes: dict[str, Any], code: str, status: str, exits: int, number: str) -> None:
    verdict = judge(Evidence(**{**CLEAN, **changes}))
    assert [reason.code for reason in verdict.reasons] == [code]
    assert verdict.status == status
    assert number in verdict.reasons[0].sentence
    assert verdict.reasons[0].sentence.endswith(".")
    assert exit_code(verdict, slo_missed=False) == exits


MISSED: list[tuple[str, dict[str, Any]]] = [
    ("rate_missed", {"sent_in_time": 940}),
    ("stage_rate", {"deliveries": (delivery("a"), delivery("b", sent=900))}),
    ("arrival_process", {"deliveries": (delivery("b", cv=1.51),)}),
]


@pytest.mark.parametrize(("code", "changes"), MISSED)
@pytest.mark.parametrize(
    ("lag_ms", "wait_ms", "dropped", "excused"),
    [
        (10, 9_000, 0, True),
        (90, 91, 0, True),
        (90, 89, 0, False),
        (101, 9_000, 0, False),
        (101, 0, 60, False),
        (5, 10, 0, False),
        (5, 0, 11, True),
        (5, 0, 10, False),
    ],
)
def test_slots_that_were_full_excuse_a_load_unless_the_generator_was_late(
    code: str, changes: dict[str, Any], lag_ms: int, wait_ms: int, dropped: int, excused: bool
) -> None:
    times = {"generator_lag_p99_ns": lag_ms * 1e6, "slot_wait_p99_ns": wait_ms * 1e6, "arrivals_dropped": dropped}
    reasons = {reason.code: reason for reason in judge(Evidence(**CLEAN | changes | times)).reasons}
    assert reasons[code].severity == ("degraded" if excused else "invalid")
    assert reasons[code].sentence.endswith("Every slot was busy: raise -u.") is excused
    assert reasons[code].by_full_slots is excused
    assert ("slots_full" in reasons) == (wait_ms > 10)
    assert ("schedule_lag" in reasons) == (lag_ms > 10)


def test_every_reason_that_there_is_has_its_case_above() -> None:
    texts = (Path(module.__file__ or "").read_text(encoding="utf-8") for module in (judge_module, delivered_load))
    codes = {code for text in texts for code in re.findall(r'Reason\(\s*"(\w+)"', text)}
    assert len(codes) > 20
    assert codes == {code for _, code, *_ in REASONS}


@pytest.mark.parametrize(
    ("cpu", "delay", "cause"),
    [
        (0.71, 0.3, "the load was more than the worker processes could read in time (CPU p95 71 %), add some."),
        (0.70, 0.06, "something else took the core from a worker for 6 % of the time."),
        (0.70, 0.05, "most likely sent chunks in bursts, or the server's own process was not given a core."),
        (0.10, None, "most likely sent chunks in bursts, or the server's own process was not given a core."),
        (None, None, "no worker reported its condition in the window, so the cause is not known."),
    ],
)
def test_the_likely_cause_of_coalesced_chunks_is_named(cpu: float | None, delay: float | None, cause: str) -> None:
    changes = {"cpu_fraction_p95": cpu, "run_delay_share": delay, "coalesced_share": None, "shifts": (shift(20, 10),)}
    sentence = next(r.sentence for r in judge(Evidence(**{**CLEAN, **changes})).reasons if r.code == "coalesced")
    assert sentence.endswith(cause)


def test_the_shift_that_makes_a_run_invalid_is_told_before_a_larger_share_that_does_not() -> None:
    shifts = (shift(4, 3.25), shift(100, 94, metric="e2e"))
    (reason,) = judge(Evidence(**{**CLEAN, "shifts": shifts})).reasons
    assert reason.severity is Status.INVALID
    assert "p99 of e2e could be off by up to 6 ms (6 % of 100 ms)" in reason.sentence


def test_a_shift_below_the_proven_error_of_a_stamp_is_none() -> None:
    # 50 µs of 0.1 ms are 50 %, and yet no more than stamps are off anyway.
    assert judge(Evidence(**{**CLEAN, "shifts": (shift(0.1, 0.05),)})).status is Status.VALID


def test_the_worst_shift_is_the_one_told() -> None:
    shifts = (shift(100, 98, percentile="p50"), shift(20, 10, metric="itl", percentile="p99_9"), shift(50, 49.9))
    (reason,) = judge(Evidence(**{**CLEAN, "shifts": shifts})).reasons
    assert "p99.9 of itl could be off by up to 10 ms (50 % of 20 ms)" in reason.sentence
    assert reason.value == 0.5


def test_what_makes_it_invalid_comes_first_then_what_fails_the_run() -> None:
    """The first line of a report shows the status and the first reason: the one must explain the other."""
    evidence = Evidence(**{**CLEAN, "cpu_fraction_p95": 1.0, "generator_lag_p99_ns": 1e9, "failed": 500})
    verdict = judge(evidence)
    assert [reason.code for reason in verdict.reasons] == ["schedule_lag", "too_many_failures", "cpu_saturated"]
    assert verdict.status is Status.INVALID
    assert exit_code(verdict, slo_missed=True) == 1


def test_an_invalid_measurement_comes_before_a_missed_slo() -> None:
    verdict = judge(Evidence(**{**CLEAN, "generator_lag_p99_ns": 1e9}))
    assert exit_code(verdict, slo_missed=True) == 4


def test_the_extreme_percentile_alone_makes_no_run_invalid() -> None:
    for percentile, status in (("p99", "invalid"), ("p99_9", "degraded")):
        found = judge(Evidence(**CLEAN | {"shifts": (shift(40, 20, percentile=percentile),)}))
        assert found.status == status, percentile


@pytest.mark.parametrize(
    "changes",
    [
        # One stage is the whole window, of which rate_missed speaks.
        {"deliveries": (delivery("a", sent=900),)},
        # A request or two at the edges of a short stage.
        {"deliveries": (delivery("a"), delivery("b", planned=20, sent=18))},
        {"deliveries": (delivery("a", hold=False, cv=3.0),)},
        {"deliveries": (delivery("a", planned=99, sent=99, cv=3.0),)},
        # Sent within a millisecond, and the gaps are small.
        {"deliveries": (delivery("a", cv=3.0),), "generator_lag_p99_ns": 1_000_000},
        {"deliveries": (Delivery(stage="a", is_hold=True, planned=0, sent=9, planned_gap_cv=None, sent_gap_cv=1.0),)},
    ],
)
def test_a_load_that_could_not_have_moved_a_number_is_no_reason(changes: dict[str, Any]) -> None:
    assert judge(Evidence(**(CLEAN | changes))).status is Status.VALID
