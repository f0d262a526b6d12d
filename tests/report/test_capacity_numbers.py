"""What a summary and its pages say of a search: probes judged by every request, and what that does to the exit code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.queueing import Visits, visits
from tests.report.rows import batch, health, health_row, interval, request, run
from vllm_locust.arrival import ArrivalProcess, Piece, Schedule
from vllm_locust.capacity.probe import ProbeResult, SloCount
from vllm_locust.capacity.record import RecordedProbe, SearchRecord, final_json
from vllm_locust.capacity.search import CapacitySettings
from vllm_locust.load_profile import Quantity
from vllm_locust.report.capacity_text import capacity_sentences
from vllm_locust.report.html import render_html
from vllm_locust.report.summary import summarize
from vllm_locust.report.text import WIDTH, render_text

SLO = "p90(ttft)<=500ms"
GAPS = "p99(chunk_gap)<=900ms"
POISSON = Schedule(ArrivalProcess.POISSON, seed=1, pieces=[Piece(10**9, 1.0, 1.0)]).to_json()
LENGTH_S = 60.0


def rows_of(seen: Visits, start: float, stage: int, late_s: float = 0.0) -> list[dict[str, Any]]:
    mine = seen.arrived >= 0
    return [
        request(
            start + at + late_s,
            [began - at + 0.02, max(ended - at, began - at + 0.03)],
            [1, 9],
            scheduled=start + at,
            stage=stage,
            request_id=f"{stage}/{at}",
        )
        for at, began, ended in zip(seen.arrived[mine], seen.began[mine], seen.ended[mine], strict=True)
    ]


def live(load: float, stage: int | None, beyond: int = 0, *, run_id: str = "run-1") -> RecordedProbe:
    """As the histograms had it: with counts that are not those of the rows, so that one sees which are told."""
    counts = [
        SloCount(slo=SLO, allowed=0.1, beyond=(beyond,), samples=(1000,), value=9.0, limit=0.5),
        SloCount(slo=GAPS, allowed=0.01, beyond=(3,), samples=(1000,), value=9.0, limit=0.9),
    ]
    result = ProbeResult(
        load=load,
        achieved=load,
        window_s=LENGTH_S,
        elapsed_s=70.0,
        requests=1000,
        completed_rps=load,
        latency_s=1.0,
        slos=tuple(counts),
    )
    return RecordedProbe(run_id=run_id, stage=stage, result=result)


def searched(*probes: RecordedProbe, **settings: Any) -> dict[str, Any]:
    asked = {"start_load": 10.0, "min_load": 1.0, "budget_s": 300.0, "max_probes": 3, **settings}
    record = SearchRecord(run_id="run-1", settings=CapacitySettings(quantity=Quantity.RATE, **asked), terms={})
    record.probes += probes
    return record.to_json()


def summary(
    loads: list[float],
    search: dict[str, Any],
    *,
    late: int | None = None,
    waited: int | None = None,
    failing: int | None = None,
    refused: int | None = None,
    dropped: tuple[int, int] = (-1, 0),
) -> dict[str, Any]:
    """A server of ten places of 0.5 s: 20 requests/s are all that it can do. ``late`` and the like name a stage."""
    rows = []
    for number, load in enumerate(loads):
        seen = visits(number, load=load / 20, places=10, service_s=0.5, length_s=LENGTH_S)
        rows += rows_of(seen, 100.0 * number, number, 0.2 if number in (late, waited) else 0.0)
    for row in rows:
        if row["stage"] == waited:
            row["slot_wait_ns"] = row["schedule_lag_ns"]
        if row["stage"] == refused and row["request_id"][-1] in "13579":
            row |= {"outcome": "connect_error", "ttft_ns": None, "e2e_ns": None, "done_ns": None}
        if row["stage"] == failing and row["request_id"][-1] in "13579":
            row |= {"outcome": "http_error", "http_status": 500, "e2e_ns": None, "done_ns": None}
    listed = [
        {
            "stage": number,
            "name": f"{load:g}/s",
            "stage_kind": "hold",
            "offered_rps": load,
            "dropped_arrivals": dropped[1] if number == dropped[0] else 0,
            **interval(100 * number, 100 * number + LENGTH_S),
        }
        for number, load in enumerate(loads)
    ]
    told = {"arrivals": {"planned": 0, "dropped": 0, "lost": 0, "doubled": 0, "misplaced": 0}, "schedule": POISSON}
    facts = run(0, 100 * len(loads), (SLO, GAPS), stages=listed, **told)
    facts["config"]["max_failures"] = 0.05
    workers = health([health_row(float(second)) for second in range(100 * len(loads))])
    return summarize(facts, [batch(rows)], workers=[workers], capacity_search=search)


def test_probes_are_judged_by_every_request() -> None:
    found = summary([10, 30, 15], searched(live(10, 0), live(30, 1), live(15, 2)))
    capacity = found["capacity"]
    for probe, stage in zip(capacity["probes"], found["stages"], strict=True):
        ttft, gaps = probe["slos"]
        assert sum(ttft["samples"]) == stage["requests"]["attempted"] == probe["requests"]
        assert ttft["value"] == stage["ttft_adjusted_s"]["p90"]
        assert (sum(gaps["beyond"]), gaps["value"]) == (3, stage["chunk_gap_adjusted_s"]["p99"]), "gaps stay as counted"
        assert probe["figures"]["in_flight"] == stage["in_flight"]["mean"]
    assert [probe["held"] for probe in capacity["probes"]] == [True, False, True]
    assert [probe["overload"] is not None for probe in capacity["probes"]] == [False, True, False]
    assert 14 < capacity["load"] < 25
    assert capacity["limiting_slo"] == SLO
    assert capacity["why"] == "All 3 probes were used up."
    assert capacity["operating_load"] < capacity["low"] < capacity["load"] < capacity["high"]


def test_a_missed_probe_is_no_missed_slo() -> None:
    found = summary([10, 30], searched(live(10, 0), live(30, 1)))
    assert found["slo"]["missed"], "the stage's own judgement stays"
    assert found["exit_code"] == 0, found["verdict"]
    assert "when every request is counted" in found["capacity"]["why"], "the search itself had stopped, and not early"


def test_failures_beyond_the_capacity_fail_no_search() -> None:
    found = summary([10, 30], searched(live(10, 0), live(30, 1)), failing=1)
    assert found["exit_code"] == 0, found["verdict"]
    at_all_loads = summary([10], searched(live(10, 0)), failing=0)
    assert "too_many_failures" in {reason["code"] for reason in at_all_loads["verdict"]["reasons"]}
    assert at_all_loads["exit_code"] == 1


def test_the_lowest_load_is_too_much() -> None:
    found = summary([30], searched(live(30, 0), start_load=30.0, min_load=30.0))
    assert found["capacity"]["status"] == "below_minimum"
    assert (found["exit_code"], found["capacity"]["slo_missed"]) == (3, True)
    assert "Less than 30 requests/s. Already at the lowest load, 30, an SLO is missed." in render_text(found)


def test_a_probe_of_a_late_generator_does_not_count() -> None:
    found = summary([10, 12, 30], searched(live(10, 0), live(12, 1), live(30, 2)), late=1)
    capacity = found["capacity"]
    assert [probe["left_out"] is None for probe in capacity["probes"]] == [True, False, True]
    (note,) = capacity["notes"]
    assert note == (
        "The probe at 12 does not count: its requests were sent up to 200 ms (p99) after they were due; add workers."
    )
    assert "left out" in render_text(found)
    assert found["exit_code"] == 0, found["verdict"]
    nothing = summary([12], searched(live(12, 0)), late=0)
    assert nothing["exit_code"] == 1, "where none counts, the run says nothing"
    reasons = {reason["code"]: reason["sentence"] for reason in nothing["verdict"]["reasons"]}
    assert "schedule_lag" in reasons
    assert reasons["capacity_unknown"].endswith(" The one probe does not count.")
    assert "Not known." in render_text(nothing)


def test_a_search_that_was_given_up_says_why() -> None:
    given_up = searched(live(10, 0)) | {"ended": "The search ended early: the server cannot be reached."}
    found = summary([10], given_up)
    assert found["capacity"]["why"] == (
        "The search ended early: the server cannot be reached. Every probe up to 10 met the SLOs."
    )
    assert [reason["code"] for reason in found["verdict"]["reasons"]] == ["search_given_up"]
    assert found["exit_code"] == 1, "though one probe has decided something"


@pytest.mark.parametrize(("overloaded", "counts"), [(None, False), ("queue grows", True)])
def test_arrivals_that_were_dropped_are_not_missed_by_the_server(overloaded: str | None, counts: bool) -> None:
    probe = live(12, 1)
    probe = replace(probe, result=replace(probe.result, overloaded=overloaded))
    capacity = summary([10, 12], searched(live(10, 0), probe), dropped=(1, 200))["capacity"]
    left_out = capacity["probes"][1]["left_out"]
    assert left_out == (None if counts else "every slot was busy, and 200 arrivals were dropped; raise -u")
    assert (capacity["held_load"], capacity["missed_load"]) == (10, 12 if counts else None)


def test_waits_for_a_slot_leave_a_miss_out_too() -> None:
    capacity = summary([10, 30], searched(live(10, 0), live(30, 1)), waited=1)["capacity"]
    assert capacity["probes"][1]["held"] is False
    assert capacity["probes"][1]["left_out"] == (
        "every slot was busy, and requests waited up to 200 ms (p99) for one; raise -u"
    )


def test_connections_that_the_server_refused_are_its_own_failures() -> None:
    found = summary([10, 12], searched(live(10, 0), live(12, 1)), refused=1)
    assert [probe["left_out"] for probe in found["capacity"]["probes"]] == [None, None]
    assert [probe["held"] for probe in found["capacity"]["probes"]] == [True, False]
    assert "too_many_failures" in {reason["code"] for reason in found["verdict"]["reasons"]}
    assert found["exit_code"] == 1, "though a probe held"


def test_probes_of_an_earlier_run_stand_as_they_were() -> None:
    earlier = live(12, None, 40, run_id="run-0")
    capacity = summary([30], searched(earlier, live(30, 0)))["capacity"]
    assert sum(capacity["probes"][0]["slos"][0]["beyond"]) == 40
    assert sum(capacity["probes"][1]["slos"][0]["beyond"]) > 40
    assert (capacity["held_load"], capacity["missed_load"]) == (12, 30)


def test_the_pages() -> None:
    search = searched(live(10, 0), live(30, 1), live(15, 2))
    found = summary([10, 30, 15], search)
    text = render_text(found)
    lines = text[text.index("\nCAPACITY\n") + 1 : text.index("\nLOAD ")].splitlines()
    assert all(len(line) <= WIDTH for line in lines)
    assert lines[1].startswith(f"  {found['capacity']['load']:.4g} requests/s within the SLOs (95 % interval ")
    heading = next(line for line in lines if line.startswith("  probe  "))
    assert "p90(ttft)" in heading
    assert "p99(chunk_gap)" in heading
    assert "GPU" not in heading, "nobody watched one"
    assert "\nSTAGES" not in text, "they are the probes"
    assert "  - below: probe 3, the highest load that met the SLOs, and probe 2, the lowest that did not" in text
    assert [name for name in ("10/s", "30/s", "15/s") if f"LATENCY of stage {name}," in text] == ["30/s", "15/s"]
    assert "  stage 10/s: " not in text
    page = render_html(found, {"command": ["locust"]})
    assert page.index(">Capacity</h2>") < page.index(">Load</h2>")
    kept = final_json(search, found["capacity"])
    assert final_json(kept, found["capacity"]) == kept, "a merge may be repeated"
    assert [RecordedProbe.from_json(row).stage for row in kept["judged"]] == [0, 1, 2]


def test_without_a_search_there_is_none() -> None:
    found = summarize(run(), [batch([request(12, [1, 2])])])
    assert found["capacity"] is None
    assert "CAPACITY" not in render_text(found)
    assert "Capacity</h2>" not in render_html(found, {"command": None})


@pytest.mark.parametrize(("load", "told"), [(45.9, "45 users"), (1234.5, "1,234 users")])
def test_users_are_whole(load: float, told: str) -> None:
    capacity = dict.fromkeys(("limiting_slo", "knee", "operating_load"))
    capacity |= {"unit": "users", "low": load, "load": load, "high": load, "why": "Why.", "notes": [], "probes": []}
    assert capacity_sentences(capacity)[0].startswith(told)
