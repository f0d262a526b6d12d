"""Open-loop runs that lose a worker: its share of the schedule, and nobody else's, is lost until another takes it."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.run.simulated import FAST, Distributed, planned_unix_ns, simserver, wait_for_text

pytestmark = pytest.mark.timeout(120)

SHORT = ("--max-tokens", "5", "--force-length")


def test_what_a_lost_worker_should_have_sent_is_lost_and_no_more(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        load = ("--rate", "40", "-t", "6s", "--arrival", "constant", "--warmup-requests", "0", *SHORT)
        test = Distributed(tmp_path, server.url, 2, *load, "--drain-timeout", "3s")
        wait_for_text(server.truth_log, 100)
        killed_unix_ns = time.time_ns()
        os.killpg(test.workers[0].pid, signal.SIGKILL)
        run = test.end()
    described, rows = run.json("run.json"), run.requests()
    planned = planned_unix_ns(run)
    (dead,) = described["workers"]["missing"]
    (share,) = (one["share"] for one in described["shares"] if one["worker_id"] == dead)
    sent = {row["arrival"] for row in rows}
    assert len(sent) == len(rows)
    assert {number for number in range(240) if number % 2 != share} <= sent, "the other one is not touched"
    lost = pq.read_table(run.run_dir / "arrivals.parquet").to_pylist()
    assert {one["status"] for one in lost} == {"lost"}
    assert {one["number"] for one in lost} == set(range(240)) - sent
    # It ships its records once a second, so those of its last second are gone with it.
    assert all(planned[one["number"]] > killed_unix_ns - 2_500_000_000 for one in lost), run.output
    assert {"workers_missing", "arrivals_lost"} <= {reason["code"] for reason in run.summary["verdict"]["reasons"]}


def test_a_replacement_takes_the_share_from_a_stated_arrival_on(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        load = ("--rate", "40", "-t", "20s", "--arrival", "constant", "--warmup-requests", "0", *SHORT)
        test = Distributed(tmp_path, server.url, 2, *load, "--drain-timeout", "3s", "-u", "40")
        wait_for_text(server.truth_log, 60)
        test.add_worker()
        wait_for_text(server.truth_log, 160)
        os.killpg(test.workers[0].pid, signal.SIGKILL)
        run = test.end()
    described, rows = run.json("run.json"), run.requests()
    (dead,) = described["workers"]["missing"]
    first, second, taken = described["shares"]
    assert "stands by for a share of the schedule" in run.output
    assert {first["first_arrival"], second["first_arrival"]} == {0}
    (share,) = (one["share"] for one in (first, second) if one["worker_id"] == dead)
    (other,) = (one["worker_id"] for one in (first, second) if one["worker_id"] != dead)
    assert taken["share"] == share
    assert taken["first_arrival"] % 2 == share
    by_worker: dict[str, list[int]] = {}
    for row in rows:
        by_worker.setdefault(row["worker_id"], []).append(row["arrival"])
    assert sorted(by_worker[other]) == list(range(1 - share, 800, 2)), "the other one is not touched"
    assert sorted(by_worker[taken["worker_id"]]) == list(range(taken["first_arrival"], 800, 2)), run.output
    assert max(by_worker[dead]) < taken["first_arrival"]
    assert len({row["prompt_id"] for row in rows}) == len(rows), "with the prompts that belong to its arrivals"


def test_a_silent_worker_that_comes_back_stops_where_another_has_its_share(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        load = ("--rate", "20", "-t", "24s", "--arrival", "constant", "--warmup-requests", "0", *SHORT, "-u", "40")
        test = Distributed(tmp_path, server.url, 2, *load, "--drain-timeout", "3s")
        wait_for_text(server.truth_log, 30)
        test.add_worker()
        wait_for_text(server.truth_log, 60)
        os.kill(test.workers[0].pid, signal.SIGSTOP)
        wait_for_text(server.truth_log, 220)
        os.kill(test.workers[0].pid, signal.SIGCONT)
        run = test.end()
    described, rows = run.json("run.json"), run.requests()
    *_, taken = described["shares"]
    share, first = taken["share"], taken["first_arrival"]
    (silent,) = (one["worker_id"] for one in described["shares"][:2] if one["share"] == share)
    assert silent in described["workers"]["missing"], run.output
    assert silent in described["workers"]["flushed"], "it has stopped in order"
    sent = Counter(row["arrival"] for row in rows if row["worker_id"] != silent)
    assert sent == Counter({k: 1 for k in range(480) if k % 2 != share or k >= first})
    doubled = {row["arrival"] for row in rows if row["worker_id"] == silent and row["arrival"] >= first}
    # What was overdue when it woke up, before it found out: it must not go on.
    woke_unix_ns = max(row["sent_unix_ns"] for row in rows if row["worker_id"] == silent)
    planned = planned_unix_ns(run)
    assert all(planned[number] <= woke_unix_ns for number in doubled)
    assert woke_unix_ns < planned[-1] - 1_000_000_000


DIFFERING = """
import sys
from locust import task
from vllm_locust import OpenLoopChatUser
from vllm_locust.arrival import Schedule

class OpenLoop(OpenLoopChatUser):
    @task
    def ask_next(self):
        self.ask(self.next_prompt())

if "--worker" in sys.argv:
    Schedule.fingerprint = lambda self: "another"
"""


def test_a_worker_that_computes_another_schedule_is_refused_before_any_load(tmp_path: Path) -> None:
    locustfile = tmp_path / "differing.py"
    locustfile.write_text(DIFFERING)
    with simserver(tmp_path, *FAST) as server:
        run = Distributed(tmp_path, server.url, 1, "--rate", "5", "-t", "1s", locustfile=str(locustfile)).end()
        assert server.truth() == []
    assert run.exit_code == 2, run.output
    assert "computes another schedule than the master, likely with another release of numpy" in run.output


def test_fewer_slots_than_workers_are_refused_before_any_load(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        run = Distributed(tmp_path, server.url, 2, "--rate", "5", "-t", "1s", "-u", "1").end()
        assert server.truth() == []
    assert run.exit_code == 2, run.output
    assert "-u 1: each of the 2 workers needs a slot at least" in run.output
