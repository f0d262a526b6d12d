"""Figures of a run that goes on: rates, percentiles, and what a worker that begins anew does to them."""

from __future__ import annotations

import pytest

from tests.test_aggregate import Request, of
from vllm_locust.aggregate import RunAggregate
from vllm_locust.live.figures import LATENCIES, RECENT_NS, Recent, latency_table, outcomes, totals, worker_row
from vllm_locust.metrics import CATALOGUE
from vllm_locust.outcome import Outcome

SECOND = 1_000_000_000
MS = 1_000_000


def asked(count: int, ttft_ms: int = 10, outcome: Outcome = Outcome.OK) -> list[Request]:
    request = Request(
        outcome=outcome,
        ttft_ns=ttft_ms * MS,
        e2e_ns=100 * MS,
        chunk_ns=[ttft_ms * MS, 100 * MS],
        chunk_tokens=[1, 4],
        prompt_tokens=7,
        output_tokens=5,
        schedule_lag_ns=2 * MS,
        slot_wait_ns=MS,
    )
    return [request] * count


def test_rates_are_of_the_last_five_seconds() -> None:
    recent, everything = Recent(), list[Request]()
    point = recent.figures(0, RunAggregate())
    assert "achieved_rps" not in point
    for second in range(1, 21):
        everything += asked(10 if second <= 10 else 30, ttft_ms=10 if second <= 10 else 50)
        point = recent.figures(second * SECOND, of(everything))
        if second == 10:
            assert point["achieved_rps"] == pytest.approx(10)
            assert point["ttft_p50_s"] == pytest.approx(0.010, rel=0.006)
    assert RECENT_NS == 5 * SECOND
    assert point["achieved_rps"] == point["requests_per_s"] == pytest.approx(30)
    assert point["output_tokens_per_s"] == pytest.approx(150)
    assert point["input_tokens_per_s"] == pytest.approx(210)
    assert point["ttft_p99_s"] == pytest.approx(0.050, rel=0.011)
    assert point["goodput_rps"] is None, "no SLO judged anything"
    assert point["failures_per_s"] == {}


def test_failures_are_told_by_outcome() -> None:
    recent = Recent()
    recent.figures(0, RunAggregate())
    requests = asked(4) + asked(6, outcome=Outcome.HTTP_ERROR) + asked(2, outcome=Outcome.TIMEOUT_IDLE)
    assert recent.figures(2 * SECOND, of(requests))["failures_per_s"] == {"http_error": 3.0, "timeout_idle": 1.0}
    assert outcomes(of(requests)) == {"http_error": 6, "ok": 4, "timeout_idle": 2}
    assert totals(of(requests))["failed"] == 8


def test_a_worker_that_begins_anew_makes_no_negative_rates() -> None:
    recent = Recent()
    recent.figures(0, of(asked(50)))
    assert "achieved_rps" not in recent.figures(SECOND, of(asked(20)))
    assert recent.figures(2 * SECOND, of(asked(30)))["achieved_rps"] == pytest.approx(10)


def test_the_table_has_what_was_measured_and_names_of_the_catalogue() -> None:
    rows = {row["metric"]: row for row in latency_table(of(asked(100)))}
    assert set(rows) == set(LATENCIES) - {"receive_lag"}
    assert set(LATENCIES) <= set(CATALOGUE)
    assert rows["itl"]["n"] == 400
    assert rows["ttft"]["p99_9_s"] == pytest.approx(0.01, rel=0.006)
    assert rows["schedule_lag"]["mean_s"] == pytest.approx(0.002)
    assert latency_table(RunAggregate()) == []


def test_a_worker_of_which_nothing_is_known_has_no_numbers() -> None:
    row = worker_row("w", RunAggregate(), None)
    assert row["cpu_fraction"] is row["ttft_p99_s"] is row["loop_lag_s"] is None
