"""A start that is stopped before its run begins comes to nothing, and leaves nothing to the next one."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pyarrow.parquet as pq
import pytest

from tests.run.simulated import FAST, free_port, get, processes, simserver, start_locust, wait_for_web

pytestmark = pytest.mark.timeout(180)

TWO_CLASSES = """
from locust import task
from vllm_locust import ChatUser, OpenLoopChatUser

class Chat(ChatUser):
    @task
    def ask_next(self):
        self.ask(self.next_prompt())

class Planned(OpenLoopChatUser):
    @task
    def ask_next(self):
        self.ask(self.next_prompt())
"""
CLOSED = {"user_classes": "Chat", "user_count": "4", "spawn_rate": "4"}
OPEN = {"user_classes": "Planned", "user_count": "8", "spawn_rate": "8", "rate": "20", "run_time": "2s"}


class Site:
    def __init__(self, web: str) -> None:
        self.web = web
        self._pool = ThreadPoolExecutor(1)

    def stats(self) -> Any:
        return json.loads(get(f"{self.web}/llm/stats.json"))

    def swarm(self, fields: dict[str, str]) -> Future[Any]:
        return self._pool.submit(lambda: json.loads(get(f"{self.web}/swarm", urlencode(fields).encode())))

    def stop(self) -> None:
        get(f"{self.web}/stop", b"")

    def await_that(self, condition: Any) -> Any:
        deadline = time.monotonic() + 60
        while not condition(stats := self.stats()):
            assert time.monotonic() < deadline, stats
            time.sleep(0.05)
        return stats


@pytest.mark.parametrize("kind", ["workers", "alone"])
def test_a_stop_before_the_run_begins_ends_the_start(tmp_path: Path, kind: str) -> None:
    locustfile = tmp_path / "two.py"
    locustfile.write_text(TWO_CLASSES, encoding="utf-8")
    port = free_port()
    web = f"http://127.0.0.1:{port}"
    flags = ("--web-host", "127.0.0.1", "--web-port", str(port), "--run-dir", "run", "--class-picker")
    more = ("--warmup-requests", "0", "--max-tokens", "5", *(processes(1) if kind == "workers" else ()))
    with simserver(tmp_path, *FAST) as server:
        load = start_locust(tmp_path, server.url, *flags, *more, locustfile=str(locustfile))
        try:
            wait_for_web(web, load)
            site = Site(web)
            site.await_that(lambda stats: stats["workers_connected"] in (1, None))
            # While the server is asked, which does not answer yet.
            server.process.send_signal(signal.SIGSTOP)
            answer = site.swarm(CLOSED)
            site.await_that(lambda stats: stats["state"] == "preparing")
            site.stop()
            server.process.send_signal(signal.SIGCONT)
            assert answer.result(60)["problems"] == ["it was stopped before it began"]
            # While the store and the workers are brought up: the run has its directory by then.
            answer = site.swarm(CLOSED)
            while not list(tmp_path.glob("run*")):
                time.sleep(0.01)
            site.stop()
            assert answer.result(60)["problems"] == ["it was stopped before it began"]
            assert site.stats()["state"] == "ready"
            assert site.stats()["run"] is None
            assert server.truth() == []
            assert site.swarm(OPEN).result(60)["success"] is True
            result = site.await_that(lambda stats: stats["state"] == "ready" and stats["result"])["result"]
        finally:
            os.killpg(load.pid, signal.SIGKILL)
            output = load.communicate()[0]
    assert "Traceback" not in output, output
    tasks = pq.read_table(Path(tmp_path / result["directory"]) / "requests.parquet")["task"].to_pylist()
    assert set(tasks) == {"Planned"}
    assert len(tasks) > 15
