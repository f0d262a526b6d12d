"""A real vLLM with other flags, and one that dies: ``VLLM_LOCUST_TEST_VLLM_SERVE=SCRIPT pytest tests/live``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.server_metrics import Added, counting, read_samples
from tests.live.server_process import VllmServer, vllm_server
from tests.live.test_vllm import QUICK, assert_itl_agrees, assert_same_counts, assert_tokens_of_every_chunk, ok_rows
from tests.run.simulated import end_of, run_locust, start_locust

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]

KEY = "sk-test-of-a-live-server"


@pytest.fixture(scope="module")
def strict_server(serve_script: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """Wants a key, and sends several tokens in one chunk."""
    directory = tmp_path_factory.mktemp("strict")
    with vllm_server(serve_script, directory, "--api-key", KEY, "--stream-interval", "4") as server:
        yield server


@pytest.mark.parametrize("transport", ["kernel", "sse", "openai"])
def test_several_tokens_in_a_chunk(strict_server: VllmServer, sharegpt: str, tmp_path: Path, transport: str) -> None:
    flags = (*QUICK, "--workload", sharegpt, "--max-tokens", "64", "--transport", transport)
    with counting(strict_server.url) as added:
        run = run_locust(tmp_path, strict_server.url, *flags, OPENAI_API_KEY=KEY)
    rows = ok_rows(run)
    assert_same_counts(rows, added)
    assert_tokens_of_every_chunk(rows)
    sizes = Counter(tokens for row in rows for tokens in row["chunk_tokens"][1:-1])
    assert sizes[4] > 0.9 * sizes.total(), sizes
    window = [row for row in rows if row["phase"] == "window"]
    (stage,) = run.summary["stages"]
    assert stage["itl_s"]["n"] == sum(sum(row["chunk_tokens"][1:]) for row in window)
    assert stage["chunk_gap_s"]["n"] == sum(len(row["chunk_ns"]) - 1 for row in window)
    total_ns = sum(row["chunk_ns"][-1] - row["chunk_ns"][0] for row in window)
    assert stage["itl_s"]["mean"] == pytest.approx(total_ns / 1e9 / stage["itl_s"]["n"], rel=1e-6)
    if transport == "kernel":
        assert_itl_agrees(rows, added.histogram("vllm:inter_token_latency_seconds"))


def test_the_key_from_a_file_reaches_the_server_and_nothing_else(strict_server: VllmServer, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(f"{KEY}\n", encoding="utf-8")
    flags = (*QUICK, "--max-tokens", "16", "--processes", "2", "--api-key-file", str(key_file))
    with counting(strict_server.url) as added:
        run = run_locust(tmp_path, strict_server.url, *flags)
    assert_same_counts(ok_rows(run), added)
    assert KEY not in run.output
    assert not [path for path in run.run_dir.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


@pytest.mark.parametrize("key", ["sk-wrong", None])
def test_a_wrong_or_missing_key_is_refused_before_any_load(
    strict_server: VllmServer, tmp_path: Path, key: str | None
) -> None:
    run = run_locust(tmp_path, strict_server.url, *QUICK, **({} if key is None else {"OPENAI_API_KEY": key}))
    assert run.exit_code == 2, run.output
    assert "401" in run.output
    assert "set OPENAI_API_KEY or --api-key-file" in run.output


def test_refused_requests_are_counted_by_outcome(serve_script: str, sharegpt: str, tmp_path: Path) -> None:
    """vLLM refuses what finds its queue full with an error event in a 200 stream, or at times with a 503."""
    directory = tmp_path / "server"
    directory.mkdir()
    load = ("-u", "12", "-r", "12", "-t", "5s", "--warmup-requests", "12", "--think-time", "100ms")
    limit = ("--max-num-queued-reqs", "2")
    with vllm_server(serve_script, directory, *limit, MAX_NUM_SEQS="2") as server, counting(server.url) as added:
        run = run_locust(tmp_path, server.url, *load, "--workload", sharegpt, "--max-tokens", "64")
    assert run.exit_code == 1, run.output
    rows = run.requests()
    outcomes = Counter(row["outcome"] for row in rows)
    assert set(outcomes) <= {"ok", "error_event", "http_error"}
    assert outcomes["ok"] > 10
    assert outcomes["error_event"] > 10
    assert_same_counts([row for row in rows if row["outcome"] == "ok"], added)
    for row in rows:
        if row["outcome"] != "ok":
            assert row["http_status"] == (200 if row["outcome"] == "error_event" else 503)
            assert row["error"].startswith("The engine is currently busy")
            assert row["chunk_ns"] == []
            assert row["e2e_ns"] is None
    window = Counter(row["outcome"] for row in rows if row["phase"] == "window")
    (stage,) = run.summary["stages"]
    assert stage["requests"]["ok"] == stage["e2e_s"]["n"] == window.pop("ok")
    assert stage["requests"]["failed_by_outcome"] == window


def test_a_server_killed_in_mid_run(serve_script: str, sharegpt: str, tmp_path: Path) -> None:
    directory = tmp_path / "server"
    directory.mkdir()
    flags = ("-u", "3", "-r", "3", "-t", "12s", "--warmup-requests", "0", "--think-time", "100ms")
    common = ("--headless", "--only-summary", "--run-dir", "run", "--workload", sharegpt, "--max-tokens", "256")
    with vllm_server(serve_script, directory) as server:
        process = start_locust(tmp_path, server.url, *common, *flags)
        deadline = time.monotonic() + 60
        while finished_requests(server) < 5 and time.monotonic() < deadline:
            time.sleep(0.1)
        server.kill()
        run = end_of(process, tmp_path)
    assert run.exit_code == 1, run.output
    outcomes = Counter(row["outcome"] for row in run.requests())
    assert set(outcomes) == {"ok", "disconnected", "connect_error"}, run.output
    assert outcomes["ok"] >= 5
    assert 1 <= outcomes["disconnected"] <= 3, "those that were running, one per user at most"
    assert outcomes["connect_error"] > 5, "its users go on"
    for row in run.requests():
        if row["outcome"] == "disconnected" and row["chunk_ns"]:
            assert row["ttft_ns"] == row["chunk_ns"][0]
            assert sum(row["chunk_tokens"]) == row["output_tokens"] <= 256
    assert "user" not in run.summary["totals"]["all_phases"]["stamp_sources"], "nothing came from a dead server"
    assert "Traceback" not in run.output
    assert run.summary["totals"]["all_phases"]["requests"] == outcomes.total()


def finished_requests(server: VllmServer) -> float:
    return Added(read_samples(server.url)).total("vllm:request_success_total")
