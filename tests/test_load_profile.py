from __future__ import annotations

import json
import math
from dataclasses import asdict
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_locust.arrival import ArrivalProcess, Schedule
from vllm_locust.load_profile import (
    LoadProfile,
    ProfileStage,
    Quantity,
    constant_rate,
    parse_stages,
    profile_from_shape,
)
from vllm_locust.shipped import shipped_path
from vllm_locust.workload.spec_reader import read_yaml_mapping

RATE, USERS = Quantity
S = 1_000_000_000
Row = tuple[str, float, float, float | None, str]


def rows(profile: LoadProfile) -> list[Row]:
    return [
        (s.name, s.start_value, s.end_value, None if s.length_ns is None else s.length_ns / S, s.kind)
        for s in profile.stages
    ]


def shape(keys: str, quantity: str = "rate") -> LoadProfile:
    """As it stands in a file: ``hold value=10 length=60s``."""
    name, *values = keys.split()
    pairs = [value.split("=") for value in values]
    entry = {"shape": name} | {key: int(value) if value.isdecimal() else value for key, value in pairs}
    return profile_from_shape({"quantity": quantity, "stages": [entry]})


def test_stages_of_rate() -> None:
    profile = parse_stages("10:60s, 10-50:2m,0.5:500ms,50-0:90", RATE)
    assert profile.quantity is RATE
    assert rows(profile) == [
        ("10/s", 10, 10, 60, "hold"),
        ("10→50/s", 10, 50, 120, "ramp"),
        ("0.5/s", 0.5, 0.5, 0.5, "hold"),
        ("50→0/s", 50, 0, 90, "ramp"),
    ]
    assert profile.length_ns == 270_500_000_000


def test_stages_of_users() -> None:
    assert rows(parse_stages("8:60s,8-16:10s", USERS)) == [
        ("8 users", 8, 8, 60, "hold"),
        ("8→16 users", 8, 16, 10, "ramp"),
    ]


def test_a_rate_alone_is_one_stage_with_or_without_an_end() -> None:
    assert rows(constant_rate("12.5", 60 * S)) == [("12.5/s", 12.5, 12.5, 60, "hold")]
    assert rows(constant_rate("12.5", None)) == [("12.5/s", 12.5, 12.5, None, "hold")]
    assert constant_rate("12.5", None).length_ns is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no length"),
        ("10", "has no length"),
        ("10:", "has no length"),
        ("10:60s,", "has no length"),
        ("ten:60s", "is not a number"),
        ("-5:60s", "is not a number"),
        ("5-:60s", "is not a number"),
        ("1-2-3:60s", "is not a number"),
        ("nan:60s", "is not a number"),
        ("1e3:60s", "is not a number"),
        ("１:60s", "is not a number"),
        ("1000001:60s", "is not a number"),
        ("10:soon", "is not a duration"),
        ("10:0s", "above 0"),
        ("10:9999h", "at most 366 days"),
        ("0:60s", "nothing would be sent"),
        ("0.0009:60s", "the least rate is 0.001/s; write that or more, or 0 for silence"),
        ("0-0.0009:60s", "the least rate is 0.001/s"),
        ("1:99999999h", "longer than ten years"),
        (",".join(["1:1s"] * 1001), "are more than"),
    ],
)
def test_what_is_no_list_of_stages(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_stages(text, RATE)


def test_the_least_rate_has_times_that_clocks_can_count_to() -> None:
    profile = parse_stages("0:60s,0-0.001:60s,0.001:8784h,0.001-0:60s", RATE)
    pieces = [piece for stage in profile.stages for piece in stage.pieces()]
    for process in (ArrivalProcess.CONSTANT, ArrivalProcess.POISSON, ArrivalProcess.GAMMA):
        schedule = Schedule(process, seed=1, burstiness=0.01 if process is ArrivalProcess.GAMMA else 1.0, pieces=pieces)
        offsets_ns = schedule.offsets_ns()
        assert 60 * S <= offsets_ns[0] <= offsets_ns[-1] < profile.length_ns
    (open_end,) = constant_rate("0.001", None).stages[0].pieces()
    for process in (ArrivalProcess.CONSTANT, ArrivalProcess.POISSON):
        arrivals = Schedule(process, seed=1, pieces=[open_end]).share(0, 1)
        first_ns = [next(arrivals).offset_ns for _ in range(2000)]
        assert first_ns == sorted(first_ns)
        assert first_ns[-1] == pytest.approx(2000 * 1000 * S, rel=0.1)


def test_users_are_whole() -> None:
    with pytest.raises(ValueError, match="whole number"):
        parse_stages("2.5:60s", USERS)


@pytest.mark.parametrize("text", ["0", "0.0", "", "-1", "inf", "10/s"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match="write"):
        constant_rate(text, None)


def test_shapes_become_stages() -> None:
    assert rows(shape("hold value=10 length=60s")) == [("10/s", 10, 10, 60, "hold")]
    assert rows(shape("ramp from=0 to=50 length=120")) == [("0→50/s", 0, 50, 120, "ramp")]
    assert rows(shape("spike base=2 peak=20 before=1m length=5s after=2m")) == [
        ("2/s", 2, 2, 60, "hold"),
        ("20/s", 20, 20, 5, "hold"),
        ("2/s", 2, 2, 120, "hold"),
    ]
    assert rows(shape("soak value=8 length=25m every=10m")) == [
        ("8/s", 8, 8, 600, "hold"),
        ("8/s", 8, 8, 600, "hold"),
        ("8/s", 8, 8, 300, "hold"),
    ]


@pytest.mark.parametrize(
    ("start", "end", "step", "values"),
    [
        (10, 40, 10, [10, 20, 30, 40]),
        (10, 45, 10, [10, 20, 30, 40]),
        (40, 10, 15, [40, 25, 10]),
        (0.1, 0.7, 0.2, [0.1, 0.3, 0.5, 0.7]),
        (5, 5, 1, [5]),
    ],
)
def test_steps(start: float, end: float, step: float, values: list[float]) -> None:
    profile = shape(f"step from={start} to={end} step={step} length=30s")
    assert rows(profile) == [(f"{value:g}/s", value, value, 30, "hold") for value in values]


def test_a_sinusoid_is_a_stage_up_and_a_stage_down_per_period() -> None:
    profile = shape("sinusoid low=10 high=50 period=2m periods=2", "users")
    assert rows(profile) == [("10→50 users", 10, 50, 60, "ramp"), ("50→10 users", 50, 10, 60, "ramp")] * 2
    up, down = profile.stages[:2]
    assert [up.value_at(f) for f in (0, 0.25, 0.5, 0.75, 1)] == pytest.approx([10, 15.857864, 30, 44.142136, 50])
    assert [down.value_at(f) for f in (0, 0.5, 1)] == pytest.approx([50, 30, 10])


def test_a_straight_stage_goes_straight() -> None:
    ramp = parse_stages("10-50:60s", RATE).stages[0]
    assert [ramp.value_at(f) for f in (0, 0.25, 1)] == [10, 20, 50]
    assert ramp.mean_value == 30


@given(
    st.floats(0, 1000, allow_subnormal=False),
    st.floats(0, 1000, allow_subnormal=False),
    st.integers(1, 10**13),
    st.sampled_from(["linear", "sine"]),
)
def test_pieces_make_up_the_stage(start: float, end: float, length_ns: int, curve: Any) -> None:
    """No gap in time, none in the value, and the mean that the table shows."""
    start, end = round(start, 3), round(end, 3)
    stage = ProfileStage(name="", start_value=start, end_value=end, length_ns=length_ns, curve=curve)
    pieces = stage.pieces()
    assert sum(piece.length_ns or 0 for piece in pieces) == length_ns
    assert (pieces[0].start_rps, pieces[-1].end_rps) == (start, end)
    assert all(one.end_rps == other.start_rps for one, other in pairwise(pieces))
    arrivals = sum((piece.arrivals or Fraction(0) for piece in pieces), Fraction(0))
    if length_ns > 1000:
        assert float(arrivals) == pytest.approx(stage.mean_value * length_ns / S, rel=0.02)


def test_an_open_hold_is_one_open_piece() -> None:
    (piece,) = constant_rate("10", None).stages[0].pieces()
    assert (piece.length_ns, piece.start_rps, piece.end_rps) == (None, 10, 10)


def test_json_round_trip() -> None:
    for profile in (parse_stages("10:60s,10-50:2m", USERS), constant_rate("0.1", None)):
        assert LoadProfile.from_json(json.loads(json.dumps(asdict(profile)))) == profile
    curved = shape("sinusoid low=1 high=2 period=10 periods=1")
    assert LoadProfile.from_json(json.loads(json.dumps(asdict(curved)))) == curved


def test_every_fault_of_a_shape_is_told() -> None:
    entries = [
        {"shape": "hold", "value": 10},
        5,
        {"shape": "triangle"},
        {"shape": ["hold"]},
        {"shape": "step", "from": 1, "to": 2, "step": 0, "length": 1},
        {"shape": "step", "from": 1, "to": 2, "step": 0.0001, "length": 1},
        {"shape": "hold", "value": "many", "length": 1},
        {"shape": "hold", "value": True, "length": 1},
        {"shape": "hold", "value": 1, "length": "long"},
        {"shape": "hold", "value": 1, "length": 1, "lenght": 1},
        {"shape": "sinusoid", "low": 1, "high": 2, "period": 60, "periods": 1.5},
        {"shape": "soak", "value": 1, "length": "10h", "every": "1s"},
        {"shape": "hold", "value": 0.00001, "length": 1},
        {"shape": "step", "from": 0, "to": 0.002, "step": 0.0005, "length": 1},
        {"shape": "hold", "value": math.inf, "length": 1},
        {"shape": "hold", "value": math.nan, "length": 1},
        {"shape": "hold", "value": 1, "length": math.inf},
        {"shape": "hold", "value": 1, "length": -1},
        {"shape": "hold", "value": -1, "length": 1},
        {"shape": "hold", "value": 1, "length": 1},
    ]
    with pytest.raises(ValueError, match="entry 1: ") as caught:
        profile_from_shape({"stages": entries})
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [f"stages, entry {n}" for n in range(1, 20)]
    fixes = "length is missing|not a mapping|'triangle'|not known|step: 0 leads|step: 0.0001 leads|value: 'many'"
    fixes += "|value: 'True'|length: 'long'|lenght is not a key|periods: 1.5|every: it cuts"
    fixes += "|1e-05/s: the least rate|0.0005/s: the least rate|value: 'inf'|value: 'nan'|length: 'inf'|length: '-1'"
    fixes += "|value: '-1'"
    for line, fix in zip(lines, fixes.split("|"), strict=True):
        assert fix in line


@pytest.mark.parametrize(
    ("content", "reasons"),
    [
        ({}, ["stages is not a list"]),
        ({"stages": []}, ["stages is not a list"]),
        ({"quantity": "load", "stages": 1}, ["quantity 'load' is not known", "stages is not a list"]),
        ({"quantity": ["rate"], "name": "x"}, ["name is not a known key", "quantity \\['rate'\\]", "stages"]),
        ({"stages": [{"shape": "hold", "value": 0, "length": 1}]}, ["nothing would be sent"]),
        ({"quantity": "users", "stages": [{"shape": "hold", "value": 0.5, "length": 1}]}, ["whole number"]),
    ],
)
def test_what_is_no_shape(content: dict[str, Any], reasons: list[str]) -> None:
    for reason in reasons:
        with pytest.raises(ValueError, match=reason):
            profile_from_shape(content)


def test_numbers_of_a_shape_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "shape.yaml"
    path.write_text(
        "stages:\n- {shape: hold, value: 1e+2, length: 1e1}\n- {shape: hold, value: 2.5E1, length: 0.00001}\n"
        "- {shape: ramp, from: 1_000, to: 0x10, length: 5}\n- {shape: step, from: 1, to: 2, step: 1e0, length: '08'}\n"
    )
    assert rows(profile_from_shape(read_yaml_mapping(path, "shape"))) == [
        ("100/s", 100, 100, 10, "hold"),
        ("25/s", 25, 25, 0.00001, "hold"),
        ("1000→16/s", 1000, 16, 5, "ramp"),
        ("1/s", 1, 1, 8, "hold"),
        ("2/s", 2, 2, 8, "hold"),
    ]


@pytest.mark.parametrize(("name", "stages", "minutes"), [("spike", 3, 7.5), ("day", 13, 60)])
def test_shipped_shapes(name: str, stages: int, minutes: float) -> None:
    profile = profile_from_shape(read_yaml_mapping(shipped_path(name), "shape"))
    assert len(profile.stages) == stages
    assert profile.length_ns == minutes * 60 * S


def test_a_high_rate_is_named_without_an_exponent() -> None:
    profile = parse_stages("1000000:1s,999999.5:1s,20:1s,999999-1000000:1s", RATE)
    assert [stage.name for stage in profile.stages] == ["1,000,000/s", "999,999.5/s", "20/s", "999999→1,000,000/s"]
