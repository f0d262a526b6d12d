"""The capacity search against the simulated server's engine, whose true capacity is known from exhaustive simulation.

One search for each of some cases; all cases, many times, where VLLM_LOCUST_TEST_STUDY is set (see RESULTS.md for what
came of it).
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.simulation.cases import CASES
from tests.simulation.probing import Case, OfflineTarget, run_search
from tests.simulation.study import search_settings
from vllm_locust.capacity.probe import Probe
from vllm_locust.capacity.search import Capacity
from vllm_locust.load_profile import Quantity

STUDY = "VLLM_LOCUST_TEST_STUDY"
QUICK = ("max_num_seqs, p99(ttft)", "decoding, goodput", "KV cache, p99(ttft)", "two SLOs", "users, p95(tpot)")
SEED = 100
"""None of the study's seeds."""


def found(case: Case, seed: int) -> Capacity:
    search = run_search(case, search_settings(case, seed), seed)
    assert len(search.probes) <= 10
    assert sum(probe.elapsed_s for probe in search.probes) <= 1.1 * search.settings.budget_s
    return search.result()


def covers(case: Case, capacity: Capacity) -> bool:
    assert capacity.low is not None
    assert capacity.high is not None
    return capacity.low <= case.capacity <= capacity.high


@pytest.mark.parametrize("case", [case for case in CASES if case.name in QUICK], ids=lambda case: case.name)
def test_a_search_finds_the_true_capacity(case: Case) -> None:
    capacity = found(case, SEED)
    assert capacity.load == pytest.approx(case.capacity, rel=0.05)
    assert covers(case, capacity)


@pytest.mark.skipif(STUDY not in os.environ, reason=f"ten minutes of simulation; set {STUDY}=1")
@pytest.mark.timeout(3600)
def test_the_interval_covers_the_truth_in_nine_of_ten_searches() -> None:
    results = [(case, found(case, SEED + seed)) for case in CASES for seed in range(6)]
    errors = [abs((capacity.load or 0) / case.capacity - 1) for case, capacity in results]
    assert np.mean(np.array(errors) < 0.05) >= 0.95
    assert np.mean([covers(case, capacity) for case, capacity in results]) >= 0.9


def test_a_server_in_virtual_time_serves_what_it_is_asked() -> None:
    case = CASES[0]
    target = OfflineTarget(case, 0)
    quiet = target.probe(Probe(load=case.capacity / 2, settle_s=20, window_s=200, empty_first=False, why=""))
    assert quiet.requests == pytest.approx(100 * case.capacity, rel=0.15)
    assert quiet.completed_rps == pytest.approx(case.capacity / 2, rel=0.15)
    assert quiet.elapsed_s == pytest.approx(220, abs=20)
    assert sum(quiet.slos[0].samples) == quiet.requests
    assert quiet.held
    flooded = target.probe(Probe(load=4 * case.capacity, settle_s=5, window_s=200, empty_first=False, why=""))
    assert flooded.overloaded is not None
    assert flooded.window_s < 30
    assert not flooded.held


def test_users_in_virtual_time_are_as_many_as_asked() -> None:
    case = next(case for case in CASES if case.quantity is Quantity.USERS)
    one = OfflineTarget(case, 0).probe(Probe(load=1, settle_s=0, window_s=100, empty_first=False, why=""))
    # Alone, a request takes its prefill step and one step of 10.5 ms and a little for each further token.
    assert one.completed_rps == pytest.approx(1 / (0.015 + 39 * 0.0105), rel=0.1)
    assert one.achieved == 1
