"""Reasons of the verdict, provoked in whole runs; a run in which nothing is wrong has none.

Elsewhere: workers that are gone in ``test_joining`` and ``test_share_owners``, a clock that is set in
``test_clocks``, a run that measured nothing or was stopped in ``test_endings``, full slots in
``test_coordinated_omission``, telemetry in ``test_gpu_telemetry``, what is lost or led astray on the way in
``test_verdict_losses``, and each reason alone in ``tests/verdict/test_judge.py``.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.run.simulated import (
    CHAT,
    FAST,
    OPEN_LOOP,
    TRACE_REPLAY,
    Distributed,
    LocustRun,
    end_of,
    environment,
    run_locust,
    simserver,
    start_locust,
    wait_for_text,
)
from tests.store.servers import Server

pytestmark = pytest.mark.timeout(180)

SHORT = ("--max-tokens", "5", "--force-length")
HEADLESS = ("--headless", "--only-summary", "--run-dir", "run")


def reasons(run: LocustRun) -> dict[str, str]:
    """The severity of each."""
    return {reason["code"]: reason["severity"] for reason in run.summary["verdict"]["reasons"]}


def merge(directory: Path, *arguments: str) -> int:
    command = [sys.executable, "-m", "vllm_locust", "merge", "run", *arguments]
    return subprocess.run(command, cwd=directory, env=environment(), timeout=60, check=False).returncode


NEIGHBOURS = {"run_delay", "coalesced", "schedule_lag", "receive_lag"}
"""What a busy machine alone can bring about."""


OTHERS_AT_MOST = 0.05
"""Of all cores' time: what processes that are not the test's own may use, and a hypervisor take, on a quiet machine."""


class Machine:
    """How much of this machine others use, by the kernel's own counters and nothing that a run says of itself."""

    def __init__(self) -> None:
        self._began = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        """Seconds of all cores: taken by anybody, and in all."""
        tick = os.sysconf("SC_CLK_TCK")
        line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
        user, nice, system, idle, iowait, irq, softirq, steal = (int(word) / tick for word in line.split()[1:9])
        taken = user + nice + system + irq + softirq + steal
        mine = sum(
            used.ru_utime + used.ru_stime
            for used in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
        )
        return taken - mine, taken + idle + iowait

    def share_of_others(self) -> float:
        others, whole = (now - before for now, before in zip(self._now(), self._began, strict=True))
        return others / whole


@pytest.mark.parametrize("locustfile", [OPEN_LOOP, CHAT], ids=["open", "closed"])
def test_a_clean_run_has_none(tmp_path: Path, locustfile: str) -> None:
    load = ("--rate-stages", "10:2s,20:2s") if locustfile == OPEN_LOOP else ("-u", "2", "-r", "2", "-t", "3s")
    others: list[float] = []
    for attempt in range(4):
        machine = Machine()
        directory = tmp_path / str(attempt)
        directory.mkdir()
        with simserver(directory, "--first-token-ms", "50", "--token-interval-ms", "20") as server:
            run = run_locust(
                directory,
                server.url,
                *load,
                *SHORT,
                "--slo",
                "p50(e2e)<=5s",
                "--warmup-requests",
                "5",
                locustfile=locustfile,
            )
        others.append(machine.share_of_others())
        found = reasons(run)
        assert found.keys() <= NEIGHBOURS or others[-1] > OTHERS_AT_MOST, run.output
        if not found:
            break
    else:
        assert sum(share <= OTHERS_AT_MOST for share in others) < 2, (found, others)
        pytest.skip(f"others use {', '.join(f'{share:.0%}' for share in others)} of this machine: {found}")
    assert run.exit_code == 0, run.output
    assert (run.run_dir / "report.txt").read_text().startswith("VALID: ")


@contextmanager
def hogs(count: int, core: int) -> Iterator[None]:
    """Processes that take all they can get of a core."""
    code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    # A session each: the kernel shares a core among sessions first.
    started = [subprocess.Popen([sys.executable, "-c", code], start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_cpu_hog_beside_the_worker(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    with simserver(tmp_path, *FAST) as server:
        load = start_locust(
            tmp_path, server.url, *HEADLESS, "-u", "40", "-r", "40", "-t", "5s", "--warmup-requests", "50"
        )
        os.sched_setaffinity(load.pid, {core})
        wait_for_text(server.truth_log, 60)
        with hogs(3, core):
            run = end_of(load, tmp_path)
    assert reasons(run)["run_delay"] == "degraded", run.output
    assert "A worker waited for a core" in (run.run_dir / "report.txt").read_text()


BLOCKING = """
from gevent import monkey
from locust import task
from vllm_locust import OpenLoopChatUser

block = monkey.get_original("time", "sleep")

class OpenLoop(OpenLoopChatUser):
    @task
    def ask_next(self):
        number = self._due.number
        if number == 85:
            block(1.2)
        elif number % 10 == 0:
            block(0.25)
        self.ask(self.next_prompt())
"""


def test_a_dispatcher_that_is_late(tmp_path: Path) -> None:
    """A locustfile that blocks the loop: again and again, and for a second over the end of a stage."""
    locustfile = tmp_path / "blocking.py"
    locustfile.write_text(BLOCKING)
    load = ("--rate-stages", "20:5s,40:2s", "--arrival", "constant", "--warmup-requests", "0")
    with simserver(tmp_path, *FAST) as server:
        run = run_locust(
            tmp_path, server.url, *load, "--max-tokens", "20", "--force-length", locustfile=str(locustfile)
        )
    found = reasons(run)
    for code in ("schedule_lag", "rate_missed", "stage_rate", "arrival_process"):
        assert found[code] == "invalid", run.output
    assert found["receive_lag"] == "degraded"
    assert "coalesced" in found
    assert "slots_full" not in found
    assert run.exit_code == 4
    assert (run.run_dir / "report.txt").read_text().startswith("INVALID: ")


ASKS_AGAIN = """
from locust import task
from vllm_locust import OpenLoopChatUser

class OpenLoop(OpenLoopChatUser):
    @task
    def ask_twice(self):
        self.ask(self.next_prompt())
        self.ask(self.next_prompt())
"""


def test_what_a_task_sends_after_its_arrivals_request_is_none(tmp_path: Path) -> None:
    locustfile = tmp_path / "asks_again.py"
    locustfile.write_text(ASKS_AGAIN)
    load = ("--rate-stages", "10:2s,20:2s", "--warmup-requests", "5", *SHORT)
    with simserver(tmp_path, *FAST) as server:
        run = run_locust(tmp_path, server.url, *load, locustfile=str(locustfile))
    assert reasons(run).keys() <= NEIGHBOURS, run.output
    for number, stage in enumerate(run.summary["stages"]):
        planned = sum(row["stage"] == number and row["arrival"] is not None for row in run.requests())
        assert stage["delivery"]["planned"] == planned
        assert stage["delivery"]["sent"] == pytest.approx(planned, abs=2)
        assert stage["requests"]["attempted"] == pytest.approx(2 * planned, abs=2)


BUSY = """
import gc
import time
import gevent
from locust import task
from vllm_locust import ChatUser

def burn():
    end = time.monotonic() + 7
    while time.monotonic() < end:
        gc.collect()
        until = time.monotonic() + 0.03
        while time.monotonic() < until:
            pass
        gevent.sleep(0.0005)

class Chat(ChatUser):
    kept = None

    @task
    def ask_next(self):
        if Chat.kept is None:
            Chat.kept = [[number] for number in range(500_000)]
            gevent.spawn(burn)
        self.ask(self.next_prompt())
"""


def test_a_worker_that_is_busy_with_itself(tmp_path: Path) -> None:
    """Its own work takes its core, its garbage stops it, and it stamps what comes whenever it gets to it."""
    locustfile = tmp_path / "busy.py"
    locustfile.write_text(BUSY)
    load = ("-u", "4", "-r", "4", "-t", "5s", "--warmup-requests", "4", "--transport", "sse", *SHORT)
    with simserver(tmp_path, *FAST) as server:
        run = run_locust(tmp_path, server.url, *load, locustfile=str(locustfile))
    found = reasons(run)
    assert found["user_stamps"] == "invalid", run.output
    assert found["gc_pause"] == "degraded"
    # It can use a whole core only where the machine has one for it.
    assert "cpu_saturated" in found or "run_delay" in found


def test_answers_that_leave_something_open(tmp_path: Path) -> None:
    """Failures beyond what is allowed, tokens counted in two ways, and an SLO on what no answer has."""
    faults = ("--fault", "status:share=0.3", "--fault", "no_usage:share=0.5")
    load = ("-u", "4", "-r", "4", "-t", "2s", "--warmup-requests", "4", "--token-detail", "off", "--max-tokens", "1")
    with simserver(tmp_path, *FAST, *faults, "--seed", "3") as server:
        run = run_locust(tmp_path, server.url, *load, "--slo", "p50(tpot)<=1s")
    found = reasons(run)
    for code in ("too_many_failures", "token_source_mixed", "slo_undecided"):
        assert found[code] == "degraded", run.output
    assert run.exit_code == 1


def test_a_server_that_reports_no_usage(tmp_path: Path) -> None:
    load = ("-u", "2", "-r", "2", "-t", "1s", "--warmup-requests", "2", *SHORT)
    with simserver(tmp_path, *FAST, "--fault", "no_usage:share=1") as server:
        run = run_locust(tmp_path, server.url, *load, "--token-detail", "off")
    assert reasons(run)["tokens_are_chunks"] == "degraded", run.output


def test_a_trace_that_is_gone_at_the_merge(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "\n".join(json.dumps({"timestamp": at, "input_length": 9, "output_length": 3}) for at in (0, 9, 99))
    )
    (tmp_path / "w.yaml").write_text(f"kind: trace\nfile: {trace}\n")
    flags = ("--arrival", "trace", "--workload", "w.yaml", "-u", "4", "--warmup-requests", "0")
    with simserver(tmp_path, *FAST) as server:
        run = run_locust(tmp_path, server.url, *flags, locustfile=TRACE_REPLAY)
    assert "arrivals_unchecked" not in reasons(run), run.output
    assert [row["phase"] for row in run.requests()] == ["window"] * 3, "the last arrival too"
    trace.unlink()
    merge(tmp_path)
    assert reasons(run)["arrivals_unchecked"] == "degraded"


FAR_AWAY = """
import sys
from pathlib import Path
from locust import task
from vllm_locust import ChatUser
from vllm_locust.load import worker
from vllm_locust.run import controller, worker_side

# Both wait longer for a Redis that may come back.
worker.FLUSH_TIMEOUT_NS = 3_000_000_000
controller.RECORDER_TIMEOUT_S = 6

class Chat(ChatUser):
    @task
    def ask_next(self):
        self.ask(self.next_prompt())

config = worker_side.ShipperConfig
if "--worker" in sys.argv:
    worker_side.ShipperConfig = lambda worker_id, spool_dir: config(worker_id=worker_id, spool_dir=Path("{spool}"))
"""


def test_redis_is_gone(tmp_path: Path) -> None:
    """What a worker of another host has left lies there, on its disk, until a merge gets it."""
    locustfile = tmp_path / "far_away.py"
    locustfile.write_text(FAR_AWAY.replace("{spool}", str(tmp_path / "elsewhere")))
    redis = Server()
    try:
        with simserver(tmp_path, *FAST) as server:
            load = ("-u", "4", "-r", "4", "-t", "5s", "--warmup-requests", "4", *SHORT)
            test = Distributed(tmp_path, server.url, 1, *load, "--redis-url", redis.url, locustfile=str(locustfile))
            wait_for_text(server.truth_log, 100)
            redis.kill()
            run = test.end()
            server.stop()
            sent = sorted(row["request_id"] for row in server.truth())
    finally:
        redis.close()
    assert reasons(run)["spool_left"] == "invalid", run.output
    assert run.exit_code == 1
    assert merge(tmp_path, "--spool", "elsewhere") in (0, 4)
    assert not {"spool_left", "records_lost"} & reasons(run).keys()
    assert sorted(row["request_id"] for row in run.requests()) == sent
