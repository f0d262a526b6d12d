"""The stages of a run as they stand in run.json, also where the window ended before they did."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from vllm_locust.load_profile import Curve, ProfileStage, Quantity
from vllm_locust.run.course.stage_spans import StageSpan, Stretch, append_stretch, cut_stages


def stage(start: float, end: float, length_s: float | None, curve: Curve = "linear") -> ProfileStage:
    length_ns = None if length_s is None else round(length_s * 1e9)
    return ProfileStage(name="s", start_value=start, end_value=end, length_ns=length_ns, curve=curve)


def spans(*stages: ProfileStage, quantity: Quantity = Quantity.RATE) -> tuple[StageSpan, ...]:
    made: tuple[StageSpan, ...] = ()
    at_ns = 1_000
    for number, load in enumerate(stages):
        made = append_stretch(made, Stretch(load, number), quantity, at_ns)
        at_ns += load.length_ns or 0
    return made


def test_stages_follow_one_another_and_a_window_that_ends_early_cuts_them() -> None:
    planned = spans(stage(10, 10, 2), stage(10, 50, 4), stage(50, 50, None))
    whole = cut_stages(planned, 9_000_001_000)
    assert [(one["stage"], one["stage_kind"], one["offered_rps"]) for one in whole] == [
        (0, "hold", 10),
        (1, "ramp", 30),
        (2, "hold", 50),
    ]
    assert [one["start_unix_ns"] for one in whole] == [1_000, 2_000_001_000, 6_000_001_000]
    assert [one["end_unix_ns"] for one in whole] == [2_000_001_000, 6_000_001_000, 9_000_001_000]
    cut = cut_stages(planned, 3_000_001_000)
    assert [(one["end_unix_ns"], one["offered_rps"]) for one in cut] == [(2_000_001_000, 10), (3_000_001_000, 15)]
    assert cut_stages(planned, 1_000) == []


@pytest.mark.parametrize("part", [0.1, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("curve", ["linear", "sine"])
def test_the_mean_of_a_cut_ramp_is_the_mean_of_what_was_asked_for(curve: Curve, part: float) -> None:
    load = stage(4, 20, 10, curve)
    (cut,) = cut_stages(spans(load), 1_000 + round(part * 10e9))
    middles = (np.arange(20_000) + 0.5) / 20_000 * part
    assert cut["offered_rps"] == pytest.approx(np.mean([load.value_at(float(at)) for at in middles]), rel=1e-6)


def test_users_are_whole_numbers() -> None:
    (cut,) = cut_stages(spans(stage(3, 6, 1), quantity=Quantity.USERS), 5_000_000_000)
    assert cut["users"] == 4
    assert "offered_rps" not in cut


def test_a_stage_is_lengthened_by_stretches_of_its_number_and_a_pause_is_no_stage() -> None:
    made = spans(stage(10, 10, 1))
    made = append_stretch(made, Stretch(stage(10, 10, 1), 0), Quantity.RATE, 1_000_001_000)
    made = append_stretch(made, Stretch(stage(5, 5, 1), None), Quantity.RATE, 2_000_001_000)
    made = append_stretch(made, Stretch(stage(20, 20, 1), 1), Quantity.RATE, 3_000_001_000)
    cut = cut_stages(made, 9_000_000_000)
    assert [(one["start_unix_ns"], one["end_unix_ns"]) for one in cut] == [
        (1_000, 2_000_001_000),
        (3_000_001_000, 4_000_001_000),
    ]


def test_spans_cross_as_json() -> None:
    planned = spans(stage(1, 5, 2, "sine"), stage(5, 5, None))
    text = json.dumps([span.to_json() for span in planned])
    assert tuple(StageSpan.from_json(span) for span in json.loads(text)) == planned


def test_no_two_stages_have_one_name() -> None:
    loads = [stage(10, 10, 1), replace(stage(20, 20, 1), name="t"), stage(10, 10, 1), stage(10, 10, 1)]
    made = spans(*loads)
    assert [span.load.name for span in made] == ["s", "t", "s #2", "s #3"]
    longer = append_stretch(made, Stretch(stage(10, 10, 5), 3), Quantity.RATE, 9_000)
    assert [span.load.name for span in longer] == ["s", "t", "s #2", "s #3"], "more of a stage is no other"
