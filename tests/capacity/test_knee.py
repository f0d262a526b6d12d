import pytest

from vllm_locust.capacity.knee import CurvePoint, find_knee


def mm1(load: float) -> CurvePoint:
    """Latency of M/M/1 with a service rate of 1: 1 / (1 - load)."""
    return CurvePoint(load, load, 1 / (1 - load))


def test_the_knee_of_an_m_m_1_queue_is_at_half_its_capacity() -> None:
    # Power is load * (1 - load).
    knee = find_knee([mm1(load / 20) for load in range(19, 0, -1)])
    assert knee is not None
    assert knee.load == pytest.approx(0.5)
    assert [knee.after, knee.before] == pytest.approx([0.45, 0.55])


def test_scale_does_not_move_it() -> None:
    points = [mm1(load / 20) for load in range(1, 20)]
    scaled = [CurvePoint(70 * p.load, 70 * p.throughput_rps, 0.003 * p.latency_s) for p in points]
    knee = find_knee(scaled)
    assert knee is not None
    assert knee.load == pytest.approx(35)


def test_what_lies_at_the_edge_is_no_knee() -> None:
    assert find_knee([mm1(0.5), mm1(0.7), mm1(0.9)]) is None
    assert find_knee([mm1(0.1), mm1(0.3), mm1(0.5)]) is None
    assert find_knee([]) is None
    assert find_knee([CurvePoint(1, 1, 0)]) is None
