"""The server's own metrics in whole runs, against what the simulated server really did."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.load.scripted_server import serving as serving_scripts
from tests.load.scripted_server import whole
from tests.run.simulated import FAST, LocustRun, end_of, free_port, run_locust, simserver, start_locust, wait_for_text

pytestmark = pytest.mark.timeout(180)

ALL = {"VLLM_LOCUST_METRICS_URL": ""}
"""The flag's own default."""
Series = dict[tuple[str | None, str], list[tuple[int, float]]]


def series(run: LocustRun) -> Series:
    found: Series = defaultdict(list)
    for row in pq.read_table(run.run_dir / "server.parquet").to_pylist():
        found[row["engine"], row["metric"]].append((row["time_unix_ns"], row["value"]))
    assert all(times == sorted(times) for times in found.values()), "in order of time"
    return found


def gained(of: list[tuple[int, float]]) -> float:
    return of[-1][1] - of[0][1]


def test_a_run_sees_what_the_server_did(tmp_path: Path) -> None:
    flags = ("-u", "12", "-r", "12", "-t", "6s", "--warmup-requests", "12", "--max-tokens", "40", "--force-length")
    with simserver(tmp_path, "--max-num-seqs", "4", "--step-base-ms", "8") as server:
        run = run_locust(tmp_path, server.url, *flags, **ALL)
        server.stop()
    assert run.exit_code in (0, 4), run.output
    rows, truth, seen = run.requests(), server.truth(), series(run)
    assert len(rows) > 40, run.output
    assert {engine for engine, metric in seen if metric == "requests_running"} == {"0"}

    looks = seen["0", "requests_running"]
    assert len(looks) >= 6
    for (at_unix_ns, running), (_, waiting) in zip(looks, seen["0", "requests_waiting"], strict=True):
        assert running <= 4
        assert_near_truth(running + waiting, at_unix_ns, truth)
    assert max(waiting for _, waiting in seen["0", "requests_waiting"]) >= 6, "12 users, 4 places"

    assert gained(seen["0", "generation_tokens_total"]) == sum(row["output_tokens"] for row in rows)
    assert gained(seen["0", "prompt_tokens_total"]) == sum(row["prompt_tokens"] for row in rows)
    assert gained(seen["0", 'request_success_total{finished_reason="length"}']) == len(rows)
    assert gained(seen["0", 'ttft_seconds_bucket{le="+Inf"}']) == gained(seen["0", "ttft_seconds_count"]) == len(rows)
    assert all(value == 1 for _, value in seen[None, "up"])
    assert_summary(run)


def assert_near_truth(told: float, at_unix_ns: int, truth: list[dict[str, Any]]) -> None:
    """As many as were in the server at that time, give or take those that came or went within 50 ms of it."""
    slack_ns = 50_000_000
    surely = possibly = 0
    for one in truth:
        begin = one["received_unix_ns"]
        end = begin + one["ended_mono_ns"] - one["received_mono_ns"]
        surely += begin + slack_ns <= at_unix_ns < end - slack_ns
        possibly += begin - slack_ns <= at_unix_ns < end + slack_ns
    assert surely <= told <= possibly


def assert_summary(run: LocustRun) -> None:
    (stage,) = run.summary["stages"]
    server = stage["server"]
    assert server["targets"] == [page["target"] for page in run.json("run.json")["server_metrics"]["pages"]]
    assert server["requests_running"]["max"] == 4
    assert server["requests_waiting"]["mean"] == pytest.approx(8, abs=2)
    assert server["generation_tokens_per_s"] == pytest.approx(stage["output_tokens_per_s"], rel=0.1)
    ttft = server["ttft_s"]
    rests = ttft["front_end"], ttft["network"]
    if None not in rests:  # of other requests where it would be below nothing
        assert sum((ttft["queue"], ttft["prefill"], *rests)) == pytest.approx(stage["ttft_s"]["mean"])
    assert ttft["queue"] > 0.5 * ttft["mean"] > 0.1, "most of the wait is for a place"
    assert "TTFT there, mean" in run.output
    assert "telemetry_missing" not in str(run.summary["verdict"])
    (scraped,) = run.json("run.json")["pages_scraped"].values()
    assert scraped["pages"] == len(series(run)[None, "up"])


def test_a_server_that_is_started_anew_in_the_run(tmp_path: Path) -> None:
    port = str(free_port())
    flags = ("-u", "4", "-r", "4", "-t", "8s", "--warmup-requests", "0", "--max-tokens", "20", "--force-length")
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
    with simserver(first, *FAST, "--port", port) as before:
        common = ("--headless", "--only-summary", "--run-dir", "run", "--max-failures", "100%")
        locust = start_locust(tmp_path, before.url, *common, *flags, "--metrics-url", before.url)
        try:
            wait_for_text(before.truth_log, 150)
            before.process.kill()
            time.sleep(1.5)
            with simserver(second, *FAST, "--port", port) as after:
                run = end_of(locust, tmp_path)
                made = sum(one["output_tokens"] for server in (before, after) for one in server.truth())
        finally:
            locust.kill()
    assert run.exit_code in (0, 4), run.output
    (stage,) = run.summary["stages"]
    server = stage["server"]
    assert server["restarts"] == 1
    assert server["pages_failed"] >= 1
    assert "a server was started anew once" in run.output
    assert f"Server metrics: {before.url}/metrics: " in run.output
    assert "/metrics is back" in run.output
    tokens = server["generation_tokens_per_s"] * stage["length_s"]
    assert 0.5 * made < tokens <= made, "what it made between the last look and its end is not known"


def test_none(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        run = run_locust(tmp_path, server.url, "-u", "1", "-t", "1s", "--warmup-requests", "0", "--metrics-url", "none")
    assert run.exit_code in (0, 4), run.output
    assert not (run.run_dir / "server.parquet").exists()
    assert run.summary["stages"][0]["server"] is None
    assert run.json("run.json")["server_metrics"] == {"pages": []}


def test_a_page_that_was_asked_for_must_be_there(tmp_path: Path) -> None:
    other = whole(b"node_load1 0.5\n", content_type=b"text/plain")
    with simserver(tmp_path, *FAST) as server, serving_scripts({"GET": (other,)}) as exporter:
        page = f"http://127.0.0.1:{exporter.listener.getsockname()[1]}/metrics"
        asked = ("--metrics-url", f"{server.url}/nothing", "--metrics-url", page)
        run = run_locust(tmp_path, server.url, "-u", "1", "-t", "1s", *asked)
    assert run.exit_code == 2
    assert f"--metrics-url {server.url}/nothing: it answered 404" in run.output
    assert f"--metrics-url {page}: it tells nothing of a server that this version knows" in run.output
