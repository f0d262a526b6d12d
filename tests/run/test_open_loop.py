"""Whole open-loop runs against the simulated server: the schedule that was planned is the load that is sent."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.run.simulated import (
    FAST,
    OPEN_LOOP,
    TRACE_REPLAY,
    LocustRun,
    end_of,
    free_port,
    get,
    planned_unix_ns,
    run_distributed,
    run_locust,
    simserver,
    start_locust,
    wait_for_text,
    wait_for_web,
)

pytestmark = pytest.mark.timeout(120)

SHORT = ("--max-tokens", "5", "--force-length")


def assert_all_sent_once(run: LocustRun) -> None:
    planned, rows = planned_unix_ns(run), run.requests()
    assert sorted(row["arrival"] for row in rows) == list(range(len(planned))), run.output
    assert all(row["scheduled_unix_ns"] == planned[row["arrival"]] for row in rows)


def boundaries(run: LocustRun) -> list[int]:
    """Of the stages, in nanoseconds after T0."""
    described = run.json("run.json")
    t0_unix_ns = described["schedule"]["t0_unix_ns"]
    times = [(stage["start_unix_ns"], stage["end_unix_ns"]) for stage in described["stages"]]
    assert (times[0][0], times[-1][1]) == tuple(described["window"].values())
    assert all(end == start for (_, end), (start, _) in pairwise(times))
    return [start - t0_unix_ns for start, _ in times] + [times[-1][1] - t0_unix_ns]


def test_any_number_of_workers_sends_the_same_schedule(tmp_path: Path) -> None:
    """To the nanosecond, the prompts too; and what is achieved is what is offered."""
    sent: list[list[tuple[int, str]]] = []
    flags = ("--rate-stages", "30:2s,30-60:1s", "--seed", "5", "--warmup-requests", "10", "-u", "60", *SHORT)
    for workers in (0, 2, 3):
        directory = tmp_path / str(workers)
        directory.mkdir()
        with simserver(directory, *FAST) as server:
            run = (
                run_distributed(directory, server.url, workers, flags, locustfile=OPEN_LOOP)
                if workers
                else run_locust(directory, server.url, *flags, locustfile=OPEN_LOOP)
            )
        assert_all_sent_once(run)
        described = run.json("run.json")
        t0_unix_ns, warmup_ns = described["schedule"]["t0_unix_ns"], described["schedule"]["warmup_ns"]
        assert boundaries(run) == [warmup_ns, warmup_ns + 2 * 10**9, warmup_ns + 3 * 10**9]
        rows = sorted(run.requests(), key=lambda row: row["arrival"])
        assert [row["phase"] for row in rows[9:11]] == ["warmup", "window"], "the first ten arrivals are the warm-up"
        assert {row["worker_id"] for row in rows} == {share["worker_id"] for share in described["shares"]}
        assert all(
            row["worker_id"] == described["shares"][row["arrival"] % max(1, workers)]["worker_id"] for row in rows
        )
        for number, stage in enumerate(run.summary["stages"]):
            planned = sum(row["stage"] == number for row in rows)
            assert stage["achieved_rps"] == pytest.approx(planned / (2, 1)[number], rel=0.005)
        sent.append([(row["scheduled_unix_ns"] - t0_unix_ns, row["prompt_id"]) for row in rows])
    assert sent[0] == sent[1] == sent[2]


def test_a_constant_rate_is_evenly_spaced(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        flags = ("--rate", "40", "-t", "3s", "--arrival", "constant", "--warmup-requests", "0", *SHORT)
        run = run_locust(tmp_path, server.url, *flags, locustfile=OPEN_LOOP)
    times = sorted(row["scheduled_unix_ns"] for row in run.requests())
    t0_unix_ns = run.json("run.json")["schedule"]["t0_unix_ns"]
    assert [at - t0_unix_ns for at in times] == [number * 25_000_000 for number in range(120)], run.output
    assert run.json("run.json")["slots"] == 2048, "where -u is not given"
    assert boundaries(run) == [0, 3 * 10**9]
    assert run.summary["stages"][0]["achieved_rps"] == pytest.approx(40, rel=0.005)
    assert run.json("run.json")["stopped_early"] is None


@pytest.mark.parametrize("when_full", ["queue", "drop"])
def test_full_slots_queue_or_drop(tmp_path: Path, when_full: str) -> None:
    """Answers of half a second, ten arrivals a second, one slot."""
    with simserver(tmp_path, "--first-token-ms", "500", "--token-interval-ms", "1") as server:
        flags = ("--rate", "10", "-t", "2s", "--arrival", "constant", "-u", "1", "--when-full", when_full)
        run = run_locust(
            tmp_path, server.url, *flags, "--warmup-requests", "0", "--max-tokens", "1", locustfile=OPEN_LOOP
        )
    rows = sorted(run.requests(), key=lambda row: row["arrival"])
    lags_s = [row["schedule_lag_ns"] / 1e9 for row in rows]
    if when_full == "queue":
        assert [row["arrival"] for row in rows] == list(range(20)), run.output
        growth = [after - before for before, after in pairwise(lags_s)]
        assert all(0.35 < one < 0.55 for one in growth), lags_s
        assert max(row["ttft_ns"] for row in rows) < 0.7e9, "the service itself is not slow"
    else:
        dropped = pq.read_table(run.run_dir / "arrivals.parquet").to_pylist()
        assert {one["status"] for one in dropped} == {"dropped"}
        assert sorted([row["arrival"] for row in rows] + [one["number"] for one in dropped]) == list(range(20))
        assert 3 <= len(rows) <= 5
        assert max(lags_s) < 0.2
        assert run.summary["stages"][0]["requests"]["dropped_arrivals"] == len(dropped)


def test_a_run_without_an_end_is_measured_until_it_is_stopped(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        flags = ("--headless", "--only-summary", "--run-dir", "run", "--rate", "40", "--warmup-requests", "10", *SHORT)
        load = start_locust(tmp_path, server.url, *flags, locustfile=OPEN_LOOP)
        wait_for_text(server.truth_log, 60)
        load.send_signal(signal.SIGTERM)
        run = end_of(load, tmp_path, 40)
    described = run.json("run.json")
    assert described["stopped_early"] is None
    window = described["window"]
    assert window["start_unix_ns"] == described["schedule"]["t0_unix_ns"] + described["schedule"]["warmup_ns"]
    rows = run.requests()
    in_window = [row for row in rows if row["phase"] == "window"]
    assert len(in_window) >= 45, run.output
    assert all(window["start_unix_ns"] <= row["scheduled_unix_ns"] < window["end_unix_ns"] for row in in_window)
    due = len(planned_unix_ns(run))
    assert sorted(row["arrival"] for row in rows)[:due] == list(range(due))


def test_a_stop_cuts_the_stage_and_forgets_those_to_come(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        stages = ("--rate-stages", "40:1s,40-80:60s,80:60s", "--warmup-requests", "0")
        load = start_locust(
            tmp_path,
            server.url,
            *("--headless", "--only-summary", "--run-dir", "run", *stages, *SHORT),
            locustfile=OPEN_LOOP,
        )
        wait_for_text(server.truth_log, 90)
        os.killpg(load.pid, signal.SIGINT)
        run = end_of(load, tmp_path, 40)
    described = run.json("run.json")
    assert described["stopped_early"] == "interrupted"
    assert [stage["stage_kind"] for stage in described["stages"]] == ["hold", "ramp"], run.output
    end_s = boundaries(run)[-1] / 1e9
    assert end_s < 20
    assert described["stages"][1]["offered_rps"] == pytest.approx(40 + (end_s - 1) * 40 / 60 / 2, abs=1e-6)


def test_a_trace_is_replayed_at_its_times(tmp_path: Path) -> None:
    offsets_ms = [0, 10, 250, 251, 900, 1500, 1500, 2100]
    rows = [{"timestamp": 5000 + at, "input_length": 50, "output_length": 5} for at in offsets_ms]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "w.yaml").write_text(f"kind: trace\nfile: {trace}\n")
    with simserver(tmp_path, *FAST) as server:
        flags = ("--arrival", "trace", "--workload", "w.yaml", "-u", "8", "--force-length")
        run = run_locust(tmp_path, server.url, *flags, "--warmup-requests", "2", locustfile=TRACE_REPLAY)
        refused = run_locust(
            tmp_path, server.url, *flags, "--warmup-requests", "8", "--run-dir", "no", locustfile=TRACE_REPLAY
        )
        wrong = run_locust(tmp_path, server.url, "--arrival", "trace", "--run-dir", "no", locustfile=TRACE_REPLAY)
    described = run.json("run.json")
    t0_unix_ns = described["schedule"]["t0_unix_ns"]
    done = sorted(run.requests(), key=lambda row: row["arrival"])
    assert [row["scheduled_unix_ns"] - t0_unix_ns for row in done] == [at * 10**6 for at in offsets_ms], run.output
    assert [row["phase"] for row in done] == ["warmup"] * 2 + ["window"] * 6
    # Six arrivals with five gaps between them, and a sixth of their mean.
    assert boundaries(run) == [250_000_000, 2_470_000_000]
    assert run.json("summary.json")["totals"]["achieved_rps"] == pytest.approx(6 / 2.22)
    assert not (tmp_path / "no").exists()
    assert refused.exit_code == 2
    assert "the trace has 8 requests, so nothing would be left to measure" in refused.output
    assert wrong.exit_code == 2
    assert "--arrival trace: the workload sharegpt has no recorded times" in wrong.output


@pytest.mark.parametrize(
    ("locustfile", "flags"),
    [("chat.py", ("--rate", "5", "-t", "1s")), ("open_loop.py", ("-u", "5", "-t", "1s"))],
)
def test_users_of_the_other_kind_are_refused_before_any_load(
    tmp_path: Path, locustfile: str, flags: tuple[str, ...]
) -> None:
    with simserver(tmp_path, *FAST) as server:
        path = str(Path(OPEN_LOOP).with_name(locustfile))
        run = run_locust(tmp_path, server.url, *flags, locustfile=path)
        assert server.truth() == []
    assert run.exit_code == 2, run.output
    assert "derive it from" in run.output


def facts_of(line: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(line)
    return facts


def test_progress_tells_what_is_offered_and_sent(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        flags = ("--rate-stages", "20:2s,20-60:2s", "--warmup-requests", "0", "--progress", "json", *SHORT)
        run = run_locust(tmp_path, server.url, *flags, locustfile=OPEN_LOOP)
    lines = [facts_of(line) for line in run.output.splitlines() if line.startswith("{")]
    holds = [line for line in lines if line["stage"] == "20/s" and line["phase"] == "window"]
    ramps = [line for line in lines if line["stage"] == "20→60/s" and line["phase"] == "window"]
    assert holds, run.output
    assert ramps, run.output
    assert {line["offered_rps"] for line in holds} == {20}
    assert all(20 < line["offered_rps"] <= 60 for line in ramps)
    assert any(line["achieved_rps"] for line in lines)
    assert all(line["waiting_arrivals"] == 0 for line in lines)


def test_the_start_form_sets_the_rate_and_the_slots(tmp_path: Path) -> None:
    port = free_port()
    web = f"http://127.0.0.1:{port}"
    with simserver(tmp_path, *FAST) as server:
        flags = ("--web-host", "127.0.0.1", "--web-port", str(port), "--warmup-requests", "5", *SHORT)
        load = start_locust(tmp_path, server.url, *flags, "--run-dir", "run", locustfile=OPEN_LOOP)
        try:
            wait_for_web(web, load)
            get(f"{web}/swarm", f"user_count=12&spawn_rate=1&rate=30&run_time=2s&host={server.url}".encode())
            for _ in range(400):
                if (tmp_path / "run" / "report.html").exists():
                    break
                time.sleep(0.1)
            load.send_signal(signal.SIGTERM)
            run = end_of(load, tmp_path, 40)
        finally:
            if load.poll() is None:
                os.killpg(load.pid, signal.SIGKILL)
    assert_all_sent_once(run)
    assert run.json("run.json")["slots"] == 12, "all of them at once, whatever the spawn rate says"
    assert boundaries(run)[-1] - boundaries(run)[0] == 2 * 10**9
    assert len({row["user_id"] for row in run.requests()}) == 12, "the longest idle slot is the next"


SEARCHING = """
from itertools import chain, repeat
from locust import task
from vllm_locust import OpenLoopChatUser
from vllm_locust.load_profile import ProfileStage
from vllm_locust.run import locust_plugin
from vllm_locust.run.course.stage_spans import Stretch

class OpenLoop(OpenLoopChatUser):
    @task
    def ask_next(self):
        self.ask(self.next_prompt())

def hold(rate, length_s):
    return ProfileStage(name=f"{rate}/s", start_value=rate, end_value=rate, length_ns=round(length_s * 1e9))

class Search:
    aim = state = "a plan that grows"
    probe = {}

    def __init__(self, view):
        self.view = view
        self.steps = iter([(hold(30, 4), 0), (hold(30, 0.5), 0), (hold(10, 0.5), None), (hold(60, 1), 1)])

    def follow(self, course):
        self.course = course

    def look(self):
        pass

    def next_stretch(self):
        for number in (0, 1):
            stage = self.view.snapshots.of_stage(number)
            if stage is not None:
                print("STAGE", number, stage.sent, self.course.arrivals_due(self.course.span(number)), flush=True)
        step = next(self.steps, None)
        return step and Stretch(*step)

locust_plugin.search = Search
"""


def test_a_search_that_thinks_for_long_brings_no_burst(tmp_path: Path) -> None:
    """It is asked two seconds before the plan's end, and takes four."""
    locustfile = tmp_path / "thinking.py"
    pause, thinking = "return step and Stretch(*step)", "step and step[1] is None and gevent.sleep(4)"
    assert SEARCHING.count(pause) == 1
    locustfile.write_text(f"import gevent\n{SEARCHING.replace(pause, f'{thinking}; {pause}')}")
    flags = ("--capacity", "rate", "--start-load", "30", "--slo", "p99(ttft)<=1s", "--warmup-requests", "10")
    with simserver(tmp_path, *FAST) as server:
        run = run_locust(tmp_path, server.url, *flags, "-u", "60", *SHORT, locustfile=str(locustfile))
    assert_all_sent_once(run)
    assert [stage["name"] for stage in run.json("run.json")["stages"]] == ["30/s", "60/s"]
    assert max(row["schedule_lag_ns"] for row in run.requests()) < 1_000_000_000


@pytest.mark.parametrize("workers", [0, 2], ids=["one process", "two workers"])
def test_a_plan_grows_while_it_runs(tmp_path: Path, workers: int) -> None:
    """What comes next is decided near the plan's end: more of a stage, a pause, another stage."""
    locustfile = tmp_path / "searching.py"
    locustfile.write_text(SEARCHING)
    search = ("--capacity", "rate", "--start-load", "30", "--slo", "p99(ttft)<=1s", "--warmup-requests", "10")
    flags = (*search, "-u", "60", "--seed", "3", *SHORT)
    with simserver(tmp_path, *FAST) as server:
        run = (
            run_distributed(tmp_path, server.url, workers, flags, locustfile=str(locustfile))
            if workers
            else run_locust(tmp_path, server.url, *flags, locustfile=str(locustfile))
        )
    assert_all_sent_once(run)
    described = run.json("run.json")
    stages = [(one["stage"], one["offered_rps"]) for one in described["stages"]]
    lengths_s = [(one["end_unix_ns"] - one["start_unix_ns"]) / 1e9 for one in described["stages"]]
    assert (stages, lengths_s) == ([(0, 30), (1, 60)], [4.5, 1.0]), run.output
    assert described["stages"][1]["start_unix_ns"] - described["stages"][0]["end_unix_ns"] == 500_000_000
    rows = run.requests()
    assert Counter(row["stage"] for row in rows if row["phase"] == "window").keys() == {None, 0, 1}
    told = [line.split()[1:] for line in run.output.splitlines() if line.startswith("STAGE ")]
    number, sent, _ = told[0]
    assert number == "0"
    due = {number: int(count) for number, _, count in told}
    assert due["0"] == sum(row["stage"] == 0 for row in rows), "all of the schedule in a stage is on record"
    assert 10 < int(sent) < 100, "when it is asked after two seconds of the stage, the workers have told of it so far"
