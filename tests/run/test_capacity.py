"""Whole searches for the capacity against the simulated server, whose true capacity the offline simulation gives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.run.simulated import (
    CHAT,
    OPEN_LOOP,
    Distributed,
    LocustRun,
    SimServer,
    end_of,
    environment,
    run_distributed,
    run_locust,
    simserver,
    start_locust,
    wait_for_text,
)
from tests.run.test_verdict_reasons import hogs
from tests.simulation import study
from tests.simulation.offline_server import Lengths
from tests.simulation.probing import Case
from vllm_locust.cli import main
from vllm_locust.simserver.engine import EngineConfig

pytestmark = pytest.mark.timeout(240)

LONG = "VLLM_LOCUST_TEST_CAPACITY"
ENGINE = ("--max-num-seqs", "8", "--step-base-ms", "10", "--decode-us-per-seq", "0", "--prefill-us-per-token", "0")
SERVER = (*ENGINE, "--kv-us-per-token", "0", "--frontend-ms", "0")
"""Eight answers of 40 tokens at once, 10 ms a token: 20 requests/s at most."""
LOAD = ("--workload", "short_chat", "--max-tokens", "40", "--force-length", "--warmup-requests", "10")
SLO = "p90(ttft)<=300ms"
CASE = Case(
    "eight at once",
    EngineConfig(
        max_num_seqs=8, step_base_ns=10_000_000, decode_ns_per_seq=0, prefill_ns_per_token=0, kv_ns_per_token=0
    ),
    Lengths(prompt_mean=50, output_mean=40, spread=0.0, at_most=4000),
    (SLO,),
    16.9,
)
"""The same engine in virtual time, and its true capacity for the SLO, from ``test_the_true_capacity``."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SimServer]:
    with simserver(tmp_path, *SERVER) as running:
        yield running


def assert_consistent(run: LocustRun, unit: str, *, all_told: bool = True) -> Any:
    """What every search leaves behind. Its capacity in ``summary.json``."""
    summary, kept = run.summary, run.json("capacity.json")
    capacity = summary["capacity"]
    assert capacity["unit"] == unit
    assert len(kept["probes"]) == len(kept["judged"]) == len(capacity["probes"]) == len(summary["stages"]), run.output
    for live, exact, stage in zip(kept["probes"], kept["judged"], summary["stages"], strict=True):
        assert live["stage"] == exact["stage"] == stage["stage"]
        assert live["load"] == (stage["offered_rps"] if unit == "requests/s" else stage["users"])
        assert live["window_s"] == pytest.approx(stage["length_s"], rel=1e-6)
        if not all_told:
            continue
        assert exact["requests"] == stage["requests"]["attempted"]
        counts = [sum(one["slos"][0]["samples"]) for one in (live, exact)]
        # In an open loop the search waits for what the schedule has; in a closed one a message may be late.
        assert abs(counts[0] - counts[1]) <= (0 if unit == "requests/s" else 3), (live, exact)
    assert kept["result"]["load"] == capacity["load"]
    text = (run.run_dir / "report.txt").read_text(encoding="utf-8")
    assert text.index("\nCAPACITY\n") < text.index("\nLOAD ")
    assert ">Capacity</h2>" in (run.run_dir / "report.html").read_text(encoding="utf-8")
    return capacity


def test_the_command_finds_the_capacity(tmp_path: Path, server: SimServer) -> None:
    command = [sys.executable, "-m", "vllm_locust", "capacity", "--host", server.url, "--run-dir", "run", "--slo", SLO]
    search = subprocess.Popen(
        [*command, *LOAD, "--start-load", "9", "--budget", "75s", "--progress", "json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=environment(),
        start_new_session=True,
    )
    run = end_of(search, tmp_path, 150)
    capacity = assert_consistent(run, "requests/s")
    truth = CASE.capacity
    assert run.exit_code in (0, 4), run.output
    assert 3 <= len(capacity["probes"]) <= 10
    assert sum(probe["elapsed_s"] for probe in capacity["probes"]) < 90
    assert capacity["limiting_slo"] == SLO
    assert 0.75 * truth < capacity["load"] < 1.3 * truth, run.output
    assert capacity["low"] < 1.05 * truth
    assert capacity["high"] > 0.95 * truth
    assert capacity["operating_load"] <= 0.8 * capacity["low"] + 1e-9
    lines = [json.loads(line) for line in run.output.splitlines() if line.startswith("{")]
    told = [line for line in lines if line["search"] and line["search"].startswith("probe 2: 18/s, capacity above 9")]
    assert told
    bounds = {"low": None, "high": None, "held_load": 9, "missed_load": None}
    assert all(line["probe"] == {"number": 2, "load": 18, "unit": "requests/s", **bounds} for line in told)


def test_a_search_that_is_interrupted_goes_on_later(tmp_path: Path, server: SimServer) -> None:
    flags = ("--headless", "--only-summary", "--capacity", "rate", "--slo", SLO, "--start-load", "9", *LOAD)
    first = start_locust(tmp_path, server.url, *flags, "--budget", "60s", "--run-dir", "run", locustfile=OPEN_LOOP)
    wait_for_probes(tmp_path / "run" / "capacity.json", 1, first)
    time.sleep(2)
    first.send_signal(signal.SIGINT)
    stopped = end_of(first, tmp_path)
    assert stopped.summary["capacity"]["status"] == "unknown", stopped.output
    assert "The search was stopped before its end." in stopped.summary["capacity"]["why"]
    assert stopped.summary["capacity"]["held_load"] == 9
    assert "stopped_early" in {reason["code"] for reason in stopped.summary["verdict"]["reasons"]}
    known = stopped.json("capacity.json")["judged"]
    assert [probe["stage"] for probe in known] == [0]

    more = ("--resume", "run", "--budget", "45s", "--max-probes", "2", "--run-dir", "again")
    run_again = end_of(start_locust(tmp_path, server.url, *flags, *more, locustfile=OPEN_LOOP), tmp_path)
    kept = json.loads((tmp_path / "again" / "capacity.json").read_text(encoding="utf-8"))
    assert [probe["stage"] for probe in kept["probes"]] == [None, 0], run_again.output
    assert kept["probes"][0] == known[0] | {"stage": None}
    assert kept["probes"][1]["load"] == 18, "it went on where the first was stopped"
    assert kept["probes"][1]["run_id"] != kept["probes"][0]["run_id"]
    assert kept["result"]["missed_load"] in (18, None)

    other = ("--resume", "run", "--run-dir", "other", "--slo", "p99(e2e)<=9s")
    refused = end_of(start_locust(tmp_path, server.url, *flags, *other, locustfile=OPEN_LOOP), tmp_path)
    assert refused.exit_code == 2
    assert "--resume run: another search, by the SLOs" in refused.output
    over = ("--resume", "again", "--max-probes", "2", "--run-dir", "other")
    refused = end_of(start_locust(tmp_path, server.url, *flags, *over, locustfile=OPEN_LOOP), tmp_path)
    assert refused.exit_code == 2
    assert "that search is over (All 2 probes were used up" in refused.output


def wait_for_probes(path: Path, count: int, search: subprocess.Popen[str], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if path.exists() and len(json.loads(path.read_text(encoding="utf-8"))["probes"]) >= count:
            return
        assert search.poll() is None
        time.sleep(0.1)
    raise AssertionError(f"{path} did not get {count} probes within {timeout_s} s")


def test_a_hopeless_probe_ends_early_and_the_lowest_load_is_too_much(tmp_path: Path, server: SimServer) -> None:
    flags = ("--capacity", "rate", "--slo", SLO, "--start-load", "30", "--min-load", "30", "--probe-time", "80s", *LOAD)
    run = run_locust(tmp_path, server.url, *flags, "--budget", "3m", "--max-probes", "3", locustfile=OPEN_LOOP)
    capacity = assert_consistent(run, "requests/s")
    (probe,) = capacity["probes"]
    assert probe["ended_early"].startswith("queue grows: in flight rose from ")
    assert probe["window_s"] < 60
    assert capacity["status"] == "below_minimum"
    assert (capacity["load"], capacity["high"]) == (None, 30)
    assert run.exit_code in (3, 4), run.output
    assert run.exit_code == 3 or run.summary["verdict"]["status"] == "invalid"
    assert "Less than 30 requests/s" in run.output


@pytest.mark.parametrize("when_full", ["queue", "drop"])
def test_too_few_slots_are_no_limit_of_the_server(tmp_path: Path, server: SimServer, when_full: str) -> None:
    """Three answers of 0.4 s at a time are 7.5 requests/s, where the server can take 20."""
    flags = ("--capacity", "rate", "--slo", SLO, "--start-load", "12", "--budget", "60s", "-u", "3", *LOAD)
    run = run_locust(tmp_path, server.url, *flags, "--when-full", when_full, locustfile=OPEN_LOOP)
    capacity = assert_consistent(run, "requests/s", all_told=False)
    assert len(capacity["probes"]) == 2, run.output
    assert all("every slot was busy" in probe["left_out"] for probe in capacity["probes"])
    assert (capacity["status"], capacity["held_load"], capacity["missed_load"]) == ("unknown", None, None)
    assert "in 2 probes in a row every slot was busy" in capacity["why"]
    assert "raise -u" in capacity["why"]
    assert "capacity_unknown" in {reason["code"] for reason in run.summary["verdict"]["reasons"]}
    assert run.exit_code == 1, run.output
    assert "No probe was" not in run.output


def test_slots_that_fill_since_the_server_is_too_slow_are_a_miss(tmp_path: Path, server: SimServer) -> None:
    """Forty in flight wait longer than the SLO for one of eight places, although more than forty were due."""
    flags = ("--capacity", "rate", "--slo", SLO, "--start-load", "60", "--budget", "40s", "-u", "40", *LOAD)
    run = run_locust(tmp_path, server.url, *flags, "--max-probes", "2", locustfile=OPEN_LOOP)
    capacity = assert_consistent(run, "requests/s", all_told=False)
    first = capacity["probes"][0]
    assert first["left_out"] is None, run.output
    assert first["held"] is False
    assert first["overloaded"].startswith("every slot was busy, and of the requests that had one "), run.output
    assert capacity["missed_load"] is not None
    assert capacity["missed_load"] <= 60


def test_a_server_that_is_killed_ends_the_search(tmp_path: Path, server: SimServer) -> None:
    flags = ("--headless", "--only-summary", "--capacity", "rate", "--slo", SLO, "--start-load", "8", *LOAD)
    own = ("--budget", "90s", "--run-dir", "run", "--max-failures", "100%")
    search = start_locust(tmp_path, server.url, *flags, *own, locustfile=OPEN_LOOP)
    wait_for_probes(tmp_path / "run" / "capacity.json", 1, search)
    time.sleep(5)
    server.stop()
    run = end_of(search, tmp_path)
    capacity = run.summary["capacity"]
    assert [probe["left_out"] is None for probe in capacity["probes"]] == [True, False], run.output
    assert "the server could not be reached" in capacity["probes"][1]["left_out"]
    assert capacity["why"] == (
        "The search ended early: the server cannot be reached. Every probe up to 8 met the SLOs."
    )
    codes = {reason["code"] for reason in run.summary["verdict"]["reasons"]}
    assert "search_given_up" in codes, "whatever share of failures is allowed"
    assert "too_many_failures" not in codes
    assert run.exit_code == 1, run.output


def test_a_server_that_serves_nothing_ends_the_search(tmp_path: Path) -> None:
    flags = ("--capacity", "rate", "--slo", SLO, "--start-load", "8", "--max-failures", "100%", *LOAD)
    with simserver(tmp_path, *SERVER, "--fault", "status:code=503,share=1") as refusing:
        run = run_locust(tmp_path, refusing.url, *flags, "--budget", "60s", locustfile=OPEN_LOOP)
    (probe,) = run.summary["capacity"]["probes"]
    assert probe["left_out"].startswith("the server answered no request any more: of "), run.output
    assert probe["left_out"].endswith(" http_error")
    assert probe["window_s"] < 20
    assert run.summary["capacity"]["why"].startswith("The search ended early: the server answers no request any more.")
    assert "capacity_unknown" in {reason["code"] for reason in run.summary["verdict"]["reasons"]}
    assert run.exit_code == 1


def test_a_probe_beside_a_hog_does_not_count_and_is_made_again(tmp_path: Path, server: SimServer) -> None:
    """The generator gets too little of its core in the first probe, and all of it from then on."""
    core = max(os.sched_getaffinity(0))
    flags = ("--headless", "--only-summary", "--run-dir", "run", "--capacity", "rate", "--slo", SLO, *LOAD)
    own = ("--start-load", "9", "--budget", "60s", "--max-probes", "3", "--max-load", "9", "--progress", "json")
    search = start_locust(tmp_path, server.url, *flags, *own, locustfile=OPEN_LOOP)
    os.sched_setaffinity(search.pid, {core})
    wait_for_text(server.truth_log, 5)
    with hogs(12, core):
        wait_for_probes(tmp_path / "run" / "capacity.json", 1, search)
    run = end_of(search, tmp_path, 120)
    probes = run.summary["capacity"]["probes"]
    assert "waited for a core" in probes[0]["left_out"] or "after they were due" in probes[0]["left_out"], run.output
    assert [probe["load"] for probe in probes] == [9] * len(probes)
    counted = [probe for probe in probes if probe["left_out"] is None]
    if not counted:
        pytest.skip("this machine was too busy for a probe that counts")
    assert counted[0]["held"]
    assert run.summary["capacity"]["missed_load"] is None
    assert any(note.startswith("The probe at 9 does not count: ") for note in run.summary["capacity"]["notes"])


def test_a_search_whose_master_is_killed_goes_on_later(tmp_path: Path, server: SimServer) -> None:
    """``kill -9`` leaves no merge; the probes that were over by then count, and the search ends with the capacity."""
    flags = ("--headless", "--only-summary", "--capacity", "rate", "--slo", SLO, "--start-load", "9", *LOAD)
    first = start_locust(tmp_path, server.url, *flags, "--budget", "50s", "--run-dir", "run", locustfile=OPEN_LOOP)
    wait_for_probes(tmp_path / "run" / "capacity.json", 2, first)
    time.sleep(3)
    first.kill()
    first.communicate()
    kept = json.loads((tmp_path / "run" / "capacity.json").read_text(encoding="utf-8"))
    assert "judged" not in kept, "nothing was merged"
    assert not (tmp_path / "run" / "summary.json").exists()

    more = ("--resume", "run", "--budget", "50s", "--run-dir", "again")
    run = end_of(start_locust(tmp_path, server.url, *flags, *more, locustfile=OPEN_LOOP), tmp_path, 120)
    again = json.loads((tmp_path / "again" / "capacity.json").read_text(encoding="utf-8"))
    counted = [probe for probe in kept["probes"] if probe["left_out"] is None]
    assert again["probes"][: len(counted)] == [probe | {"stage": None} for probe in counted], run.output
    assert {probe["run_id"] for probe in again["probes"][len(counted) :]} == {again["run_id"]}
    assert again["result"]["held_load"] is not None
    assert 0.75 * CASE.capacity < again["result"]["load"] < 1.3 * CASE.capacity, run.output
    assert again["result"]["low"] < 1.05 * CASE.capacity
    assert run.exit_code in (0, 4)


def test_a_worker_that_is_killed_steers_nothing(tmp_path: Path, server: SimServer) -> None:
    flags = ("--capacity", "rate", "--slo", SLO, "--start-load", "8", "--budget", "90s", "--max-probes", "2", *LOAD)
    search = Distributed(tmp_path, server.url, 2, *flags)
    wait_for_probes(tmp_path / "run" / "capacity.json", 1, search.master)
    time.sleep(5)
    search.workers[1].kill()
    run = search.end()
    held, lost = run.summary["capacity"]["probes"]
    assert held["left_out"] is None, run.output
    assert "of its arrivals are lost" in lost["left_out"], run.output
    assert run.summary["capacity"]["missed_load"] is None
    assert lost["elapsed_s"] < lost["window_s"] + 15, "lost arrivals are not waited for"
    assert run.exit_code == 1, run.output


def test_the_highest_load_allowed_is_met_at_once(tmp_path: Path, server: SimServer) -> None:
    flags = ("--capacity", "rate", "--slo", SLO, "--max-load", "2", "--budget", "40s", *LOAD)
    run = run_locust(tmp_path, server.url, *flags, locustfile=OPEN_LOOP)
    capacity = assert_consistent(run, "requests/s")
    assert len(capacity["probes"]) == 1, run.output
    assert (capacity["status"], capacity["low"]) == ("above_maximum", 2)
    assert "At least 2 requests/s." in run.output
    assert run.exit_code in (0, 4), run.output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "no SLO says from when on the load is too much; give for example --slo 'p99(ttft)<=2s'"),
        (("--slo", "ttft<=1s"), "no SLO says from when on"),
        (("--slo", "requests_per_s>=3"), "does not say from which load on the server is too slow"),
        (("--slo", SLO, "--rate", "3"), "--rate and --capacity: each of them sets the load"),
        (("--slo", SLO, "-t", "1m"), "-t with --capacity: the search ends by itself"),
        (("--slo", SLO, "--resume", "nowhere"), "--resume nowhere: there is no capacity.json"),
        (("--slo", SLO, "-f", CHAT), "is a closed-loop user"),
    ],
)
def test_what_is_no_search_is_refused(tmp_path: Path, server: SimServer, flags: tuple[str, ...], words: str) -> None:
    command = [sys.executable, "-m", "vllm_locust", "capacity", "--host", server.url, "--workload", "short_chat"]
    done = subprocess.run(
        [*command, *flags], capture_output=True, text=True, cwd=tmp_path, env=environment(), check=False
    )
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_commands_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["capacity", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("--of", "--start-load", "--budget", "--reset-prefix-cache", "--resume"))


@pytest.mark.skipif(LONG not in os.environ, reason=f"simulates 150,000 requests; set {LONG}")
def test_the_true_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "TRUTH_REQUESTS", 30_000)
    root, error = study.truth(CASE)
    assert root == pytest.approx(CASE.capacity, abs=3 * error + 0.1)


@pytest.mark.skipif(LONG not in os.environ, reason=f"two searches of two minutes each; set {LONG}")
@pytest.mark.parametrize("workers", [2, 3])
def test_a_search_over_several_workers(tmp_path: Path, server: SimServer, workers: int) -> None:
    flags = (
        "--capacity",
        "rate",
        "--slo",
        SLO,
        "--start-load",
        "30",
        "--budget",
        "120s",
        "--reset-prefix-cache",
        *LOAD,
    )
    run = run_distributed(tmp_path, server.url, workers, flags, locustfile=OPEN_LOOP)
    capacity = assert_consistent(run, "requests/s")
    assert 0.75 * CASE.capacity < capacity["load"] < 1.3 * CASE.capacity, run.output


@pytest.mark.skipif(LONG not in os.environ, reason=f"a search of a minute; set {LONG}")
@pytest.mark.parametrize("flags", [(), ("--reset-prefix-cache",)], ids=["warm", "cache reset"])
def test_a_search_for_the_number_of_users(tmp_path: Path, server: SimServer, flags: tuple[str, ...]) -> None:
    """Eight users have a place each; the ninth waits for one."""
    common = ("--capacity", "users", "--slo", "p90(ttft)<=100ms", "--start-load", "3", "--budget", "90s", *LOAD)
    run = run_locust(tmp_path, server.url, *common, *flags)
    capacity = assert_consistent(run, "users")
    assert capacity["low"] <= 9
    assert 7 <= capacity["load"] <= 11, run.output
