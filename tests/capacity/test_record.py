"""``capacity.json``: what it keeps of a search, and what a later search takes from it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vllm_locust.capacity.probe import ProbeResult, SloCount
from vllm_locust.capacity.record import RecordedProbe, SearchRecord, differences, judged_probes, search_of
from vllm_locust.capacity.search import CapacitySettings, Status
from vllm_locust.capacity_options import CapacityOrder
from vllm_locust.errors import UsageError
from vllm_locust.load_profile import Quantity
from vllm_locust.run.capacity import terms

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


NAN = float("nan")
HERE = "probes[0]"
DAMAGES: list[tuple[tuple[str | int, ...], object, str]] = [
    (("schema",), 2, "its schema is 2, and this version reads 1"),
    (("schema",), True, "schema is True, not a count"),
    (("settings",), {}, "settings has no "),
    (("settings",), None, "settings is None, not an object"),
    (("settings", "quantity"), "cars", "settings.quantity is 'cars', not one of rate, users"),
    (("settings", "max_probes"), 2.5, "settings.max_probes is 2.5, not a count"),
    (("settings", "precision"), NAN, "settings.precision is nan, not a number"),
    (("terms",), None, "terms is None, not an object"),
    (("notes",), [1], "notes[0] is 1, not a text"),
    (("probes",), {}, "probes is an object, not a list"),
    (("probes", 0), [], f"{HERE} is a list, not an object"),
    (("probes", 0, "load"), -1, f"{HERE}.load is -1; it must be above 0"),
    (("probes", 0, "load"), NAN, f"{HERE}.load is nan, not a number"),
    (("probes", 0, "load"), 10**400, f"{HERE}.load is a number that is too large, not a number"),
    (("probes", 0, "elapsed_s"), None, f"{HERE}.elapsed_s is None, not a number"),
    (("probes", 0, "left_out"), 7, f"{HERE}.left_out is 7, not a text"),
    (("probes", 0, "stage"), -1, f"{HERE}.stage is -1, not a count"),
    (("probes", 0, "more"), 1, f"{HERE} has the unknown field 'more'"),
    (("probes", 0, "figures", "in_flight"), "many", f"{HERE}.figures.in_flight is 'many', not a number"),
    (("probes", 0, "slos", 0, "samples", 1), True, f"{HERE}.slos[0].samples[1] is True, not a count"),
    (("probes", 0, "slos", 0, "beyond"), [501, 0], f"{HERE}.slos[0].beyond does not fit samples"),
    (("probes", 0, "slos", 0, "beyond"), [1], f"{HERE}.slos[0].beyond does not fit samples"),
    (("probes", 0, "slos", 0, "allowed"), 1, f"{HERE}.slos[0].allowed is 1; it must be below 1"),
    (("judged", 0, "window_s"), 0, "judged[0].window_s is 0; it must be above 0"),
]


def damaged(place: tuple[str | int, ...], value: object) -> Any:
    record = SearchRecord(run_id="r", settings=SETTINGS, terms={"model": "m"}, probes=[probe(8, 0)], notes=["A note."])
    content = record.to_json()
    content["judged"] = record.to_json()["probes"]
    inner: Any = content
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    return content


@pytest.mark.parametrize(("place", "value", "words"), DAMAGES)
def test_what_is_damaged_is_named(
    place: tuple[str | int, ...], value: object, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = damaged(place, value)
    with pytest.raises(ValueError, match=re.escape(words)):
        judged_probes(content) if SearchRecord.from_json(content) else None
    (tmp_path / "capacity.json").write_text(json.dumps(content), encoding="utf-8")
    assert_refused(tmp_path, "NaN is no number of JSON" if value is NAN else words, monkeypatch)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "the content is a list, not an object"),
        ("{", "cannot be read"),
        ("[" * 100_000, "nested too deeply"),
        ('{"schema": ' + "9" * 5000 + "}", "cannot be read"),
    ],
)
def test_a_file_that_is_no_record(text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "capacity.json").write_text(text, encoding="utf-8")
    assert_refused(tmp_path, words, monkeypatch)


def assert_refused(directory: Path, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``--resume``, with one sentence and the exit code of bad usage."""
    monkeypatch.setattr(terms, "terms_of", lambda *_: {"model": "m"})
    order = CapacityOrder(settings=SETTINGS, resume=str(directory))
    workload = SimpleNamespace(replays_times=False)
    with pytest.raises(UsageError) as refused:
        terms.check_search(order, *cast("Any", (None, None, workload)))
    (problem,) = refused.value.problems
    assert f"{directory / 'capacity.json'} cannot be used: " in problem
    assert words in problem
    assert refused.value.exit_code == 2


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
    assert nothing.why == "The budget of 150 s was used up. None of the 3 probes counts."


def test_what_is_different_is_named() -> None:
    assert differences({"model": "a", "slos": ["x"]}, {"model": "b", "slos": ["x"]}) == [
        'the model: "a" there, "b" here'
    ]
    assert differences({}, {"workload": "f"}) == ['the workload: null there, "f" here']
