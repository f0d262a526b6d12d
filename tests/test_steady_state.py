from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.queueing import visits
from vllm_locust.steady_state import UNKNOWN, Hold, Occupancy, SteadyState, assess, batch_means, trend


def hold(**changed: Any) -> Hold:
    """A hundred seconds of ten arrivals a second that each take one."""
    due = np.arange(1000) / 10
    values: dict[str, Any] = {
        "start_s": 0.0,
        "length_s": 100.0,
        "in_system": Occupancy(due, due + 1),
        "in_flight": Occupancy(due, due + 1),
        "times_in_system_s": np.ones(1000),
        "latencies_s": np.ones(1000),
        "open_loop": True,
        "arrivals": 1000,
        "dropped": 0,
        "refused": 0,
    }
    return Hold(**(values | changed))


def simulated(seed: int, *, load: float, places: int = 20, service_s: float = 0.5, length_s: float = 60) -> SteadyState:
    seen = visits(seed, load=load, places=places, service_s=service_s, length_s=length_s, warmup_s=20)
    mine = seen.arrived >= 0
    times = (seen.ended - seen.arrived)[mine]
    everyone = Occupancy(seen.arrived, seen.ended)
    return assess(
        hold(
            length_s=length_s,
            in_system=everyone,
            in_flight=everyone,
            times_in_system_s=times,
            latencies_s=(seen.began - seen.arrived)[mine] + 0.02,
            arrivals=len(times),
        )
    )


@pytest.mark.parametrize(
    ("load", "places", "service_s"), [(0.5, 20, 0.5), (0.8, 20, 0.5), (0.8, 10, 1.0), (0.8, 1, 0.05)]
)
def test_a_server_that_keeps_up_is_seldom_called_unsteady(load: float, places: int, service_s: float) -> None:
    seen = [simulated(seed, load=load, places=places, service_s=service_s) for seed in range(200)]
    assert sum(one.steady is None or one.overloaded is None for one in seen) == 0
    assert sum(one.steady is False for one in seen) <= 0.05 * len(seen)
    assert sum(bool(one.overloaded) for one in seen) <= 0.01 * len(seen)


@pytest.mark.parametrize(("places", "service_s", "length_s"), [(20, 0.5, 60), (20, 0.5, 20), (1, 0.05, 20)])
def test_one_and_a_half_times_the_capacity_is_always_found(places: int, service_s: float, length_s: float) -> None:
    for seed in range(100):
        seen = simulated(seed, load=1.5, places=places, service_s=service_s, length_s=length_s)
        assert (seen.steady, seen.overloaded) == (False, True)
        assert seen.overload is not None
        assert "more arrived than were finished" in seen.overload


def test_an_even_load_is_steady() -> None:
    seen = assess(hold())
    assert (seen.steady, seen.overloaded, seen.overload) == (True, False, None)
    assert seen.in_system is not None
    assert seen.in_system.mean == pytest.approx(10, rel=0.01)


def test_a_stage_that_only_fills_up_is_not_overloaded() -> None:
    due = np.arange(1000) / 10
    seen = assess(hold(in_system=Occupancy(due, due + 30), times_in_system_s=np.full(1000, 30.0)))
    assert seen.overloaded is False


def test_a_queue_at_the_client_is_told_from_one_at_the_server() -> None:
    due = np.arange(1000) / 10
    queued = Occupancy(due, 1 + 1.5 * due)
    at_server = assess(hold(in_system=queued, in_flight=queued))
    # At 100 s the 1,000 have come, and the 661 due up to (100 - 1) / 1.5 s = 66 s are over.
    assert at_server.overload == (
        "338 more arrived than were finished (34 % of 1,000): in flight or waiting rose from 1 to 339"
    )
    at_client = assess(hold(in_system=queued, in_flight=Occupancy(1.5 * due, 1 + 1.5 * due)))
    assert "most of them waiting for a free slot (-u)" in str(at_client.overload)
    assert at_client.overloaded is True


def test_latency_that_rises_makes_a_stage_unsteady_in_a_closed_loop_too() -> None:
    noise = np.random.default_rng(0).random(1000)
    seen = assess(hold(latencies_s=1 + noise + np.arange(1000) / 1000, open_loop=False))
    assert (seen.steady, seen.overloaded) == (False, None)
    assert seen.latency is not None
    assert seen.latency.change == pytest.approx(0.95, abs=0.1)


def test_a_trend_too_small_to_matter_is_none() -> None:
    seen = assess(hold(latencies_s=1 + np.arange(1000) / 20_000))
    assert seen.steady is True
    assert seen.latency is not None
    assert seen.latency.statistic > 1000


def test_dropped_and_refused_requests_are_overload() -> None:
    assert assess(hold(dropped=51)).overload == "51 of 1,000 arrivals were dropped, since every slot was busy (-u)"
    assert assess(hold(refused=51)).overload == "the server refused 51 of 1,000 requests (429 or 503)"
    assert assess(hold(dropped=50, refused=50)).overloaded is False


@pytest.mark.parametrize(
    "changed",
    [
        {"times_in_system_s": np.ones(99)},
        {"arrivals": 99},
        {"times_in_system_s": np.full(1000, 40.0)},
    ],
)
def test_a_stage_with_too_little_in_it_is_not_judged(changed: dict[str, Any]) -> None:
    assert assess(hold(**changed)) == UNKNOWN


INTERVALS = st.lists(st.tuples(st.integers(-50, 150), st.integers(0, 60)), min_size=1, max_size=20)


@settings(max_examples=50, deadline=None)
@given(INTERVALS)
def test_occupancy_counts_what_is_open(intervals: list[tuple[int, int]]) -> None:
    starts = np.array([start for start, _ in intervals], dtype=np.float64)
    ends = starts + np.array([length for _, length in intervals])
    seen = Occupancy(starts, ends)
    counts = [int(((starts <= t) & (t < ends)).sum()) for t in range(100)]
    assert seen.at(np.arange(100.0)).tolist() == counts
    assert seen.most(0.0, 100.0) == max(counts)
    # Whole seconds: the mean over ten of them is the mean of their counts.
    expected = np.array(counts).reshape(10, 10).mean(axis=1)
    assert seen.means(np.linspace(0, 100, 11)) == pytest.approx(expected, abs=1e-9)


def test_the_trend_of_a_straight_line() -> None:
    flat, line = trend(np.full(20, 3.0)), trend(np.arange(20.0))
    assert (flat.change, flat.statistic, flat.matters) == (0, 0, False)
    assert (line.mean, line.change) == pytest.approx((9.5, 19))
    assert line.matters
    assert line.as_json()["statistic"] == 1e6
    assert not trend(np.zeros(20)).matters


def test_batches_hold_all_values() -> None:
    means = batch_means(np.arange(105.0))
    assert len(means) == 20
    assert means[0] == pytest.approx(np.arange(6).mean())
