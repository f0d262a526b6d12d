import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_locust.capacity.probe import BATCHES, Probe, ProbeResult, SloCount
from vllm_locust.capacity.search import Capacity, CapacitySearch, CapacitySettings, Status
from vllm_locust.load_profile import Quantity

ALLOWED = 0.01
Shares = Callable[[float], float]


def settings(**changes: Any) -> CapacitySettings:
    values: dict[str, Any] = {
        "quantity": Quantity.RATE,
        "start_load": 5.0,
        "min_load": 0.1,
        "budget_s": 6000.0,
        "settle_s": 10.0,
    }
    return CapacitySettings(**{**values, **changes})


def queue(capacity: float, slope: float = 15.0) -> Shares:
    """The share of slow requests as in a queue: its logit is linear in the load, and crosses 1 % at the capacity."""
    return lambda load: 1 / (1 + 99 * math.exp(min(700, slope * (1 - load / capacity))))


class Target:
    """Slow requests come in crowds of ``crowd``, so that counts scatter by so much more."""

    def __init__(self, share: Shares, *, crowd: int = 1, seed: int = 0, saturation: float = math.inf) -> None:
        self.share, self.crowd, self.saturation = share, crowd, saturation
        self.rng = np.random.default_rng(seed)

    def probe(self, probe: Probe) -> ProbeResult:
        requests = round(min(probe.load, self.saturation) * probe.window_s)
        each, crowds = requests // BATCHES, requests / BATCHES / self.crowd * self.share(probe.load)
        beyond = tuple(min(each, self.crowd * int(one)) for one in self.rng.poisson(crowds, BATCHES))
        counted = SloCount(slo="p99(ttft)<=1s", allowed=ALLOWED, beyond=beyond, samples=(each,) * BATCHES)
        return ProbeResult(
            load=probe.load,
            achieved=probe.load,
            window_s=probe.window_s,
            elapsed_s=probe.settle_s + probe.window_s + 1,
            requests=requests,
            completed_rps=min(probe.load, self.saturation),
            latency_s=1 / max(1e-3, 1 - probe.load / 200),
            slos=(counted,),
        )


def run(target: Target, chosen: CapacitySettings) -> tuple[CapacitySearch, Capacity]:
    search = CapacitySearch(chosen)
    while (probe := search.next_probe()) is not None:
        search.add(target.probe(probe))
        assert len(search.probes) <= chosen.max_probes
    return search, search.result()


@pytest.mark.parametrize("start", [1.0, 20.0, 150.0])
def test_it_finds_a_capacity_from_far_away(start: float) -> None:
    search, found = run(Target(queue(20)), settings(start_load=start))
    assert found.status is Status.FOUND
    assert found.load is not None
    assert found.load == pytest.approx(20, rel=0.03)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 20 < found.high
    assert found.high - found.low <= 0.05 * found.load
    assert found.limiting_slo == "p99(ttft)<=1s"
    assert found.operating_load == pytest.approx(0.8 * found.low)
    assert sum(probe.elapsed_s for probe in search.probes) <= 6000


def test_the_interval_covers_the_truth_in_nine_of_ten_searches() -> None:
    covered, errors, runs = 0, [], 30
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        truth, slope, crowd = float(rng.uniform(5, 50)), float(rng.uniform(6, 40)), int(rng.integers(1, 40))
        chosen = settings(start_load=truth * math.exp(rng.uniform(-1, 1)), budget_s=40_000 / truth)
        _, found = run(Target(queue(truth, slope), crowd=crowd, seed=seed), chosen)
        assert found.load is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= truth <= found.high
        errors.append(abs(found.load / truth - 1))
    assert covered >= 0.9 * runs
    assert np.median(errors) < 0.02


def test_a_budget_is_kept_and_the_interval_says_what_it_cost() -> None:
    target = Target(queue(20), crowd=30)
    search, found = run(target, settings(budget_s=400))
    assert found.status is Status.IMPRECISE
    assert sum(probe.elapsed_s for probe in search.probes) <= 400 + 1
    assert found.load is not None
    assert found.low is not None
    assert found.high is not None
    assert found.high - found.low > 0.05 * found.load
    assert "400 s" in found.why or "probes" in found.why


def test_a_flooded_server_shows_where_to_go_on() -> None:
    search, _ = run(Target(queue(20), saturation=24), settings(start_load=500))
    assert search.probes[1].load == pytest.approx(500 / 8)
    assert search.probes[2].load == pytest.approx(0.75 * 24)


def test_it_ends_where_the_lowest_load_misses() -> None:
    search, found = run(Target(queue(1.0)), settings(start_load=8, min_load=4))
    assert (found.status, found.load, found.low, found.high) == (Status.BELOW_MINIMUM, None, None, 4)
    assert found.why == "Already at the lowest load, 4, an SLO is missed."
    assert found.operating_load is None
    assert len(search.probes) == 2


def test_it_ends_where_the_highest_load_holds() -> None:
    search, found = run(Target(queue(100)), settings(start_load=8, max_load=20))
    assert (found.status, found.load, found.low, found.high) == (Status.ABOVE_MAXIMUM, None, 20, None)
    assert found.held_load == 20
    assert found.operating_load == pytest.approx(16)
    assert [probe.load for probe in search.probes] == [8, 16, 20]


@pytest.mark.parametrize(("share", "probes"), [(0.0, 1), (0.008, 3)], ids=["clear", "near the limit"])
def test_a_clear_hold_at_the_highest_load_is_enough(share: float, probes: int) -> None:
    target = Target(lambda _: share)
    target.rng = SimpleNamespace(poisson=lambda crowds, batches: [round(crowds * batches), *[0] * (batches - 1)])  # type: ignore[assignment]
    easy = settings(start_load=1, max_load=1, max_probes=3, budget_s=1000, min_requests=1000)
    search, found = run(target, easy)
    assert (found.status, found.low) == (Status.ABOVE_MAXIMUM, 1)
    assert len(search.probes) == probes


def test_too_few_probes_to_enclose_it_are_said() -> None:
    _, found = run(Target(queue(1000)), settings(start_load=5, max_probes=3))
    assert found.status is Status.UNKNOWN
    assert found.why == "All 3 probes were used up. Every probe up to 20 met the SLOs."
    assert (found.load, found.missed_load, found.held_load) == (None, None, 20)


def test_nothing_measured_ends_it() -> None:
    search = CapacitySearch(settings())
    probe = search.next_probe()
    assert probe is not None
    nothing = Target(queue(20)).probe(probe).to_json() | {"slos": []}
    search.add(ProbeResult.from_json(nothing))
    assert search.next_probe() is None
    assert search.result().status is Status.UNKNOWN


def test_users_are_whole() -> None:
    target = Target(queue(12.4, slope=40))
    search, found = run(target, settings(quantity=Quantity.USERS, start_load=3, min_load=1, budget_s=60_000))
    assert all(probe.load == int(probe.load) for probe in search.probes)
    assert found.status is Status.FOUND
    assert found.low is not None
    assert found.high is not None
    assert found.low <= 12.4 <= found.high
    assert found.high - found.low <= 1
    assert found.operating_load == int(0.8 * found.low)


def test_it_goes_on_from_the_probes_done_before() -> None:
    chosen, target = settings(), Target(queue(20), crowd=5, seed=3)
    search = CapacitySearch(chosen)
    for _ in range(4):
        probe = search.next_probe()
        assert probe is not None
        search.add(target.probe(probe))
    kept = json.loads(json.dumps([result.to_json() for result in search.probes]))
    resumed = CapacitySearch(chosen, [ProbeResult.from_json(row) for row in kept])
    assert resumed.next_probe() == search.next_probe()
    assert resumed.result() == search.result()


def test_a_probe_that_holds_above_one_that_missed_is_kept_and_looked_into() -> None:
    target = Target(queue(20))
    search = CapacitySearch(settings())
    for load, share in ((10.0, 0.0), (18.0, 0.03), (24.0, 0.005), (30.0, 0.9)):
        target.share = lambda _, share=share: share  # type: ignore[misc]
        search.add(target.probe(Probe(load=load, settle_s=10, window_s=100, empty_first=False, why="given")))
    probe = search.next_probe()
    assert probe is not None
    assert probe.load == pytest.approx(math.sqrt(18 * 24), rel=1e-3)
    assert probe.why == "between a probe that missed and one above it that held"
    found = search.result()
    assert found.notes == ("The probe at 24 met the SLOs although the one at 18 had not; both count.",)
    assert found.low is not None
    assert found.high is not None
    assert found.high / found.low > 1.2


def test_the_operating_point_is_the_knee_where_that_is_lower() -> None:
    search, found = run(Target(queue(180)), settings(start_load=50, budget_s=2000))
    # Power load * (1 - load / 200) is largest at 100.
    assert {probe.load for probe in search.probes} >= {50, 100, 200}
    assert found.knee is not None
    assert (found.knee.load, found.operating_load) == (100, 100)
    assert found.operating_why == "the knee, above which latency grows faster than throughput"


def test_settings_that_cannot_work_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="min_load is 0; it must be above 0") as caught:
        settings(min_load=0, budget_s=-1)
    assert len(str(caught.value).split("\n")) == 2
    with pytest.raises(ValueError, match="start_load 5 is outside of 6 to inf"):
        settings(min_load=6)


def test_a_lower_load_after_a_miss_begins_with_an_empty_server() -> None:
    search, _ = run(Target(queue(20)), settings(start_load=45))
    resumed = CapacitySearch(settings(start_load=45))
    for result in search.probes:
        probe = resumed.next_probe()
        assert probe is not None
        missed_above = bool(resumed.probes) and not resumed.probes[-1].held and resumed.probes[-1].load > probe.load
        assert probe.empty_first is missed_above
        resumed.add(result)
    assert search.probes[1].load < search.probes[0].load
