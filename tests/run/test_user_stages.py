"""Whole closed-loop runs whose number of users changes by plan."""

from __future__ import annotations

import os
import signal
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.run.simulated import (
    FAST,
    LocustRun,
    end_of,
    run_distributed,
    run_locust,
    simserver,
    start_locust,
    wait_for_text,
)

pytestmark = pytest.mark.timeout(120)

SLOW_ANSWERS = ("--max-tokens", "100", "--force-length", "--warmup-requests", "2")
"""0.4 s each, so that some are running whenever a stage ends."""


def concurrency(rows: list[dict[str, Any]], stage: dict[str, Any]) -> float:
    """The mean number of requests that were running in a stage."""
    start_ns, end_ns = stage["start_unix_ns"], stage["end_unix_ns"]
    spans = [(row["sent_unix_ns"], row["sent_unix_ns"] + row["done_ns"]) for row in rows]
    inside = sum(max(0, min(end, end_ns) - max(start, start_ns)) for start, end in spans)
    return float(inside / (end_ns - start_ns))


def assert_stages(run: LocustRun, users: list[int], lengths_s: list[float]) -> None:
    described, rows = run.json("run.json"), run.requests()
    stages = described["stages"]
    assert [stage["users"] for stage in stages] == users, run.output
    assert [(stage["end_unix_ns"] - stage["start_unix_ns"]) / 1e9 for stage in stages] == lengths_s
    assert (stages[0]["start_unix_ns"], stages[-1]["end_unix_ns"]) == tuple(described["window"].values())
    assert all(before["end_unix_ns"] <= after["start_unix_ns"] for before, after in pairwise(stages))
    assert Counter(row["outcome"] for row in rows) == {"ok": len(rows)}, "fewer users are no reason to abandon one"
    for stage in stages:
        # Between two requests a user is not busy for a few milliseconds; on the way down it ends its request first.
        beyond = 0.02 if stage["stage_kind"] == "hold" else 1.0
        assert 0.85 * stage["users"] < concurrency(rows, stage) <= stage["users"] + beyond, stage
        assert sum(row["stage"] == stage["stage"] for row in rows) > 0
    table = run.summary["stages"]
    assert [stage["requests"]["ok"] for stage in table] == [
        sum(row["stage"] == stage["stage"] for row in rows) for stage in stages
    ]


@pytest.mark.parametrize("workers", [0, 2], ids=["one process", "two workers"])
def test_users_go_up_and_down_by_plan(tmp_path: Path, workers: int) -> None:
    flags = ("--user-stages", "4:2s,8:2s,2:2s", *SLOW_ANSWERS)
    with simserver(tmp_path, *FAST) as server:
        run = (
            run_distributed(tmp_path, server.url, workers, flags)
            if workers
            else run_locust(tmp_path, server.url, *flags)
        )
        server.stop()
        assert {row["request_id"] for row in server.truth()} == {row["request_id"] for row in run.requests()}
    assert_stages(run, [4, 8, 2], [2.0, 2.0, 2.0])
    assert run.json("run.json")["stopped_early"] is None


def test_users_come_back_after_a_stage_without_any(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        run = run_locust(tmp_path, server.url, "--user-stages", "3:1s,0:1s,4:1s", *SLOW_ANSWERS)
    described = run.json("run.json")
    assert [stage["users"] for stage in described["stages"]] == [3, 0, 4], run.output
    assert described["stopped_early"] is None
    assert [sum(row["stage"] == number for row in run.requests()) > 0 for number in range(3)] == [True, False, True]


def test_a_ramp_of_users_is_a_stage_of_its_own(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        run = run_locust(tmp_path, server.url, "--user-stages", "2:1s,2-8:3s,8-2:3s", *SLOW_ANSWERS)
    stages = run.json("run.json")["stages"]
    assert [stage["stage_kind"] for stage in stages] == ["hold", "ramp", "ramp"]
    assert_stages(run, [2, 5, 5], [1.0, 3.0, 3.0])


def test_a_stop_cuts_the_running_stage(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        flags = ("--headless", "--only-summary", "--run-dir", "run", "--user-stages", "4:1s,8:60s,2:60s")
        load = start_locust(tmp_path, server.url, *flags, *SLOW_ANSWERS)
        wait_for_text(server.truth_log, 50)
        os.killpg(load.pid, signal.SIGINT)
        run = end_of(load, tmp_path, 40)
    described = run.json("run.json")
    assert described["stopped_early"] == "interrupted"
    assert [stage["users"] for stage in described["stages"]] == [4, 8], run.output
    assert described["stages"][1]["end_unix_ns"] == described["window"]["end_unix_ns"]
    assert described["stages"][1]["end_unix_ns"] - described["stages"][1]["start_unix_ns"] < 20 * 10**9


def test_users_by_plan_and_by_flag_are_refused(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        run = run_locust(tmp_path, server.url, "--user-stages", "2:1s", "-u", "5")
    assert run.exit_code == 2, run.output
    assert "-u with --user-stages: the stages say how many users there are; drop -u" in run.output
