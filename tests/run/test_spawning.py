"""Users are spawned over the workers there are, and none is stopped because another worker was lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.simulated import FAST, ROOT, Distributed, simserver, wait_for_text

pytestmark = pytest.mark.timeout(120)


def test_a_new_dispatcher_goes_on_where_the_one_before_has_got_to() -> None:
    driven = subprocess.run(
        [sys.executable, "-m", "tests.run.drive_spawning"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    dropped, in_a_ramp, joins = map(json.loads, driven.stdout.splitlines())
    assert dropped == [
        [{"a": 3, "b": 3, "c": 2}],
        [{"a": 4, "c": 4}],
        [{"a": 5, "c": 5}],
        [{"a": 2, "c": 2}],
        [{"a": 1, "c": 1}],
    ], "the last is of another run"
    assert in_a_ramp == [[{"a": 1, "b": 1}], [{"a": 2}, {"a": 6}], []]
    assert joins == [[{"a": 6}], [{"a": 3, "b": 3}], [{"a": 2, "b": 2, "c": 2}]]


SOON_DROPPED = """
import locust.runners
from locust import task
from vllm_locust import ChatUser

locust.runners.HEARTBEAT_DEAD_INTERNAL = -2

class Chat(ChatUser):
    @task
    def ask_next(self):
        self.ask(self.next_prompt())
"""
"""Locust drops a worker a second after it was found missing, and not a minute."""


def test_locust_drops_a_lost_worker_and_the_users_of_the_others_go_on(tmp_path: Path) -> None:
    locustfile = tmp_path / "soon_dropped.py"
    locustfile.write_text(SOON_DROPPED)
    load = ("-u", "6", "-r", "3", "-t", "14s", "--warmup-requests", "0", "--max-tokens", "20", "--force-length")
    with simserver(tmp_path, *FAST) as server:
        test = Distributed(tmp_path, server.url, 3, *load, "--drain-timeout", "5s", locustfile=str(locustfile))
        wait_for_text(server.truth_log, 150)
        os.killpg(test.workers[0].pid, signal.SIGKILL)
        run = test.end()
    workers, rows = run.json("run.json")["workers"], run.requests()
    survivors = [worker for worker in workers["ids"] if worker not in workers["missing"]]
    users = [{row["user_id"] for row in rows if row["worker_id"] == worker} for worker in survivors]
    # Two at first, and one of the dead worker's: ids are never given twice.
    assert users == [{0, 1, 2}] * 2, run.output
    last_ns = max(row["sent_unix_ns"] for row in rows)
    at_the_end = {(row["worker_id"], row["user_id"]) for row in rows if row["sent_unix_ns"] > last_ns - 2 * 10**9}
    assert len(at_the_end) == 6, "all users are there again"
