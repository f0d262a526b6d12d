import re

import pytest

from vllm_locust.comparison.difference import Difference
from vllm_locust.comparison.limit import Limit
from vllm_locust.comparison.quantity import Quantity
from vllm_locust.comparison.result import FAILED, PASSED, UNDECIDED, judge

STAGE = "4/s"


@pytest.mark.parametrize(
    ("text", "quantity", "size", "relative"),
    [
        ("p99(ttft) +5%", Quantity("ttft", "p99"), 0.05, True),
        ("mean(tpot)+0.5ms", Quantity("tpot", "mean"), 0.0005, False),
        ("p99.9( e2e ) + 2s", Quantity("e2e", "p99_9"), 2.0, False),
        ("output_tokens_per_s -3%", Quantity("output_tokens_per_s", None), 0.03, True),
        ("good_fraction −0.01", Quantity("good_fraction", None), 0.01, False),
        ("failed_fraction +0", Quantity("failed_fraction", None), 0.0, False),
    ],
)
def test_grammar(text: str, quantity: Quantity, size: float, relative: bool) -> None:
    limit = Limit.parse(text)
    assert (limit.quantity, limit.relative) == (quantity, relative)
    assert limit.size == pytest.approx(size)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("p99(ttft)", "write for example 'p99(ttft) +5%'"),
        ("ttft +5%", "write for example p99(ttft)"),
        ("p98(ttft) +5%", "'p98' is no number of the report"),
        ("p99(speed) +5%", "there is no metric 'speed'"),
        ("speed +5%", "there is no 'speed'"),
        ("p99(ttft) -5%", "p99(ttft) is worse when it is higher; write +5"),
        ("goodput_rps +5%", "goodput_rps is worse when it is lower; write -5"),
        ("p99(ttft) +5", "'' is no unit of time"),
        ("p99(ttft) +5x", "'x' is no unit of time"),
        ("goodput_rps -5ms", "goodput_rps has no unit 'ms'"),
    ],
)
def test_refusals_name_the_text_and_the_fix(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        Limit.parse(text)
    assert repr(text) in str(refused.value)


def difference(limit: Limit, base: float, new: float, p_higher: float | None) -> Difference:
    p_lower = None if p_higher is None else 1 - p_higher
    undecided = "too few" if p_higher is None else None
    return Difference(
        quantity=limit.quantity, base=base, new=new, n=2_000, p_higher=p_higher, p_lower=p_lower, undecided=undecided
    )


@pytest.mark.parametrize(
    ("text", "base", "new", "p_higher", "status"),
    [
        ("p99(ttft) +5%", 1.0, 1.06, 0.01, FAILED),
        ("p99(ttft) +5%", 1.0, 1.04, 0.01, PASSED),  # evident, but small
        ("p99(ttft) +5%", 1.0, 1.50, 0.06, PASSED),  # large, but it may be chance
        ("p99(ttft) +5%", 1.0, 0.50, 0.99, PASSED),
        ("p99(ttft) +5%", 1.0, 1.50, None, UNDECIDED),
        ("p99(ttft) +50ms", 1.0, 1.06, 0.01, FAILED),
        ("p99(ttft) +5%", 1.0, float("inf"), 0.01, FAILED),
        ("p99(ttft) +5%", float("inf"), float("inf"), 0.01, UNDECIDED),
        ("p99(ttft) +50ms", float("inf"), float("inf"), 0.01, UNDECIDED),
        ("p99(ttft) +5%", float("inf"), 1.0, 0.99, PASSED),
        ("p99(ttft) +50ms", float("inf"), 1.0, 0.99, PASSED),
        ("goodput_rps -3%", 100.0, 96.0, 0.99, FAILED),
        ("goodput_rps -3%", 100.0, 98.0, 0.99, PASSED),
        ("goodput_rps -3%", 100.0, 110.0, 0.01, PASSED),
        ("good_fraction -0.01", 0.99, 0.97, 0.99, FAILED),
        ("failed_fraction +0%", 0.0, 0.02, 0.01, FAILED),
    ],
)
def test_a_regression_is_evident_and_beyond_the_limit(
    text: str, base: float, new: float, p_higher: float | None, status: str
) -> None:
    limit = Limit.parse(text)
    (gate,) = judge(limit, {STAGE: difference(limit, base, new, p_higher)})
    assert gate.status == status


def test_with_all_stages_a_limit_is_one_test() -> None:
    """Of ten stages one has p = 4 %: that is what chance alone would bring."""
    limit = Limit.parse("p99(ttft) +0%")
    stages = {f"{rate}/s": difference(limit, 1.0, 1.2, 0.04 if rate == 3 else 0.5) for rate in range(10)}
    assert {gate.status for gate in judge(limit, stages)} == {PASSED}
