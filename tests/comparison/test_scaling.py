from dataclasses import replace

import pytest

from vllm_locust.comparison.scaling import SizedRun, scaling_curve


def sized(size: int, rate: float, overloaded: bool | None = True) -> SizedRun:
    return SizedRun(
        size=size,
        label=f"run-{size}",
        stage="8/s",
        output_tokens_per_s=rate,
        tpot_p50_s=0.01,
        gpu_utilization=None,
        sm_activity=None,
        nvlink_bytes_per_s=None,
        pcie_bytes_per_s=None,
        overloaded=overloaded,
    )


def test_speed_up_and_efficiency_against_the_smallest() -> None:
    points = scaling_curve([sized(2, 190), sized(1, 90), sized(8, 400), sized(1, 110)], "gpus")
    assert [point.size for point in points] == [1, 2, 8]
    assert [point.speed_up for point in points] == pytest.approx([1.0, 1.9, 4.0])
    assert [point.efficiency for point in points] == pytest.approx([1.0, 0.95, 0.5])
    assert [len(point.runs) for point in points] == [2, 1, 1]
    assert points[1].remarks == ()
    assert points[2].remarks == ("efficiency below 80 %",)


def test_a_percentile_of_several_runs_is_a_range_and_no_mean() -> None:
    slow = replace(sized(1, 110), tpot_p50_s=0.03)
    first, second = (
        point.as_json()["tpot_p50_s"] for point in scaling_curve([sized(1, 90), slow, sized(2, 190)], "gpus")
    )
    assert (first, second) == ([0.01, 0.03], [0.01, 0.01])
    unknown = replace(sized(1, 90), tpot_p50_s=None)
    assert scaling_curve([unknown, sized(2, 190)], "gpus")[0].as_json()["tpot_p50_s"] is None


def test_the_smallest_need_not_be_one() -> None:
    points = scaling_curve([sized(2, 100), sized(4, 150)], "gpus")
    assert points[1].efficiency == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("size", "rate", "communication"),
    [(2, 99, True), (2, 101, False), (4, 319, True), (4, 321, False), (8, 500, False)],
)
def test_tensor_parallelism_that_does_not_pay(size: int, rate: float, communication: bool) -> None:
    point = scaling_curve([sized(1, 100), sized(size, rate)], "tp")[1]
    assert any("likely communication" in remark for remark in point.remarks) == communication
    assert not any(
        "communication" in one for one in scaling_curve([sized(1, 100), sized(size, rate)], "gpus")[1].remarks
    )


def test_a_curve_of_runs_that_were_not_at_the_limit_says_so() -> None:
    point = scaling_curve([sized(1, 100), sized(2, 190, overloaded=False)], "gpus")[1]
    assert point.remarks == ("its best stage was not at the limit: a higher load may give more",)
