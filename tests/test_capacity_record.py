"""``capacity.json``: what it keeps of a search, and what a later search takes from it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from vllm_locust.capacity import CapacitySettings, Status
from vllm_locust.capacity_record import RecordedProbe, SearchRecord, differences, search_of
from vllm_locust.load_profile import Quantity
from vllm_locust.probe import ProbeResult, SloCount

SETTINGS = CapacitySettings(quantity=Quantity.RATE, start_load=8, min_load=1, max_probes=5, budget_s=300)


def probe(load: float, beyond: int, *, left_out: str | None = None) -> RecordedProbe:
    count = SloCount(slo="p99(ttft)<=1s", allowed=0.01, beyond=(beyond, 0), samples=(500, 500), value=0.5, limit=1.0)
    result = ProbeResult(
        load=load,
        achieved=load,
        window_s=40.0,
        elapsed_s=50.0,
        requests=1000,
        completed_rps=load,
        latency_s=2.0,
        slos=(count,),
        figures={"in_flight": 3.0, "gpu_utilization": None},
    )
    return RecordedProbe(run_id="r", stage=0, result=result, left_out=left_out)


def test_it_is_read_as_it_was_written() -> None:
    record = SearchRecord(
        run_id="r", settings=SETTINGS, terms={"model": "m"}, probes=[probe(8, 0), probe(16, 90)], notes=["A note."]
    )
    again = SearchRecord.from_json(json.loads(json.dumps(record.to_json(), allow_nan=False)))
    assert again == record


@pytest.mark.parametrize("content", [{}, {"schema": 2}, {"schema": 1, "settings": {}}, {"schema": 1, "settings": None}])
def test_anything_else_is_refused(content: object) -> None:
    with pytest.raises(ValueError, match=r"it is no record|its schema is"):
        SearchRecord.from_json(content)  # type: ignore[arg-type]


def test_a_probe_that_does_not_count_has_cost_its_time_all_the_same() -> None:
    search = search_of(SETTINGS, [probe(8, 0), probe(16, 90, left_out="the generator was late")])
    assert [one.load for one in search.probes] == [8]
    assert search.settings is SETTINGS, "what was asked for is what is told"
    following = search.next_probe()
    assert following is not None
    assert following.load == 16, "it is tried again"
    lost = [probe(16, 90, left_out="the generator was late")]
    over = search_of(SETTINGS, [probe(8, 0), *lost * 4]).result()
    assert over.why == "All 5 probes were used up. Every probe up to 8 met the SLOs."
    nothing = search_of(replace(SETTINGS, budget_s=150), lost * 3).result()
    assert nothing.status is Status.UNKNOWN
    assert nothing.why == "The budget of 150 s was used up. None of the 3 probes that were made counts."


def test_what_is_different_is_named() -> None:
    assert differences({"model": "a", "slos": ["x"]}, {"model": "b", "slos": ["x"]}) == [
        'the model: "a" there, "b" here'
    ]
    assert differences({}, {"workload": "f"}) == ['the workload: null there, "f" here']
