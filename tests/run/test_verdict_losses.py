"""Reasons of the verdict that only a fault on the way brings about, provoked in whole runs: what a worker says of
itself is withheld, its clock cannot be compared, its values fit no column, its records or its part of the schedule go
astray.
"""

from __future__ import annotations

import ast
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.run.simulated import FAST, OPEN_LOOP, ROOT, LocustRun, run_distributed, run_locust, simserver
from tests.run.test_verdict_reasons import NEIGHBOURS, SHORT, merge, reasons
from tests.store.servers import Server
from vllm_locust.arrival import Schedule
from vllm_locust.store.parts import list_parts
from vllm_locust.store.rundir import RunDirectory
from vllm_locust.store.schema import BatchKind

pytestmark = pytest.mark.timeout(120)

CLOSED = ("-u", "4", "-r", "4", "-t", "2s", "--warmup-requests", "4", *SHORT)


def value_of(run: LocustRun, code: str) -> float:
    (value,) = [reason["value"] for reason in run.summary["verdict"]["reasons"] if reason["code"] == code]
    return float(value)


PROVOKED = {
    "arrival_process": "verdict_reasons.a_dispatcher_that_is_late",
    "arrivals_doubled": "verdict_losses.a_worker_that_follows_another_plan_than_its_own",
    "arrivals_lost": "share_owners.what_a_lost_worker_should_have_sent_is_lost_and_no_more",
    "arrivals_misplaced": "verdict_losses.a_worker_that_follows_another_plan_than_its_own",
    "arrivals_unchecked": "verdict_reasons.a_trace_that_is_gone_at_the_merge",
    "capacity_unknown": "capacity.a_server_that_serves_nothing_ends_the_search",
    "clock_stepped": "clocks.a_step_of_the_wall_clock_moves_no_duration",
    "clock_uncertain": "verdict_losses.clocks_that_cannot_be_compared",
    "coalesced": "verdict_reasons.a_dispatcher_that_is_late",
    "cpu_saturated": "verdict_reasons.a_worker_that_is_busy_with_itself",
    "gc_pause": "verdict_reasons.a_worker_that_is_busy_with_itself",
    "health_missing": "verdict_losses.no_worker_says_how_it_was",
    "nothing_measured": "endings.a_run_that_measured_nothing_says_so",
    "rate_missed": "verdict_reasons.a_dispatcher_that_is_late",
    "receive_lag": "verdict_reasons.a_dispatcher_that_is_late",
    "records_lost": "verdict_losses.a_disk_that_loses_what_was_written",
    "run_delay": "verdict_reasons.a_cpu_hog_beside_the_worker",
    "schedule_lag": "verdict_reasons.a_dispatcher_that_is_late",
    "search_given_up": "capacity.a_server_that_is_killed_ends_the_search",
    "slo_undecided": "verdict_reasons.answers_that_leave_something_open",
    "slots_full": "coordinated_omission.both_times_are_printed_beside_each_other",
    "spool_left": "verdict_reasons.redis_is_gone",
    "stage_rate": "verdict_reasons.a_dispatcher_that_is_late",
    "stopped_early": "endings.a_signal_ends_the_run_and_keeps_its_records",
    "telemetry_missing": "gpu_telemetry.gpus_beside_a_run",
    "token_source_mixed": "verdict_reasons.answers_that_leave_something_open",
    "tokens_are_chunks": "verdict_reasons.a_server_that_reports_no_usage",
    "too_many_failures": "verdict_reasons.answers_that_leave_something_open",
    "user_stamps": "verdict_reasons.a_worker_that_is_busy_with_itself",
    "values_unstorable": "verdict_losses.values_that_fit_no_column",
    "workers_missing": "joining.a_killed_worker_is_named_and_what_it_had_confirmed_is_kept",
}
"""Each reason, and the whole run in which it must be found."""


def demands(test: ast.FunctionDef, code: str) -> bool:
    """Whether the test fails where a run does not have the reason: it is asserted, and not that it is missing."""

    def named(node: ast.AST) -> bool:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return False
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.NotIn | ast.IsNot | ast.NotEq):
            return False
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.LtE):
            # One of those that may be there, where it stands on the right.
            return named(node.left)
        if isinstance(node, ast.Constant):
            return node.value == code
        return any(named(child) for child in ast.iter_child_nodes(node))

    loops = [node.iter for node in ast.walk(test) if isinstance(node, ast.For)]
    asserted = [node.test for node in ast.walk(test) if isinstance(node, ast.Assert)]
    one_of_them = [node.value for node in ast.walk(test) if isinstance(node, ast.Assign)]
    return any(named(node) for node in (*loops, *asserted, *one_of_them))


def test_every_reason_is_provoked_in_a_whole_run() -> None:
    rules = "".join(path.read_text() for path in (ROOT / "vllm_locust" / "verdict").glob("*.py"))
    assert set(PROVOKED) == set(re.findall(r'Reason\(\s*"(\w+)"', rules))
    for code, where in PROVOKED.items():
        page, _, name = where.partition(".")
        tree = ast.parse((ROOT / "tests" / "run" / f"test_{page}.py").read_text(encoding="utf-8"))
        tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == f"test_{name}"]
        assert len(tests) == 1, where
        assert demands(tests[0], code), (code, where)


WITHHELD = """
from locust import task
from vllm_locust import ChatUser
from vllm_locust.store.shipper import Shipper

Shipper.put_health = lambda self, sample: None

class Chat(ChatUser):
    @task
    def ask_next(self):
        self.ask(self.next_prompt())
"""


def test_no_worker_says_how_it_was(tmp_path: Path) -> None:
    locustfile = tmp_path / "withheld.py"
    locustfile.write_text(WITHHELD)
    with simserver(tmp_path, *FAST) as server:
        run = run_locust(tmp_path, server.url, *CLOSED, locustfile=str(locustfile))
    found = reasons(run)
    assert found["health_missing"] == "degraded", run.output
    assert found.keys() <= {"health_missing", *NEIGHBOURS}
    assert run.summary["health"]["workers"] == []


@contextmanager
def slow_answers(unix_socket: str, delay_s: float) -> Iterator[str]:
    """A TCP relay to a server on a unix socket; every answer of the server takes ``delay_s`` more, no question does."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket, pause_s: float) -> None:
        try:
            while data := source.recv(1 << 16):
                time.sleep(pause_s)
                sink.sendall(data)
        except OSError:
            pass
        finally:
            sink.close()

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            upstream = socket.socket(socket.AF_UNIX)
            upstream.connect(unix_socket)
            for one in ((client, upstream, 0.0), (upstream, client, delay_s)):
                threading.Thread(target=pump, args=one, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
    finally:
        listener.close()


def test_clocks_that_cannot_be_compared(tmp_path: Path) -> None:
    """The way back takes 40 ms and the way there none, so that the clocks seem 20 ms apart, give or take as much."""
    redis = Server()
    try:
        with (
            slow_answers(redis.url.removeprefix("unix://"), 0.04) as url,
            simserver(tmp_path, *FAST) as server,
        ):
            run = run_locust(tmp_path, server.url, *CLOSED, "--redis-url", url)
            server.stop()
            sent = sorted(row["request_id"] for row in server.truth())
    finally:
        redis.close()
    found = reasons(run)
    assert found["clock_uncertain"] == "degraded", run.output
    assert found.keys() <= {"clock_uncertain", *NEIGHBOURS}
    assert 20e6 <= value_of(run, "clock_uncertain") < 60e6
    assert sorted(row["request_id"] for row in run.requests()) == sent


HALF_A_CHARACTER = """
from locust import task
from vllm_locust import ChatUser

class Chat(ChatUser):
    @task
    def ask(self):
        self.chat([{"role": "user", "content": "Hello"}], conversation_id="a" + chr(0xD800))
"""


def test_values_that_fit_no_column(tmp_path: Path) -> None:
    """What a server sends is bounded when it is read; a locustfile may name its conversations as it likes."""
    locustfile = tmp_path / "half_a_character.py"
    locustfile.write_text(HALF_A_CHARACTER)
    with simserver(tmp_path, *FAST) as server:
        run = run_locust(tmp_path, server.url, *CLOSED, locustfile=str(locustfile))
    rows, found = run.requests(), reasons(run)
    assert found["values_unstorable"] == "degraded", run.output
    assert found.keys() <= {"values_unstorable", *NEIGHBOURS}
    assert {row["conversation_id"] for row in rows} == {"a?"}
    assert value_of(run, "values_unstorable") == len(rows) > 20


LOSES_A_PART = """
from locust import task
from vllm_locust import ChatUser
from vllm_locust.run import controller

end_recorder = controller.RunController._end_recorder

def end_and_lose(self):
    report = end_recorder(self)
    sorted(self.run_dir.parts.glob("requests-*.parquet"))[0].unlink()
    return report

controller.RunController._end_recorder = end_and_lose

class Chat(ChatUser):
    @task
    def ask_next(self):
        self.ask(self.next_prompt())
"""


def test_a_disk_that_loses_what_was_written(tmp_path: Path) -> None:
    """A file of the recorder's is gone before the merge, though every worker was told that its records are safe."""
    locustfile = tmp_path / "loses.py"
    locustfile.write_text(LOSES_A_PART)
    with simserver(tmp_path, *FAST) as server:
        run = run_locust(tmp_path, server.url, *CLOSED, locustfile=str(locustfile))
        server.stop()
        sent = len(server.truth())
    assert reasons(run)["records_lost"] == "invalid", run.output
    assert value_of(run, "records_lost") >= 1
    assert 0 < len(run.requests()) < sent
    assert run.exit_code == 1


NO_COLUMNS = """
from locust import task
from vllm_locust import ChatUser
from vllm_locust.store.columns import RequestColumns

to_arrow, failed = RequestColumns.to_arrow, []

def fail_once(self):
    if not failed:
        failed.append(len(self))
        raise ArithmeticError("what nobody foresaw")
    return to_arrow(self)

RequestColumns.to_arrow = fail_once

class Chat(ChatUser):
    @task
    def ask_next(self):
        self.ask(self.next_prompt())
"""


def test_a_batch_that_cannot_be_made(tmp_path: Path) -> None:
    locustfile = tmp_path / "no_columns.py"
    locustfile.write_text(NO_COLUMNS)
    with simserver(tmp_path, *FAST) as server:
        run = run_locust(tmp_path, server.url, *CLOSED, locustfile=str(locustfile))
        server.stop()
        sent = len(server.truth())
    assert reasons(run)["records_lost"] == "invalid", run.output
    assert value_of(run, "records_lost") == sent - len(run.requests()) > 0
    assert run.exit_code == 1


MISLED = """
import sys
from locust import task
from vllm_locust import OpenLoopChatUser
from vllm_locust.run import worker_side

WorkerSide = worker_side.WorkerSide
prepare, begin = WorkerSide._prepare, WorkerSide._on_begin

def misled(self, payload):
    self.is_second = payload["share"] == 1
    return prepare(self, payload | {"share": 0})

def begin_later(self, sender, payload):
    later = 7_000_000 if self.is_second else 0
    return begin(self, sender, payload | {"t0_unix_ns": payload["t0_unix_ns"] + later})

if "--worker" in sys.argv:
    WorkerSide._prepare, WorkerSide._on_begin = misled, begin_later

class OpenLoop(OpenLoopChatUser):
    @task
    def ask_next(self):
        self.ask(self.next_prompt())
"""


def test_a_worker_that_follows_another_plan_than_its_own(tmp_path: Path) -> None:
    """The second worker's messages were tampered with: it has the first one's share too, and begins 7 ms later."""
    locustfile = tmp_path / "misled.py"
    locustfile.write_text(MISLED)
    load = ("--rate-stages", "20:3s", "-u", "20", "--arrival", "constant", "--warmup-requests", "0", *SHORT)
    with simserver(tmp_path, *FAST) as server:
        run = run_distributed(tmp_path, server.url, 2, load, locustfile=str(locustfile))
    found = reasons(run)
    for code in ("arrivals_doubled", "arrivals_misplaced", "arrivals_lost"):
        assert found[code] == "invalid", run.output
    described, rows = run.json("run.json"), run.requests()
    numbers = Counter(row["arrival"] for row in rows)
    assert value_of(run, "arrivals_doubled") == sum(count > 1 for count in numbers.values()) > 20
    plan = Schedule.from_json(described["schedule"]).offsets_ns(4_000_000_000) + described["schedule"]["t0_unix_ns"]
    late = [row for row in rows if row["scheduled_unix_ns"] - plan[row["arrival"]] == 7_000_000]
    assert value_of(run, "arrivals_misplaced") == len(late) > 20
    assert run.exit_code == 1


def test_a_schedule_that_is_kept_has_none_of_these(tmp_path: Path) -> None:
    """The same run untouched, with its records tampered with afterwards: a merge finds that too."""
    load = ("--rate-stages", "20:3s", "-u", "20", "--arrival", "constant", "--warmup-requests", "0", *SHORT)
    with simserver(tmp_path, *FAST) as server:
        run = run_distributed(tmp_path, server.url, 2, load, locustfile=OPEN_LOOP)
    assert reasons(run).keys() <= NEIGHBOURS, run.output
    part = next(p for p in list_parts(RunDirectory(run.run_dir).parts) if p.kind is BatchKind.REQUESTS)
    part.path.unlink()
    RunDirectory(run.run_dir).requests_parquet.unlink()  # a merge keeps what it holds otherwise
    assert merge(tmp_path) == 1
    found = reasons(run)
    assert found["records_lost"] == found["arrivals_lost"] == "invalid"
