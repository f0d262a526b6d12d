"""What a real vLLM tells of itself during a run, against the client's own records and the server's own page."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest

from tests.live.server_metrics import counting
from tests.live.server_process import vllm_server
from tests.run.simulated import end_of, run_locust, start_locust
from tests.run.test_server_metrics import ALL, gained, series

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]

LOAD = ("--workload", "short_chat", "--max-tokens", "48", "--force-length", "--warmup-requests", "8")


def test_counters_are_those_of_the_client_and_of_the_page(vllm_url: str, tmp_path: Path) -> None:
    with counting(vllm_url) as added:
        run = run_locust(tmp_path, vllm_url, "-u", "8", "-r", "8", "-t", "12s", *LOAD, **ALL)
    assert run.exit_code in (0, 4), run.output
    rows, seen = run.requests(), series(run)
    assert len(rows) > 20
    for ours, theirs, field in (
        ("generation_tokens_total", "vllm:generation_tokens_total", "output_tokens"),
        ("prompt_tokens_total", "vllm:prompt_tokens_total", "prompt_tokens"),
    ):
        assert gained(seen["0", ours]) == added.total(theirs) == sum(row[field] for row in rows)
    assert gained(seen["0", "ttft_seconds_count"]) == added.histogram("vllm:time_to_first_token_seconds").count
    assert gained(seen["0", "queue_seconds_sum"]) == pytest.approx(added.total("vllm:request_queue_time_seconds_sum"))
    assert max(running for _, running in seen["0", "requests_running"]) <= 8

    (stage,) = run.summary["stages"]
    server = stage["server"]
    assert server["restarts"] == server["pages_failed"] == 0
    assert server["generation_tokens_per_s"] == pytest.approx(stage["output_tokens_per_s"], rel=0.1)
    ttft = server["ttft_s"]
    assert 0 <= ttft["queue"] < ttft["mean"]
    assert 0 < ttft["prefill"] < ttft["mean"]
    assert 0 < ttft["front_end"] < ttft["mean"]
    assert -0.005 < ttft["network"] < ttft["mean"], "both on one machine"
    assert server["requests_finished"] is not None
    assert sum(server["requests_finished"].values()) == pytest.approx(stage["requests"]["ok"], rel=0.2)


def test_a_queue_and_a_full_cache_show(serve_script: str, tmp_path: Path) -> None:
    with vllm_server(serve_script, tmp_path, MAX_NUM_SEQS="2") as server:
        run = run_locust(tmp_path, server.url, "-u", "8", "-r", "8", "-t", "10s", *LOAD, **ALL)
    assert run.exit_code in (0, 4), run.output
    told = run.summary["stages"][0]["server"]
    assert told["requests_running"]["max"] == 2
    assert told["requests_waiting"]["mean"] == pytest.approx(6, abs=1.5)
    assert told["ttft_s"]["queue"] > 0.5 * told["ttft_s"]["mean"]
    assert 0 < told["kv_cache_usage"]["max"] <= 1


def wait_until_refused(port: int, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.1)
    raise AssertionError(f"something still listens on port {port}")


def test_a_vllm_that_is_started_anew_in_the_run(serve_script: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    common = ("--headless", "--only-summary", "--run-dir", "run", "--max-failures", "100%", "--progress", "json")
    with vllm_server(serve_script, first) as before:
        port = int(before.url.rpartition(":")[2])
        # A server may take minutes to start on a busy machine, the more so where users try without a pause meanwhile.
        paced = ("-u", "4", "-r", "4", "-t", "300s", "--think-time", "200ms")
        load = start_locust(tmp_path, before.url, *common, *paced, *LOAD, **ALL)
        try:
            assert load.stdout is not None
            assert any('"window"' in line for line in load.stdout), "the run ended before its window"
            time.sleep(3)
            before.kill()
            wait_until_refused(port)
            with vllm_server(serve_script, second, port=port):
                time.sleep(5)
                load.send_signal(signal.SIGINT)
                run = end_of(load, tmp_path, 100)
        finally:
            load.kill()
    server = run.summary["stages"][0]["server"]
    assert server["restarts"] == 1, run.output
    assert server["pages_failed"] > 3
    assert gained(series(run)[None, "process_start_time_seconds"]) > 3
