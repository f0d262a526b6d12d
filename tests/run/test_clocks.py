"""Wall clocks that are wrong or are set during a run: no duration moves, and all series end on one axis."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.run.simulated import LocustRun, end_of, free_port, simserver, start_locust, wait_for_text

pytestmark = pytest.mark.timeout(120)

SLOW = ("--first-token-ms", "20", "--token-interval-ms", "20")
FLAGS = ("--headless", "--only-summary", "--run-dir", "run", "-u", "8", "-r", "8", "--warmup-requests", "0")


def run_with_bent_worker(directory: Path, url: str, clock: str, duration: str) -> LocustRun:
    """The worker's wall clock is bent, the master's and the server's are not."""
    master, worker = start_with_bent_worker(directory, url, clock, duration)
    run = end_of(master, directory)
    end_of(worker, directory, 20)
    return run


def start_with_bent_worker(
    directory: Path, url: str, clock: str, duration: str
) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    port = str(free_port())
    load = ("-t", duration, "--max-tokens", "20", "--force-length")
    bind = ("--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--expect-workers", "1")
    master = start_locust(directory, url, *bind, *FLAGS, *load)
    flags = ("--worker", "--master-host", "127.0.0.1", "--master-port", port)
    return master, start_locust(directory, None, *flags, VLLM_LOCUST_TEST_CLOCK=clock)


def test_a_step_of_the_wall_clock_moves_no_duration(tmp_path: Path) -> None:
    with simserver(tmp_path, *SLOW) as server:
        now = tmp_path / "now"
        master, worker = start_with_bent_worker(tmp_path, server.url, f"step=7s@{now}", "5s")
        wait_for_text(server.truth_log, 40)
        now.touch()
        run = end_of(master, tmp_path)
        end_of(worker, tmp_path, 20)
        server.stop()
        truth = {row["request_id"]: row for row in server.truth()}
    rows = run.requests()
    assert len(rows) > 50, run.output
    moved_ns = run.json("run.json")["clock"]["step_max_ns"]
    assert 6_900_000_000 < moved_ns < 7_100_000_000, "it stepped"
    span_ns = max(row["sent_unix_ns"] for row in rows) - min(row["sent_unix_ns"] for row in rows)
    assert span_ns < 12 * 10**9, "and no record with it"
    for row in rows:
        sent = truth[row["request_id"]]["chunk_before_ns"]
        true_span_ns = sent[-1] - sent[0]
        assert abs(row["chunk_ns"][-1] - row["chunk_ns"][0] - true_span_ns) < 200_000_000, "7 s would show"
        assert all(after >= before for before, after in zip(row["chunk_ns"], row["chunk_ns"][1:], strict=False))
    touched = [row for row in rows if row["stamp_source"] == "user"]
    assert len(touched) <= 16, "only reads around the step are without a kernel stamp"
    assert run.summary["stages"][0]["e2e_s"]["max"] < 2.0
    assert "clock_stepped" in [reason["code"] for reason in run.summary["verdict"]["reasons"]], run.output


def test_a_step_of_the_masters_clock_moves_no_window(tmp_path: Path) -> None:
    with simserver(tmp_path, *SLOW) as server:
        flags, now = ("-t", "5s", "--max-tokens", "20", "--force-length"), tmp_path / "now"
        load = start_locust(tmp_path, server.url, *FLAGS, *flags, VLLM_LOCUST_TEST_CLOCK=f"step=9s@{now}")
        wait_for_text(server.truth_log, 40)
        now.touch()
        run = end_of(load, tmp_path)
    window = run.json("run.json")["window"]
    assert 4.9 < (window["end_unix_ns"] - window["start_unix_ns"]) / 1e9 < 5.5, run.output
    assert run.json("run.json")["clock"]["step_max_ns"] > 8_900_000_000, "it stepped"
    assert "drain" not in {row["phase"] for row in run.requests() if row["sent_unix_ns"] < window["end_unix_ns"]}


def test_a_clock_that_is_centuries_wrong_is_one_clear_error(tmp_path: Path) -> None:
    words = "clock is 285 years from that of the Redis server, too far to put its times on one axis; set the clock"
    with simserver(tmp_path, *SLOW) as server:
        load = start_locust(tmp_path, server.url, *FLAGS, "-t", "1s", VLLM_LOCUST_TEST_CLOCK="offset=8993700000s")
        alone = end_of(load, tmp_path)
        by_worker = run_with_bent_worker(tmp_path, server.url, "offset=-8993700000s", "1s")
        assert not server.truth()
    for run, code in ((alone, 1), (by_worker, 2)):
        assert run.exit_code == code, run.output
        assert words in run.output
        assert "Traceback" not in run.output


def test_a_worker_whose_clock_is_wrong_is_put_on_the_common_axis(tmp_path: Path) -> None:
    before_ns = time.time_ns()
    with simserver(tmp_path, *SLOW) as server:
        run = run_with_bent_worker(tmp_path, server.url, "offset=-3600s", "2s")
    after_ns = time.time_ns()
    rows = run.requests()
    assert len(rows) > 20, run.output
    assert all(before_ns < row["sent_unix_ns"] < after_ns for row in rows)
    assert "window" in {row["phase"] for row in rows}
    offsets = run.json("run.json")["clock"]["offset_ns"]
    assert [round(offset / 1e9) for offset in offsets.values()] == [3600]
