"""Workers that cannot or will not take part in a run: it ends before it begins, and everyone says why."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.simulated import FAST, LocustRun, end_of, free_port, simserver, start_locust

pytestmark = pytest.mark.timeout(120)

LOAD = ("--headless", "--only-summary", "--run-dir", "run", "-u", "1", "-r", "1", "-t", "1s")


def start_pair(
    directory: Path, url: str, *worker_flags: str, **master_environment: str
) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    port = str(free_port())
    flags = ("--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--expect-workers", "1")
    master = start_locust(directory, url, *flags, *LOAD, **master_environment)
    return master, start_locust(
        directory, None, "--worker", "--master-host", "127.0.0.1", "--master-port", port, *worker_flags
    )


def end_both(
    directory: Path, master: subprocess.Popen[str], worker: subprocess.Popen[str]
) -> tuple[LocustRun, LocustRun]:
    try:
        return end_of(master, directory, 40), end_of(worker, directory, 40)
    finally:
        for process in (master, worker):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def test_a_refused_worker_says_why_on_its_own_host_too(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        master, worker = end_both(tmp_path, *start_pair(tmp_path, server.url, OPENAI_API_KEY="key"))
        assert server.truth() == []
    assert master.exit_code == 2, master.output
    reason = "this worker has no API key but the master has; set OPENAI_API_KEY or --api-key-file here"
    assert reason in master.output
    assert f"This worker cannot take part in the run: {reason}" in worker.output


def test_a_worker_that_leaves_while_it_is_prepared_is_not_waited_for(tmp_path: Path) -> None:
    """Its Redis takes the connection and never answers: time enough to leave."""
    with socket.create_server(("127.0.0.1", 0)) as silent, simserver(tmp_path, *FAST) as server:
        silent.settimeout(40)
        redis_url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        pair = start_pair(tmp_path, server.url, "--redis-url", redis_url)
        connection, _ = silent.accept()
        pair[1].send_signal(signal.SIGTERM)
        master, worker = end_both(tmp_path, *pair)
        connection.close()
        assert server.truth() == []
    assert master.exit_code == 1, master.output
    assert "workers left while they were prepared for the run: " in master.output
    assert worker.exit_code == 0, worker.output


LAST_WORDS = """
import json
from vllm_locust.aggregate import Snapshots
from vllm_locust.record import FlushReport
from vllm_locust.run.worker_side import flush_message
from vllm_locust.worker_message import read_last_words
from vllm_locust.run.workers import RunWorkers

words = flush_message(FlushReport("w", 1, 1, 1, None), "run", 0)
assert read_last_words(words) == words
workers = RunWorkers("run", None, Snapshots())
for name in ("last_seq", "durable_seq", "requests", "unstorable_values", "wall_clock_moved_ns"):
    for nonsense in (float("inf"), float("nan"), "many", None, [1]):
        workers.on_flushed("w", words | {name: nonsense}, at_the_end=True)
workers.on_flushed("w", float("inf"), at_the_end=True)
told = workers.to_json([])
print(json.dumps([told["flushed"], told["refused_messages"]]))
"""


def test_last_words_that_are_none_are_not_heeded() -> None:
    """In a process of its own: gevent patches it."""
    told = subprocess.run([sys.executable, "-c", LAST_WORDS], capture_output=True, text=True, timeout=60, check=False)
    assert json.loads(told.stdout) == [{}, {"vllm_locust.flushed": 5 * 5 + 1}], told.stderr
    assert told.stderr.count("A vllm_locust.flushed message of worker 'w' is not usable") == 1


HUNG = """
from types import SimpleNamespace
from vllm_locust.aggregate import Snapshots
from vllm_locust.record import FlushReport
from vllm_locust.run import workers
from vllm_locust.run.worker_side import flush_message

workers.READY_AT_THE_END_S = 0.2
messenger = SimpleNamespace(to_worker=lambda *_: None, worker_ids=lambda: ["hung", "late", "ready"])
run = workers.RunWorkers("run", messenger, Snapshots())
for worker in ("hung", "late", "ready"):
    run.prepare(worker, {})
answer = {"run_id": "run", "error": None, "schedule_fingerprint": None, "host": "h"}
other_run = {**answer, "run_id": "another", "error": "no"}
assert run.on_ready("late", other_run) is False and run.on_ready("stranger", answer) is False
assert run.on_ready("ready", answer) is True and run.refusal("ready") is None
looks = []

def look():
    looks.append(1)
    if len(looks) == 2:
        run.on_ready("late", answer)
    for worker in {2: ["ready"], 8: ["late"]}.get(len(looks), ()):
        run.on_flushed(worker, flush_message(FlushReport(worker, 1, 1, 1, None), "run", 0), at_the_end=True)

print(run.await_flushed(3_600_000_000_000, look))
"""


def test_the_end_does_not_wait_for_a_worker_that_never_gets_ready() -> None:
    told = subprocess.run([sys.executable, "-c", HUNG], capture_output=True, text=True, timeout=60, check=False)
    assert told.stdout == "['hung']\n", told.stderr


LATE_MESSAGES = """
import json
from types import SimpleNamespace
from vllm_locust.load.users import POST
from vllm_locust.record import FlushReport
from vllm_locust.run.messenger import DRAIN, FLUSHED
from vllm_locust.run.worker_side import WorkerSide

def load(run_id):
    return SimpleNamespace(
        assignment=SimpleNamespace(run_id=run_id),
        axis=SimpleNamespace(moved_ns=lambda: 0),
        drain=lambda: done.append(f"drained {run_id}") or FlushReport("w", 1, 1, 1, None),
        abandon=lambda: done.append(f"abandoned {run_id}"),
        snapshot=lambda sequence: {},
    )

done, handlers = [], {}
messenger = SimpleNamespace(
    on=handlers.__setitem__,
    to_master=lambda kind, payload: done.append(f"flushed {payload['run_id']}") if kind == FLUSHED else None,
)
side = WorkerSide(messenger, None, None)
POST.put(load("first"))
side.close()
POST.put(load("second"))
handlers[DRAIN]("m", {"run_id": "first"})
handlers[DRAIN]("m", {"run_id": "second"})
handlers[DRAIN]("m", {"run_id": "second"})
print(json.dumps([done, POST.worker]))
"""

NEVER_BEGUN = (
    LATE_MESSAGES.partition("side = ")[0]
    + """
from vllm_locust.run.messenger import ABANDON, PREPARE, READY

side = WorkerSide(messenger, None, None)
messenger.is_alone = False
messenger.to_master = lambda kind, payload: done.append(kind)
POST.put(load("first"))
handlers[ABANDON]("m", {"run_id": "another"})
handlers[ABANDON]("m", {"run_id": "first"})

def prepare(payload):
    # The master gives the run up while this worker is still at it.
    handlers[ABANDON]("m", {"run_id": "second"})
    POST.put(load("second"))

side._prepare = prepare
handlers[PREPARE]("m", {"run_id": "second"})
print(json.dumps([done, POST.worker]))
"""
)


def test_a_run_that_never_began_is_let_go_of() -> None:
    told = subprocess.run([sys.executable, "-c", NEVER_BEGUN], capture_output=True, text=True, timeout=60, check=False)
    assert json.loads(told.stdout) == [["abandoned first", "abandoned second"], None], told.stderr


def test_what_is_left_of_an_earlier_run_is_abandoned_and_its_drain_not_heeded() -> None:
    told = subprocess.run(
        [sys.executable, "-c", LATE_MESSAGES], capture_output=True, text=True, timeout=60, check=False
    )
    assert told.stdout == '[["abandoned first", "drained second", "flushed second"], null]\n', told.stderr


SNAPSHOTS = """
from types import SimpleNamespace
from vllm_locust.aggregate import RunAggregate, Snapshots
from vllm_locust.run.workers import RunWorkers

def snapshot(sequence, sent, worker_id="w"):
    return RunAggregate(sent=sent).to_message(worker_id, sequence)

snapshots, seen = Snapshots(), []
run = RunWorkers("run", SimpleNamespace(to_worker=lambda *_: None), snapshots)
run.prepare("w", {})
for told in (
    snapshot(9, 900),  # of the run before: its worker has not answered in this one yet
    "ready",
    snapshot(10, 5), snapshot(12, 7), snapshot(11, 6),  # out of order
    snapshot(12, 7), snapshot(12, 8),  # twice
    snapshot(13, 1, "other"),  # in another's name
    snapshot(14, 9),  # after it was away for a while: it has counted on
):
    if told == "ready":
        run.on_ready("w", {"run_id": "run", "error": None, "schedule_fingerprint": None, "host": "h"})
    else:
        run.on_snapshot("w", told)
    seen.append(snapshots.merged().sent)
print(seen)
"""


def test_of_each_worker_the_newest_snapshot_of_this_run_counts() -> None:
    told = subprocess.run([sys.executable, "-c", SNAPSHOTS], capture_output=True, text=True, timeout=60, check=False)
    assert told.stdout == "[0, 0, 5, 7, 7, 7, 7, 7, 9]\n", told.stderr
