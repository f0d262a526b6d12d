import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_locust.capacity.probe import ProbeResult, SloCount, allowed_share, by_slo, count_slo
from vllm_locust.slo import parse_slo
from vllm_locust.statistics import PERCENTILES, nearest_rank


def count(beyond: int, samples: int, allowed: float = 0.01) -> SloCount:
    return SloCount(slo="p99(ttft)<=1s", allowed=allowed, beyond=(beyond,), samples=(samples,))


def result(*slos: SloCount, overloaded: str | None = None) -> ProbeResult:
    return ProbeResult(
        load=10.0,
        achieved=9.9,
        window_s=60.0,
        elapsed_s=75.5,
        requests=594,
        completed_rps=9.8,
        latency_s=None,
        slos=slos,
        overloaded=overloaded,
        figures={"output_tokens_per_s": 1234.5, "gpu_utilization": None},
    )


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("p99(ttft)<=1s", 0.01),
        ("p99.9(chunk_gap)<=1s", 0.001),
        ("p50(e2e)<=1s", 0.5),
        ("good_fraction>=95%", 0.05),
        ("failed_fraction<=0.5%", 0.005),
    ],
)
def test_what_an_slo_allows(text: str, allowed: float) -> None:
    assert allowed_share(parse_slo(text)) == pytest.approx(allowed, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "reason", "fix"),
    [
        ("ttft<=1s", "judges single requests", "good_fraction>=0.99"),
        ("goodput_rps>=10", "does not say from which load on", "use percentiles"),
        ("output_tokens_per_s>=1000", "does not say from which load on", "good_fraction"),
        ("good_fraction>=1", "allows no exception", "good_fraction>=0.999"),
        ("failed_fraction<=0", "allows no exception", "0.999"),
        ("failed_fraction<=1", "allows everything", "0.999"),
    ],
)
def test_an_slo_that_bounds_no_load_is_refused(text: str, reason: str, fix: str) -> None:
    with pytest.raises(ValueError, match="SLO") as caught:
        allowed_share(parse_slo(text))
    assert reason in str(caught.value)
    assert fix in str(caught.value)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=250),
    st.sampled_from(["p50", "p90", "p99"]),
    st.integers(1, 30),
)
@settings(max_examples=80, deadline=None)
def test_counting_judges_as_the_nearest_rank_does(values: list[int], name: str, limit: int) -> None:
    q: Fraction = PERCENTILES[name]
    counted = count_slo(parse_slo(f"{name}(ttft)<={limit}ns"), np.array(values) > limit)
    assert counted.met is (sorted(values)[nearest_rank(len(values), q) - 1] <= limit)
    assert sum(counted.samples) == len(values)
    assert sum(counted.beyond) == sum(value > limit for value in values)


def test_batches_are_in_order_of_time() -> None:
    beyond = np.arange(100) >= 70
    assert count_slo(parse_slo("p99(ttft)<=1s"), beyond).beyond == (0,) * 7 + (10,) * 3
    gaps = count_slo(parse_slo("p99(itl)<=1s"), np.array([3, 0]), np.array([30, 20]), value=0.5)
    assert (sum(gaps.beyond), sum(gaps.samples), gaps.value, gaps.limit) == (3, 50, 0.5, 1.0)


def test_a_probe_holds_when_every_slo_that_has_samples_is_met() -> None:
    assert count(1, 100).met is True
    assert count(2, 100).met is False
    assert count(0, 0).met is None
    assert result(count(1, 100), count(0, 0)).held is True
    assert result(count(1, 100), count(2, 100)).held is False
    assert result(count(0, 0)).held is None
    assert result().held is None
    assert result(count(0, 100), overloaded="queue grows").held is False


def test_a_result_survives_json() -> None:
    made = result(count(1, 100), overloaded="queue grows")
    assert ProbeResult.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_slos_without_samples_are_left_out() -> None:
    one, other = result(count(1, 100)), result(count(0, 0))
    assert by_slo([one, other]) == {"p99(ttft)<=1s": [(one, one.slos[0])]}
