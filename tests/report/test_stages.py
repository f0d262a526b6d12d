"""What a summary and its pages say of stages in an open loop: delivery, steady state, overload, time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.queueing import Visits, visits
from tests.report.rows import BASE, SECOND, batch, health, health_row, interval, ns, request, run
from vllm_locust.arrival import ArrivalProcess, Piece, Schedule
from vllm_locust.report.html import render_html
from vllm_locust.report.summary import summarize
from vllm_locust.report.text import WIDTH, render_text

POISSON = Schedule(ArrivalProcess.POISSON, seed=1, pieces=[Piece(SECOND, 1.0, 1.0)]).to_json()


def rows_of(seen: Visits, start: float, stage: int | None, phase: str = "window") -> list[dict[str, Any]]:
    """Each waits for its place before its first token and streams until it leaves it."""
    mine = seen.arrived >= 0
    return [
        request(
            start + at,
            [began - at + 0.02, max(ended - at, began - at + 0.03)],
            [1, 9],
            scheduled=start + at,
            stage=stage,
            phase=phase,
            request_id=f"{stage}/{at}",
        )
        for at, began, ended in zip(seen.arrived[mine], seen.began[mine], seen.ended[mine], strict=True)
    ]


def server(load: float, length_s: float = 30, seed: int = 1) -> Visits:
    """20 requests/s are all that it can do."""
    return visits(seed, load=load, places=10, service_s=0.5, length_s=length_s)


def open_loop(stages: list[tuple[str, float, float]], **keys: Any) -> dict[str, Any]:
    listed = [
        {"stage": n, "name": name, "stage_kind": "hold", **interval(start, end)}
        for n, (name, start, end) in enumerate(stages)
    ]
    told = {"arrivals": {"planned": 0, "dropped": 0, "lost": 0, "doubled": 0, "misplaced": 0}, "schedule": POISSON}
    return run(stages[0][1], stages[-1][2], ("ttft<=1s",), stages=listed, **(told | keys))


def classic() -> dict[str, Any]:
    """10, 20 and 30 requests/s, with time between them to get rid of the queue."""
    rows = [row for n, load in enumerate((0.5, 0.95, 1.5)) for row in rows_of(server(load), 100 * n, n)]
    facts = open_loop([("10/s", 0, 30), ("19/s", 100, 130), ("30/s", 200, 230)])
    return summarize(facts, [batch(rows)])


def test_the_classic_picture_of_overload() -> None:
    summary = classic()
    low, high, beyond = summary["stages"]
    assert [stage["overloaded"] for stage in summary["stages"]] == [False, False, True]
    assert (low["steady"], beyond["steady"]) == (True, False)
    assert beyond["offered_rps"] == pytest.approx(30, rel=0.1)
    assert beyond["requests_per_s"] == pytest.approx(20, rel=0.1)
    assert beyond["ttft_from_schedule_s"]["p99"] > 20 * low["ttft_from_schedule_s"]["p99"]
    assert beyond["goodput_rps"] < 0.5 * low["goodput_rps"] < low["goodput_rps"] < high["goodput_rps"]
    assert "more arrived than were finished" in beyond["overload"]
    assert low["in_flight"]["mean"] == pytest.approx(5, rel=0.2)
    # The judgement is of stages: a window over several loads has no steady state of its own.
    assert (summary["totals"]["steady"], summary["totals"]["overloaded"]) == (None, None)


def test_the_pages_show_stages_beneath_each_other_and_what_was_wrong_with_them() -> None:
    summary = classic()
    page = render_text(summary)
    assert page.startswith("VALID: ")
    assert max(len(line) for line in page.split("\n")) <= WIDTH
    lines = [line.split() for line in page.split("\n")]
    assert next(line for line in lines if line[:1] == ["10/s"])[-2:] == ["yes", "no"]
    assert next(line for line in lines if line[:1] == ["30/s"])[-2:] == ["NO", "YES"]
    told = " ".join(page.split())
    assert "- stage 30/s is overloaded: " in told
    assert "TTFT in the table of stages counts from the schedule" in told
    html = render_html(summary, run())
    assert "stage 30/s is overloaded: " in html
    assert html.count('<td class="missed">') == 2


def test_a_steady_window_says_so_in_one_column() -> None:
    page = render_text(summarize(open_loop([("10/s", 0, 30)]), [batch(rows_of(server(0.5), 0, 0))]))
    assert "STAGES" not in page
    words = [line.split() for line in page.split("\n")]
    assert ["steady", "yes"] in words
    assert ["overloaded", "no"] in words


def test_a_queue_at_the_client_is_shown_side_by_side() -> None:
    """One slot, half a second of service, ten requests a second: the coordinated-omission case."""
    rows = [request(0.5 * k, [0.4, 0.5], [1, 1], scheduled=0.1 * k, slot_wait=0.4 * k) for k in range(100)]
    summary = summarize(open_loop([("10/s", 0, 10)]), [batch(rows)])
    (stage,) = summary["stages"]
    assert stage["ttft_s"]["p99"] == pytest.approx(0.4)
    assert stage["schedule_lag_s"]["p99"] == pytest.approx(0.4 * 98)
    assert stage["ttft_from_schedule_s"]["p99"] == pytest.approx(0.4 * 98 + 0.4)
    assert stage["in_flight"] == {"mean": pytest.approx(1), "max": 1}
    assert stage["overloaded"] is True
    assert "most of them waiting for a free slot (-u)" in stage["overload"]
    page = render_text(summary)
    labels = [line[2:22].strip() for line in page[page.index("LATENCY") :].split("\n")[2:8]]
    assert labels == ["TTFT", "TTFT from schedule", "schedule lag", "TPOT", "ITL", "E2E"]
    assert "requests waited up to 39.2 s (p99) before they were sent" in " ".join(page.split())
    assert "slots_full" in [reason["code"] for reason in summary["verdict"]["reasons"]]


def verdict_of(rows: list[dict[str, Any]]) -> dict[str, str]:
    reasons = summarize(open_loop([("10/s", 0, 10)]), [batch(rows)])["verdict"]["reasons"]
    return {reason["code"]: reason["severity"] for reason in reasons}


def test_one_moment_with_every_slot_busy_excuses_no_late_generator() -> None:
    rows = [request(0.1 * k + 0.3, [0.05], [1], scheduled=0.1 * k) for k in range(99)]
    rows.append(request(10.3, [0.05], [1], scheduled=9.9, slot_wait=0.4))
    assert verdict_of(rows) == {"schedule_lag": "invalid", "rate_missed": "invalid"}


def test_the_slots_of_one_worker_of_many_are_full() -> None:
    """Seven workers have slots to spare, and the eighth has one that is busy for 2 s."""
    rows = []
    for k in range(100):
        wait = 1.2 * (k // 8) if k % 8 == 7 else 0.0
        rows.append(request(0.1 * k + wait, [0.05], [1], scheduled=0.1 * k, slot_wait=wait, worker_id=f"w{k % 8}"))
    assert verdict_of(rows) == dict.fromkeys(("slots_full", "rate_missed", "arrival_process"), "degraded")


def test_what_was_never_sent_waited_for_a_slot_too() -> None:
    rows = [request(0.1 * k, [0.05], [1], scheduled=0.1 * k) for k in range(90)]
    given_up: dict[str, Any] = {"outcome": "censored", "attempts": 0, "schedule_lag_ns": None}
    rows += [request(20, scheduled=0.1 * k, slot_wait=20 - 0.1 * k, **given_up) for k in range(90, 100)]
    found = verdict_of(rows)
    assert (found["slots_full"], found["rate_missed"]) == ("degraded", "degraded")
    assert "schedule_lag" not in found


def test_an_arrival_that_was_never_sent_counts_in_the_queue_alone() -> None:
    given_up = request(30, scheduled=2, outcome="censored", attempts=0)
    (stage,) = summarize(open_loop([("a", 0, 10)]), [batch([request(1, [1], [1], scheduled=1), given_up])])["stages"]
    assert stage["achieved_rps"] == pytest.approx(0.1)
    assert stage["delivery"] == {
        "planned": 2,
        "sent": 1,
        "achieved_fraction": 0.5,
        "process_gap_cv": 1.0,
        "planned_gap_cv": None,
        "sent_gap_cv": None,
    }
    assert stage["in_flight"]["max"] == 1


def missed(times: list[float]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"scheduled_unix_ns": [BASE + ns(at) for at in times]})


def test_delivery_is_held_against_all_that_was_planned() -> None:
    even = [request(10 + k, [0.5], [1], scheduled=10 + k) for k in range(10) if k not in (3, 7)]
    stages = [{"stage": 0, "name": "a", "stage_kind": "hold", "dropped_arrivals": 2, **interval(10, 20)}]
    facts = open_loop([("a", 10, 20)]) | {"stages": stages}
    (stage,) = summarize(facts, [batch(even)], missed_arrivals=[missed([13, 17])])["stages"]
    assert stage["delivery"]["planned"] == stage["planned_arrivals"] == 10
    assert stage["delivery"]["sent"] == 8
    assert stage["delivery"]["planned_gap_cv"] == 0
    gaps = [1, 1, 2, 1, 1, 2, 1]
    assert stage["delivery"]["sent_gap_cv"] == pytest.approx(np.std(gaps) / np.mean(gaps))


def test_what_a_task_sends_after_its_arrivals_request_is_in_no_plan() -> None:
    """Two requests a task, in two stages: all of the plan was sent, and nothing else was planned."""
    firsts = [request(k, [0.1], [1], scheduled=k, stage=k // 10) for k in range(20)]
    more = [request(k + 0.5, [0.1], [1], stage=k // 10) for k in range(20)]
    summary = summarize(open_loop([("a", 0, 10), ("b", 10, 20)]), [batch(firsts + more)])
    assert [(stage["delivery"]["planned"], stage["delivery"]["sent"]) for stage in summary["stages"]] == [(10, 10)] * 2
    assert [stage["achieved_rps"] for stage in summary["stages"]] == [2, 2]
    assert summary["stages"][0]["delivery"]["sent_gap_cv"] == 0
    assert summary["verdict"] == {"status": "valid", "reasons": []}


def test_a_workers_schedule_lag_is_that_of_sending_whenever_it_sent() -> None:
    """What belongs to the window may be sent in the drain; what is due after it does not count."""
    rows = [
        request(11, [1], [1], scheduled=10.5),
        request(12, [1], [1], scheduled=12, worker_id="w2"),
        request(35, [1], [1], scheduled=15),
        request(90, [1], [1], scheduled=21, phase="drain"),
        request(95, scheduled=19, outcome="censored", attempts=0, schedule_lag_ns=None),
        request(13, [1], [1]),
    ]
    workers = [health([health_row(11, worker_id=name, schedule_lag_max_ns=9) for name in ("w1", "w2", "w3")])]
    told = summarize(open_loop([("a", 10, 20)]), [batch(rows)], workers=workers)["health"]["workers"]
    assert {one["worker_id"]: one["schedule_lag_max_s"] for one in told} == {"w1": 20, "w2": 0, "w3": None}


def test_a_closed_loop_has_no_delivery_and_no_overload() -> None:
    rows = [request(0.25 * k, [0.1, 0.2], [1, 1]) for k in range(400)]
    (stage,) = summarize(run(0, 100), [batch(rows)])["stages"]
    assert (stage["delivery"], stage["overloaded"], stage["steady"]) == (None, None, True)


def test_a_ramp_is_not_judged() -> None:
    stages = [{"stage": 0, "name": "ramp", "stage_kind": "ramp", **interval(0, 30)}]
    (stage,) = summarize(open_loop([("ramp", 0, 30)]) | {"stages": stages}, [batch(rows_of(server(1.5), 0, 0))])[
        "stages"
    ]
    assert (stage["steady"], stage["overloaded"], stage["trend"]) == (
        None,
        None,
        {"in_system": None, "latency_s": None},
    )


def test_lost_doubled_and_misplaced_arrivals_reach_the_verdict() -> None:
    arrivals = {"planned": 1, "dropped": 0, "lost": 1, "doubled": 2, "misplaced": 3}
    summary = summarize(open_loop([("a", 10, 20)], arrivals=arrivals), [batch([request(11, [1], [1], scheduled=11)])])
    codes = {reason["code"] for reason in summary["verdict"]["reasons"]}
    assert {"arrivals_lost", "arrivals_doubled", "arrivals_misplaced"} <= codes
    assert summary["arrivals"] == arrivals


def test_goodput_over_time_in_slices_that_keep_to_their_stage() -> None:
    # A good request each second up to 15 s, then a bad one each second.
    rows = [request(k, [0.5 if k < 15 else 2.0], [10], stage=0 if k < 10 else 1) for k in range(40)]
    stages = [
        {"stage": 0, "name": "a", "stage_kind": "hold", **interval(0, 10)},
        {"stage": 1, "name": "b", "stage_kind": "hold", **interval(10, 40)},
    ]
    told = summarize(run(0, 40, ("ttft<=1s",), stages=stages), [batch(rows)])["over_time"]
    assert len(told["start_s"]) == 20
    assert told["start_s"][:6] == [0, 2, 4, 6, 8, 10]
    assert told["length_s"] == pytest.approx([2] * 20)
    assert told["achieved_rps"] == pytest.approx([1] * 20)
    assert told["goodput_rps"] == pytest.approx([1] * 7 + [0.5] + [0] * 12)
    assert told["good_fraction"][6:9] == pytest.approx([1, 0.5, 0])
    assert told["in_flight"][:2] == pytest.approx([0.5, 0.5])
    assert told["in_flight"][-1] == pytest.approx(2)
    assert told["output_tokens_per_s"][0] == pytest.approx(10)


def test_over_time_without_an_slo_or_a_window() -> None:
    told = summarize(run(10, 20), [batch([request(11, [1], [1])])])["over_time"]
    assert set(told["goodput_rps"]) == set(told["good_fraction"]) == {None}
    assert summarize(run(window=None), [batch([])])["over_time"] is None


def cold(first: list[float], rest: float) -> dict[str, Any] | None:
    warmup = [request(k / 10, [ttft], [1], phase="warmup") for k, ttft in enumerate(first)]
    rows = [request(10 + k / 10, [rest], [1]) for k in range(100)]
    told: dict[str, Any] | None = summarize(run(10, 20), [batch(warmup + rows)])["cold_start"]
    return told


def test_a_cold_start_is_shown_where_it_matters() -> None:
    # At 0.3 s after ten a second, three are in flight: three users.
    told = cold([1.0, 0.8, 0.6, 0.3, 0.3], 0.3)
    assert told is not None
    assert (told["requests"], told["ttft_mean_s"], told["ttft_max_s"]) == (3, pytest.approx(0.8), 1.0)
    assert (told["window_ttft_p50_s"], told["matters"]) == (pytest.approx(0.3), True)
    assert told["ratio"] == pytest.approx(0.8 / 0.3)
    warm, quick = cold([0.35] * 5, 0.3), cold([0.015] * 5, 0.005)
    assert warm is not None
    assert quick is not None
    assert (warm["matters"], quick["matters"]) == (False, False)
    assert cold([], 0.3) is None
    page = render_text(summarize(run(10, 20), [batch([request(1, [2], [1], phase="warmup"), request(11, [0.1], [1])])]))
    words = " ".join(page.split())
    assert words.count("cold start: TTFT of the first") == 1, "the diagnosis says it, and no remark again"
    assert "cold start: TTFT of the first 1 requests of the warm-up was 2 s on average, and 100 ms (p50)" in words
