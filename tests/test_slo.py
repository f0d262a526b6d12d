from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_locust.slo import Slo, SloKind, judge_request, judge_requests, judge_stage, parse_slo, parse_slos


def test_a_limit_for_one_request() -> None:
    assert parse_slo("ttft<=2s") == Slo("ttft<=2s", SloKind.REQUEST, "ttft", None, False, 2_000_000_000, True)


@pytest.mark.parametrize(
    ("text", "limit_ns"),
    [
        ("itl<=50ms", 50_000_000),
        ("itl <= 50 ms", 50_000_000),
        ("tpot<=1.5", 1_500_000_000),
        ("e2e<=2m", 120_000_000_000),
        ("done<=1h", 3_600_000_000_000),
        ("ttft<=250us", 250_000),
        ("ttft<=250µs", 250_000),
        ("ttft<=7ns", 7),
    ],
)
def test_units(text: str, limit_ns: int) -> None:
    assert parse_slo(text).limit == limit_ns


def test_limits_for_a_stage() -> None:
    slo = parse_slo("p99.9(chunk_gap)<=200ms")
    assert (slo.kind, slo.metric, slo.percentile, slo.limit) == (SloKind.STAGE, "chunk_gap", "p99_9", 200_000_000)
    slo = parse_slo("good_fraction>=99%")
    assert (slo.kind, slo.metric, slo.percentile, slo.at_least, slo.limit) == (
        SloKind.STAGE,
        "good_fraction",
        None,
        True,
        0.99,
    )
    assert parse_slo("failed_fraction<=0.5%").limit == 0.005
    assert parse_slo("output_tokens_per_s>=1500").limit == 1500


@pytest.mark.parametrize(
    ("text", "reason", "fix"),
    [
        ("", "it is not METRIC<=VALUE", "write for example"),
        ("ttft", "it is not METRIC<=VALUE", "write for example"),
        ("ttft<=fast", "it is not METRIC<=VALUE", "write for example"),
        ("ttft<=2s; rm", "it is not METRIC<=VALUE", "write for example"),
        ("latency<=2s", "there is no metric 'latency'", "use one of ttft"),
        ("p99(latency)<=2s", "there is no metric 'latency'", "use one of ttft"),
        ("p75(ttft)<=2s", "'p75' is not a percentile of the report", "use one of p50, p90, p95, p99, p99.9"),
        ("mean(ttft)<=2s", "'mean' is not a percentile", "use one of"),
        ("ttft>=2s", "a time has an upper limit", "write <="),
        ("ttft<2s", "a time has an upper limit", "write <="),
        ("ttft<=2d", "'d' is not a unit of time", "use ns"),
        ("ttft<=5%", "'%' is not a unit of time", "use ns"),
        ("chunk_gap<=1s", "one request has many chunk gaps", "p99(chunk_gap)"),
        ("schedule_lag<=1s", "says nothing about the server", "p99(schedule_lag)"),
        ("good_fraction<=0.9", "has a lower limit", "write >="),
        ("failed_fraction>=0.9", "has an upper limit", "write <="),
        ("good_fraction>=99", "a fraction is at most 1", "99%"),
        ("goodput_rps>=9%", "has no unit '%'", "plain number"),
        ("goodput_rps>=9s", "has no unit 's'", "plain number"),
    ],
)
def test_a_fault_names_the_text_the_reason_and_the_fix(text: str, reason: str, fix: str) -> None:
    with pytest.raises(ValueError, match="SLO") as caught:
        parse_slo(text)
    message = str(caught.value)
    assert message.startswith(f"SLO {text!r}: ")
    assert reason in message
    assert fix in message
    assert "\n" not in message


def test_all_faults_at_once() -> None:
    with pytest.raises(ValueError, match="SLO") as caught:
        parse_slos(["ttft<=2s", "x<=1", "p1(ttft)<=1"])
    assert len(str(caught.value).split("\n")) == 2


def test_a_good_fraction_needs_a_good_request() -> None:
    with pytest.raises(ValueError, match="nothing says what a good request is"):
        parse_slos(["good_fraction>=0.9"])
    assert len(parse_slos(["good_fraction>=0.9", "ttft<=1s"])) == 2


SLOS = parse_slos(["ttft<=10ns", "tpot<=5ns", "p99(e2e)<=1s"])


@pytest.mark.parametrize(
    ("ok", "values", "good"),
    [
        (True, {"ttft": 10, "tpot": 5}, True),
        (True, {"ttft": 11, "tpot": 5}, False),
        (True, {"ttft": 10, "tpot": None}, True),
        (True, {"ttft": 11, "tpot": None}, False),
        (True, {}, None),
        (False, {"ttft": 1, "tpot": 1}, False),
        (False, {}, False),
    ],
)
def test_a_request_is_good_by_every_slo_that_applies(
    ok: bool, values: dict[str, float | None], good: bool | None
) -> None:
    assert judge_request(SLOS, ok, values) is good


def test_without_a_limit_for_requests_nothing_is_good_or_bad() -> None:
    assert judge_request(parse_slos(["p99(e2e)<=1s"]), True, {"e2e": 1}) is None
    assert judge_request([], False, {}) is None


value = st.none() | st.integers(0, 20)


@given(st.lists(st.tuples(st.booleans(), value, value), max_size=20), st.sampled_from([SLOS, SLOS[:1], []]))
@settings(max_examples=60)
def test_many_requests_are_judged_as_one_by_one(
    rows: list[tuple[bool, int | None, int | None]], slos: list[Slo]
) -> None:
    good, decided = judge_requests(
        slos,
        np.array([ok for ok, _, _ in rows], dtype=np.bool_),
        {
            "ttft": np.array([row[1] for row in rows], dtype=np.float64),
            "tpot": np.array([row[2] for row in rows], dtype=np.float64),
        },
    )
    judged = [bool(g) if d else None for g, d in zip(good, decided, strict=True)]
    assert judged == [judge_request(slos, ok, {"ttft": ttft, "tpot": tpot}) for ok, ttft, tpot in rows]
    assert not (good & ~decided).any()


def stage(**block: Any) -> dict[str, Any]:
    return {"e2e_adjusted_s": {"n": 5, "p99": None, **block}, "good_fraction": 0.98, "goodput_rps": None}


def test_a_stage_is_judged_by_its_adjusted_percentile() -> None:
    slo = parse_slo("p99(e2e)<=1s")
    assert judge_stage(slo, stage(p99=1.0)).met is True
    judgement = judge_stage(slo, stage(p99=1.001))
    assert (judgement.met, judgement.value) == (False, 1.001)
    # It falls on a failed request.
    judgement = judge_stage(slo, stage(beyond=["p99"]))
    assert (judgement.met, judgement.value) == (False, None)
    assert judge_stage(slo, stage(n=0)).met is None


def test_a_stage_is_judged_by_a_number() -> None:
    assert judge_stage(parse_slo("good_fraction>=0.98"), stage()).met is True
    assert judge_stage(parse_slo("good_fraction>=0.981"), stage()).met is False
    assert judge_stage(parse_slo("goodput_rps>=1"), stage()).met is None
