"""Whole runs against the simulated server's log of what it really sent."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.run.simulated import FAST, LocustRun, SimServer, processes, run_distributed, run_locust, simserver

pytestmark = pytest.mark.timeout(180)


def by_request(server: SimServer) -> dict[str, dict[str, Any]]:
    rows = server.truth()
    found = {row["request_id"]: row for row in rows}
    assert len(found) == len(rows), "the server saw a request id twice"
    return found


def nearest_rank(values: list[float], q: float) -> float:
    return sorted(values)[max(1, math.ceil(q * len(values))) - 1]


def assert_same_requests(run: LocustRun, server: SimServer) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Every request of the truth log is in the records exactly once, and the other way round; returns the pairs."""
    truth, rows = by_request(server), run.requests()
    assert len(rows) > 20, run.output
    assert sorted(row["request_id"] for row in rows) == sorted(truth), run.output
    return [(row, truth[row["request_id"]]) for row in rows]


def true_times_ns(row: dict[str, Any], truth: dict[str, Any]) -> list[int]:
    """When the server really sent each chunk, counted from the request's own ``sent``: both on this machine's clock."""
    distance_ns = truth["received_unix_ns"] - truth["received_mono_ns"] - row["sent_unix_ns"]
    assert len(row["chunk_ns"]) == len(truth["chunk_before_ns"])
    return [before + distance_ns for before in truth["chunk_before_ns"]]


def test_a_distributed_run_reports_what_the_server_sent(tmp_path: Path) -> None:
    flags = ("-u", "100", "-r", "100", "-t", "6s", "--warmup-requests", "100", "--max-tokens", "60", "--force-length")
    with simserver(tmp_path, "--first-token-ms", "50", "--token-interval-ms", "20") as server:
        run = run_distributed(tmp_path, server.url, 2, flags)
        server.stop()
        assert run.exit_code in (0, 4), run.output
        pairs = assert_same_requests(run, server)
    errors: list[float] = []
    for row, truth in pairs:
        assert row["outcome"] == "ok"
        assert row["output_tokens"] == truth["output_tokens"] == 60
        assert row["prompt_tokens"] == truth["prompt_tokens"]
        errors += [abs(at - true) / 1e6 for at, true in zip(row["chunk_ns"], true_times_ns(row, truth), strict=True)]
    assert len({row["worker_id"] for row, _ in pairs}) == 2
    assert len({row["prompt_id"] for row, _ in pairs}) == len(pairs), "a prompt was sent twice"
    assert nearest_rank(errors, 0.99) < 1.0, f"p99 {nearest_rank(errors, 0.99)} ms"
    check_numbers(run, pairs)


def check_numbers(run: LocustRun, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """The summary's numbers, computed again from the truth log alone."""
    summary = run.summary
    window = [(row, truth) for row, truth in pairs if row["phase"] == "window"]
    assert len(window) > 50
    (stage,) = summary["stages"]
    assert stage["requests"]["attempted"] == stage["requests"]["ok"] == len(window)
    true_ttft = [true_times_ns(row, t)[0] / 1e9 for row, t in window]
    true_gaps = [(after - before) / 1e9 for _, t in window for before, after in pairwise(t["chunk_before_ns"])]
    assert stage["ttft_s"]["n"] == len(window)
    assert stage["itl_s"]["n"] == len(true_gaps) == len(window) * 59
    for key, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert stage["ttft_s"][key] == pytest.approx(nearest_rank(true_ttft, q), abs=0.002)
        assert stage["itl_s"][key] == pytest.approx(nearest_rank(true_gaps, q), abs=0.002)
    assert stage["itl_s"]["mean"] == pytest.approx(sum(true_gaps) / len(true_gaps), abs=0.0005)
    true_tpot = [(t["chunk_before_ns"][-1] - t["chunk_before_ns"][0]) / 59 / 1e9 for _, t in window]
    assert stage["tpot_s"]["p50"] == pytest.approx(nearest_rank(true_tpot, 0.5), abs=0.0005)
    true_e2e = [true_times_ns(row, t)[-1] / 1e9 for row, t in window]
    assert stage["e2e_s"]["p99"] == pytest.approx(nearest_rank(true_e2e, 0.99), abs=0.002)
    seconds = (run.json("run.json")["window"]["end_unix_ns"] - run.json("run.json")["window"]["start_unix_ns"]) / 1e9
    assert seconds == pytest.approx(6.0, abs=0.25)
    tokens = sum(truth["output_tokens"] for _, truth in pairs)
    assert summary["totals"]["all_phases"]["output_tokens"] == tokens
    # 100 users, each answer takes 50 + 59 x 20 ms: so many tokens a second flow in the steady state.
    assert stage["output_tokens_per_s"] == pytest.approx(100 * 60 / 1.23, rel=0.05)


@pytest.mark.parametrize("transport", ["kernel", "sse", "openai"])
def test_every_transport_gives_the_same_records(tmp_path: Path, transport: str) -> None:
    with simserver(tmp_path, *FAST, "--reasoning-share", "0.3") as server:
        flags = ("-u", "8", "-r", "8", "-t", "2s", "--warmup-requests", "8", "--max-tokens", "20", "--force-length")
        run = run_locust(tmp_path, server.url, *flags, "--transport", transport)
        server.stop()
        assert run.exit_code in (0, 4), run.output
        for row, truth in assert_same_requests(run, server):
            assert (row["transport"], row["outcome"], row["finish_reason"]) == (transport, "ok", "length")
            assert row["output_tokens"] == truth["output_tokens"] == sum(row["chunk_tokens"])
            assert row["prompt_tokens"] == truth["prompt_tokens"]
            assert 0 < row["ttft_ns"] <= row["ttft_answer_ns"] <= row["e2e_ns"]
            assert row["response_id"] == f"chatcmpl-{row['request_id']}"
            assert row["stamp_source"] == ("kernel" if transport == "kernel" else "user")


def test_processes_flag_completions_and_whole_answers(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        flags = ("-u", "8", "-r", "8", "-t", "2s", "--warmup-requests", "8", "--max-tokens", "20")
        run = run_locust(tmp_path, server.url + "/v1", *flags, *processes(2), "--api", "completions", "--no-stream")
        server.stop()
        assert run.exit_code in (0, 4), run.output
        for row, truth in assert_same_requests(run, server):
            assert row["outcome"] == "ok"
            assert row["streamed"] is False
            assert row["ttft_ns"] is None
            assert row["chunk_ns"] == []
            assert row["output_tokens"] == truth["output_tokens"]
            assert row["e2e_ns"] == row["done_ns"] > 0
    assert run.summary["stages"][0]["ttft_s"]["n"] == 0


def test_failures_are_counted_by_outcome_and_stay_out_of_latencies(tmp_path: Path) -> None:
    faults = [part for name in ("truncated", "error_event", "status") for part in ("--fault", f"{name}:share=0.1")]
    with simserver(tmp_path, *FAST, *faults) as server:
        flags = ("-u", "8", "-r", "8", "-t", "3s", "--warmup-requests", "8", "--max-tokens", "20", "--force-length")
        run = run_locust(tmp_path, server.url, *flags, "--max-failures", "90%", "--slo", "ttft<=2s")
        server.stop()
        pairs = assert_same_requests(run, server)
    assert run.exit_code in (0, 4), run.output
    window = [row for row, _ in pairs if row["phase"] == "window"]
    outcomes = {name: sum(row["outcome"] == name for row in window) for name in {row["outcome"] for row in window}}
    assert {"ok", "truncated", "error_event", "http_error"} <= set(outcomes)
    (stage,) = run.summary["stages"]
    assert stage["requests"]["ok"] == outcomes.pop("ok")
    assert stage["requests"]["failed_by_outcome"] == outcomes
    assert stage["e2e_s"]["n"] == stage["requests"]["ok"]
    failed = len(window) - stage["requests"]["ok"]
    for metric in ("ttft", "tpot", "e2e"):
        adjusted = stage[f"{metric}_adjusted_s"]
        assert (adjusted["n"], adjusted["failed"]) == (len(window), failed), metric
    assert stage["good_fraction"] == pytest.approx(stage["requests"]["ok"] / len(window))
