"""Loads that are chosen in the start form of the web UI: what it sends to /swarm starts the run that it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.run.simulated import (
    CHAT,
    FAST,
    OPEN_LOOP,
    LocustRun,
    end_of,
    free_port,
    get,
    simserver,
    start_locust,
    wait_for_text,
    wait_for_web,
)

pytestmark = pytest.mark.timeout(180)

SHAPE_OF_RATE = """
quantity: rate
stages:
  - {shape: hold, value: 20, length: 1s}
  - {shape: step, from: 20, to: 40, step: 20, length: 1s}
"""
SHAPE_OF_USERS = """
quantity: users
stages:
  - {shape: hold, value: 2, length: 1s}
  - {shape: hold, value: 5, length: 1s}
"""


class StartForm:
    """The form sends all of its fields, those that were left empty too."""

    def __init__(self, web: str, directory: Path, load: subprocess.Popen[str], host: str) -> None:
        self._web, self._directory, self._load, self._host = web, directory, load, host

    def swarm(self, **filled: Any) -> None:
        empty = dict.fromkeys(("rate", "rate_stages", "user_stages", "shape", "arrival", "burstiness", "run_time"), "")
        common = {"user_count": 8, "spawn_rate": 8, "host": self._host, "warmup_requests": 4}
        get(f"{self._web}/swarm", urlencode(empty | common | filled).encode())

    def _state(self) -> str:
        return str(json.loads(get(f"{self._web}/stats/requests"))["state"])

    def stop(self) -> None:
        get(f"{self._web}/stop", b"")

    def run(self, name: str, **filled: Any) -> LocustRun:
        self.swarm(**filled)
        run = LocustRun(0, "", self._directory / name)
        deadline = time.monotonic() + 40
        while not (run.run_dir / "report.html").exists() or self._state() != "stopped":
            if self._load.poll() is not None or time.monotonic() > deadline:
                os.killpg(self._load.pid, signal.SIGKILL)
                raise AssertionError(f"no report in {run.run_dir}: {self._load.communicate()[0]}")
            time.sleep(0.1)
        return run


@contextmanager
def start_form(directory: Path, url: str, locustfile: str, *own: str) -> Iterator[StartForm]:
    port = free_port()
    web = f"http://127.0.0.1:{port}"
    flags = ("--web-host", "127.0.0.1", "--web-port", str(port), "--max-tokens", "5", "--force-length")
    load = start_locust(directory, url, *flags, "--run-dir", "run", *own, locustfile=locustfile)
    try:
        wait_for_web(web, load)
        yield StartForm(web, directory, load, url)
        load.send_signal(signal.SIGTERM)
        end_of(load, directory, 40)
    finally:
        if load.poll() is None:
            os.killpg(load.pid, signal.SIGKILL)
            load.communicate()


def stages(run: LocustRun, value: str) -> list[tuple[float, float]]:
    """The load of each stage, and how long it was."""
    described = run.json("run.json")["stages"]
    rows = run.requests()
    assert all(any(row["stage"] == stage["stage"] for row in rows) for stage in described)
    return [(stage[value], (stage["end_unix_ns"] - stage["start_unix_ns"]) / 1e9) for stage in described]


def test_stages_of_rate_and_a_shape_of_rate(tmp_path: Path) -> None:
    shape = tmp_path / "shape.yaml"
    shape.write_text(SHAPE_OF_RATE)
    own = ("--shape", str(shape))
    with simserver(tmp_path, *FAST) as server, start_form(tmp_path, server.url, OPEN_LOOP, *own) as form:
        by_flag = form.run("run", rate_stages="20:1s,40:1s", user_count=16)
        by_file = form.run("run-2", shape=str(shape), arrival="constant")
        again = form.run("run-3", rate="30", run_time="2s")
        form.swarm(shape="spike")
        wait_for_text(server.truth_log, len(server.truth()) + 10)
        form.stop()
    assert stages(by_flag, "offered_rps") == [(20, 1.0), (40, 1.0)]
    assert by_flag.json("run.json")["slots"] == 16
    assert stages(by_file, "offered_rps") == [(20, 1.0), (20, 1.0), (40, 1.0)]
    assert by_file.json("run.json")["schedule"]["process"] == "constant"
    assert by_file.json("run.json")["slots"] == 8
    assert stages(again, "offered_rps") == [(30, 2.0)], "nothing of the runs before is left"
    assert again.json("run.json")["schedule"]["process"] == "poisson"
    shipped = LocustRun(0, "", tmp_path / "run-4").json("run.json")
    assert (shipped["stages"][0]["offered_rps"], shipped["stopped_early"] is None) == (2, False)


def test_stages_of_users_and_a_shape_of_users(tmp_path: Path) -> None:
    shape = tmp_path / "shape.yaml"
    shape.write_text(SHAPE_OF_USERS)
    own = ("--shape", str(shape))
    with simserver(tmp_path, *FAST) as server, start_form(tmp_path, server.url, CHAT, *own) as form:
        by_flag = form.run("run", user_stages="3:1s,6:1s,1:1s")
        by_file = form.run("run-2", shape=str(shape))
        form.swarm(user_stages="3:1s", rate="4")
        form.swarm(rate_stages="3:1s")
        form.swarm(shape="/nowhere.yaml")
        again = form.run("run-3", user_count=4, run_time="2s")
        form.swarm(user_stages="3:60s")
        wait_for_text(server.truth_log, len(server.truth()) + 500)  # the master hears of the warm-up once a second
        form.stop()
    assert stages(by_flag, "users") == [(3, 1.0), (6, 1.0), (1, 1.0)]
    assert stages(by_file, "users") == [(2, 1.0), (5, 1.0)]
    assert len({row["user_id"] for row in again.requests()}) == 4
    stopped = LocustRun(0, "", tmp_path / "run-4")
    assert stopped.json("run.json")["stopped_early"] is not None
    assert [stage["users"] for stage in stopped.json("run.json")["stages"]] == [3]
