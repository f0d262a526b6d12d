"""A probe as the workers tell of it, against counts made by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from vllm_locust.aggregate import RunAggregate
from vllm_locust.capacity.probe import ProbeResult
from vllm_locust.outcome import Outcome
from vllm_locust.run.capacity.live_probe import LiveProbe
from vllm_locust.slo import parse_slos

MS = 1_000_000
SLOS = parse_slos(["ttft<=1s", "p90(ttft)<=1s", "good_fraction>=0.9", "failed_fraction<=0.05", "p99(chunk_gap)<=100ms"])


@dataclass
class Ended:
    """One request, as an aggregate sees it."""

    ttft_ns: int | None
    outcome: Outcome = Outcome.OK
    e2e_ns: int | None = 2_000 * MS
    schedule_lag_ns: int | None = 0
    slot_wait_ns: int | None = 0
    receive_lag_max_ns: int | None = None
    chunk_ns: list[int] = field(default_factory=list)
    chunk_tokens: list[int] | None = None
    prompt_tokens: int | None = 10
    output_tokens: int | None = 20
    coalesced: int = 0
    chunk_width_ns: list[int] | None = None


def observe(stage: RunAggregate, request: Ended) -> None:
    stage.request_sent()
    good = request.outcome is Outcome.OK and request.ttft_ns is not None and request.ttft_ns <= 1_000 * MS
    stage.observe(request, good)


def ended(stage: RunAggregate, due: int | None, live: LiveProbe) -> ProbeResult:
    return live.result(stage, window_s=10.0, elapsed_s=15.0, due=due, ended_early=False)


def test_counts_by_batches_in_order_of_time() -> None:
    live, stage = LiveProbe(10, SLOS, open_loop=True), RunAggregate()
    for second in range(10):
        for number in range(10):
            slow = second >= 8 and number < 5
            observe(stage, Ended(1_500 * MS if slow else 500 * MS, chunk_ns=[500 * MS, 550 * MS, 750 * MS]))
        live.look(second + 1.0, stage, stage, None, in_window=True)
    result = ended(stage, 100, live)
    ttft, good, failed, gaps = result.slos
    assert ttft.samples == good.samples == (10,) * 10
    assert ttft.beyond == good.beyond == (0,) * 8 + (5, 5)
    assert ttft.allowed == pytest.approx(0.1)
    assert (ttft.met, good.met, failed.met) == (True, True, True)
    assert (sum(gaps.beyond), sum(gaps.samples), gaps.met) == (100, 200, False)
    assert ttft.value == pytest.approx(0.5, rel=0.005)
    assert good.value == 0.9
    assert (result.requests, result.achieved, result.completed_rps) == (100, 10, 10)
    assert result.latency_s == pytest.approx(2.0, rel=0.005)
    assert result.figures["output_tokens_per_s"] == 200
    assert result.figures["goodput_rps"] == 9


def test_what_was_not_answered_is_missed() -> None:
    live, stage = LiveProbe(10, SLOS, open_loop=True), RunAggregate()
    for _ in range(80):
        observe(stage, Ended(500 * MS))
    for _ in range(5):
        observe(stage, Ended(None, Outcome.HTTP_ERROR, e2e_ns=None))
    result = ended(stage, 100, live)
    ttft, good, failed, gaps = result.slos
    assert [(sum(one.beyond), sum(one.samples)) for one in (ttft, good, failed)] == [(20, 100)] * 3
    assert result.requests == 100
    assert ttft.value is None, "the percentile falls on one that has no first token"
    assert good.value == 0.8
    assert failed.value == pytest.approx(0.2)
    assert gaps.met is None, "no answer had gaps"
    assert result.held is False


def test_in_a_closed_loop_what_is_in_flight_is_missed() -> None:
    live, stage = LiveProbe(4, SLOS, open_loop=False), RunAggregate()
    for _ in range(3):
        observe(stage, Ended(500 * MS))
    stage.request_sent()
    result = ended(stage, None, live)
    assert (result.achieved, result.requests, sum(result.slos[0].beyond)) == (4, 4, 1)


def test_a_clear_miss_is_seen_before_the_end() -> None:
    live, stage = LiveProbe(10, SLOS, open_loop=True), RunAggregate()
    assert not live.surely_missed(100)
    for _ in range(29):
        observe(stage, Ended(1_500 * MS))
    live.look(3.0, stage, stage, None, in_window=True)
    assert not live.surely_missed(100)
    for _ in range(2):
        observe(stage, Ended(1_500 * MS))
    live.look(4.0, stage, stage, None, in_window=True)
    assert live.surely_missed(100), "31 of 100, where 10 are allowed"


def test_a_generator_that_was_late_is_no_server_that_was_slow() -> None:
    live, stage = LiveProbe(10, SLOS, open_loop=True), RunAggregate()
    observe(stage, Ended(500 * MS, schedule_lag_ns=150 * MS))
    live.look(1.0, stage, stage, None, in_window=True)
    fault = live.fault(stage, None, 0)
    assert fault is not None
    assert "after they were due; add workers" in fault
    stage = RunAggregate()
    observe(stage, Ended(500 * MS, schedule_lag_ns=150 * MS, slot_wait_ns=149 * MS))
    assert live.fault(stage, None, 1) is None, "what waited for a slot, before the window, was not late"


def test_a_queue_that_grows_ends_the_probe() -> None:
    live, stage = LiveProbe(20, SLOS, open_loop=True), RunAggregate()
    for second in range(60):
        for _ in range(20):
            stage.request_sent()
        for _ in range(10):
            stage.observe(Ended(500 * MS), True)
        live.look(float(second), stage, stage, 3.0, in_window=True)
        if live.overload is not None:
            break
    assert live.overload is not None
    assert live.overload.startswith("queue grows: in flight rose from 10 to ")
    closed = LiveProbe(20, SLOS, open_loop=False)
    for second in range(60):
        stage.in_flight += 10
        closed.look(float(second), stage, stage, None, in_window=True)
    assert closed.overload is None


def test_arrivals_that_no_worker_has_are_lost() -> None:
    live, stage = LiveProbe(10, SLOS, open_loop=True), RunAggregate()
    observe(stage, Ended(500 * MS))
    stage.request_sent()
    stage.dropped_arrivals = 1
    assert live.fault(stage, 4, 2) is None, "one answered, one in flight, one dropped, one waits for a slot"
    assert live.fault(stage, 6, 2) == "2 of its arrivals are lost: a worker has gone"


@pytest.mark.parametrize(("dropped", "words"), [(0, "busy; raise -u"), (3, "busy, and 3 arrivals were dropped; raise")])
def test_a_probe_without_a_free_slot_says_nothing(dropped: int, words: str) -> None:
    live, stage = LiveProbe(20, SLOS, open_loop=True), RunAggregate(dropped_arrivals=dropped)
    stage.waiting_arrivals = 0 if dropped else 1
    for second in range(60):
        for _ in range(20):
            stage.request_sent()
        for _ in range(10):
            stage.observe(Ended(500 * MS), True)
        live.look(float(second), stage, stage, 3.0, in_window=True)
    assert (live.is_over, live.overload) == (True, None), "the queue is the generator's"
    fault = live.fault(stage, None, 0)
    assert fault is not None
    assert words in fault


def with_full_slots(ttft_ns: int, *slos: str) -> LiveProbe:
    live, stage = LiveProbe(20, parse_slos(slos), open_loop=True), RunAggregate()
    for second in range(3):
        for _ in range(20):
            observe(stage, Ended(ttft_ns, schedule_lag_ns=5_000 * MS, slot_wait_ns=5_000 * MS))
        stage.waiting_arrivals = 5
        live.look(float(second), stage, stage, None, in_window=True)
    live.judge_full_slots(stage)
    return live


def test_a_server_that_is_too_slow_for_less_than_the_load_is_too_slow_for_the_load() -> None:
    live = with_full_slots(1_500 * MS, "p90(ttft)<=1s")
    assert live.overload == "every slot was busy, and of the requests that had one 100 % missed p90(ttft)<=1s"
    assert live.is_over
    assert live.fault(RunAggregate(), None, 0) is None
    assert ended(RunAggregate(), None, live).held is False


@pytest.mark.parametrize(
    ("ttft_ns", "slos"),
    [
        (500 * MS, ("p90(ttft)<=1s",)),
        (1_500 * MS, ("p90(ttft_from_schedule)<=1s",)),
        (1_500 * MS, ("ttft_from_schedule<=1s", "good_fraction>=0.9")),
    ],
)
def test_a_wait_for_a_slot_is_not_the_servers(ttft_ns: int, slos: tuple[str, ...]) -> None:
    live = with_full_slots(ttft_ns, *slos)
    assert (live.slots_full, live.overload) == (True, None)


def test_slots_that_an_overloaded_server_fills_say_nothing_against_a_miss() -> None:
    live, stage = LiveProbe(20, SLOS, open_loop=True), RunAggregate()
    for second in range(60):
        for _ in range(20):
            stage.request_sent()
        for _ in range(10):
            stage.observe(Ended(500 * MS), True)
        stage.waiting_arrivals = 5 if live.overload else 0
        live.look(float(second), stage, stage, 3.0, in_window=True)
    assert live.overload is not None
    assert live.fault(stage, None, 0) is None
    assert ended(stage, None, live).held is False


def test_a_server_that_is_gone_is_no_slow_one() -> None:
    live, stage = LiveProbe(10, SLOS, open_loop=True), RunAggregate()
    for second in range(10):
        for _ in range(2):
            lost = second >= 5
            observe(stage, Ended(None, Outcome.CONNECT_ERROR, e2e_ns=None) if lost else Ended(500 * MS))
        live.look(float(second), stage, stage, None, in_window=True)
        assert (live.server.gone is not None) is (second >= 8), second
    assert live.is_over
    assert live.fault(stage, 20, 0) == "the server could not be reached, and 10 requests got no connection"


def test_a_server_that_refuses_some_connections_is_there() -> None:
    live, stage = LiveProbe(10, SLOS, open_loop=True), RunAggregate()
    for second in range(20):
        for number in range(10):
            refused = number > 0 or second % 3 > 0
            observe(stage, Ended(None, Outcome.CONNECT_ERROR, e2e_ns=None) if refused else Ended(500 * MS))
        live.look(float(second), stage, stage, None, in_window=True)
    assert live.fault(stage, 200, 0) is None
    assert ended(stage, 200, live).held is False
