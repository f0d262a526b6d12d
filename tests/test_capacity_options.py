"""The flags of a capacity search."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_locust.capacity_options import CAPACITY_FLAGS, CapacityOrder, read_capacity_options, slo_problems
from vllm_locust.config import RunConfig
from vllm_locust.errors import UsageError
from vllm_locust.load_profile import Quantity

DEFAULTS = {flag[2:].replace("-", "_"): default for flag, default, _ in CAPACITY_FLAGS}


def read(**options: Any) -> tuple[CapacityOrder | None, list[str]]:
    problems: list[str] = []
    return read_capacity_options(DEFAULTS | options, problems), problems


def order(**options: Any) -> CapacityOrder:
    found, problems = read(**options)
    assert found is not None, problems
    assert not problems
    return found


def test_defaults() -> None:
    settings = order(capacity="rate").settings
    assert (settings.quantity, settings.start_load, settings.min_load, settings.max_load) == ("rate", 8, 0.08, None)
    assert (settings.max_probes, settings.precision, settings.budget_s) == (10, 0.05, 1200)
    assert (settings.shortest_window_s, settings.settle_s) == (40, 10)


@pytest.mark.parametrize(
    ("options", "loads"),
    [
        ({"max_load": "5"}, (5, 0.05, 5)),
        ({"min_load": "20"}, (20, 20, None)),
        ({"min_load": "2", "start_load": "4", "max_load": "9"}, (4, 2, 9)),
    ],
)
def test_the_start_lies_within_the_limits(options: dict[str, str], loads: tuple[float, ...]) -> None:
    settings = order(capacity="rate", **options).settings
    assert (settings.start_load, settings.min_load, settings.max_load) == loads


def test_users_are_whole_and_one_is_the_least() -> None:
    found = order(capacity="users", start_load="12", budget="60s", probe_time="7s", settle_time="3s")
    assert (found.settings.start_load, found.settings.min_load, found.settings.settle_s) == (12, 1, 3)
    assert found.settings.shortest_window_s == 7
    assert (found.first_load.quantity, found.first_load.stages[0].name) == (Quantity.USERS, "12 users")
    assert read(capacity="users", start_load="2.5")[1] == ["--start-load: 2.5 users cannot be; write a whole number"]


def test_every_fault_is_told() -> None:
    bad = {"start_load": "x", "max_load": "-1", "max_probes": "0", "precision": "0", "budget": "soon"}
    _, problems = read(capacity="rate", **bad)
    assert [problem.partition(":")[0] for problem in problems] == [
        "--start-load",
        "--max-load",
        "--budget",
        "--max-probes",
        "--precision",
    ]
    assert read(capacity="rate", start_load="9", max_load="3")[1] == [
        "--capacity: start_load 9 is outside of 0.09 to 3; start in between"
    ]
    assert read(capacity="speed")[1] == ["--capacity: 'speed' is not one of rate, users"]


def test_flags_of_a_search_need_a_search() -> None:
    assert read() == (None, [])
    assert read(budget="5m", reset_prefix_cache=True)[1] == [
        "--budget, --reset-prefix-cache: only a search has it; give --capacity rate or --capacity users too"
    ]


@pytest.mark.parametrize(
    ("slos", "words"),
    [
        ((), "no SLO says from when on the load is too much"),
        (("ttft<=2s",), "no SLO says from when on the load is too much"),
        (("p99(connect)<=2s",), "connect is not known while a probe runs"),
        (("requests_per_s>=3",), "does not say from which load on the server is too slow"),
        (("ttft<=2s", "good_fraction>=1"), "which no probe can judge"),
    ],
)
def test_slos_that_bound_no_load(slos: tuple[str, ...], words: str) -> None:
    (problem,) = slo_problems(slos)
    assert words in problem


def test_slos_that_do() -> None:
    assert slo_problems(["ttft<=2s", "good_fraction>=0.99", "p99(chunk_gap)<=1s", "failed_fraction<=0.01"]) == []


def test_the_order_crosses_as_json() -> None:
    options = DEFAULTS | {"capacity": "rate", "reset_prefix_cache": True, "slo": ["p99(ttft)<=1s"], "max_load": "50"}
    config = RunConfig.from_options(options, host="http://h:1", run_time_s=None)
    assert config.capacity is not None
    assert config.capacity.reset_prefix_cache
    assert RunConfig.from_json(config.to_json()) == config
    assert config.open_loop
    assert config.profile == config.capacity.first_load


def test_a_search_sets_the_load_alone() -> None:
    options = DEFAULTS | {"capacity": "rate", "rate": "3", "slo": ["p99(ttft)<=1s"]}
    with pytest.raises(UsageError, match="--rate and --capacity: each of them sets the load"):
        RunConfig.from_options(options, host="http://h:1", run_time_s=None)
