"""The classic picture of overload in a whole run: beyond its capacity throughput is flat, and times explode."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.simulated import OPEN_LOOP, run_locust, simserver

pytestmark = pytest.mark.timeout(120)

TWENTY_A_SECOND = (
    *("--max-num-seqs", "10", "--step-base-ms", "20", "--frontend-ms", "0", "--prefill-us-per-token", "0"),
    *("--decode-us-per-seq", "0", "--kv-us-per-token", "0"),
)
"""Ten requests at a time, each of 25 steps of 20 ms."""
ANSWERS = ("--max-tokens", "25", "--force-length", "--warmup-requests", "0", "--token-detail", "off")


def test_throughput_is_flat_times_explode_and_goodput_falls(tmp_path: Path) -> None:
    stages = ("--rate-stages", "10:11s,20:4s,30:6s", "--seed", "1", "--slo", "ttft_from_schedule<=500ms")
    with simserver(tmp_path, *TWENTY_A_SECOND) as server:
        run = run_locust(tmp_path, server.url, *stages, *ANSWERS, locustfile=OPEN_LOOP)
    low, full, beyond = run.summary["stages"]
    assert {row["outcome"] for row in run.requests()} == {"ok"}, run.output
    # All of it is sent, whatever the server can do.
    assert [stage["offered_rps"] for stage in (low, full, beyond)] == [10, 20, 30]
    assert beyond["achieved_rps"] == pytest.approx(beyond["planned_arrivals"] / beyond["length_s"], rel=0.05)
    assert low["achieved_rps"] < full["achieved_rps"] < beyond["achieved_rps"]
    # The server does what it can and no more.
    assert low["requests_per_s"] == pytest.approx(low["achieved_rps"], rel=0.15)
    assert low["requests_per_s"] < full["requests_per_s"]
    assert beyond["requests_per_s"] < 21 < 0.8 * beyond["achieved_rps"]
    # And who comes must wait.
    for metric in ("ttft_s", "ttft_from_schedule_s", "e2e_s"):
        assert beyond[metric]["p99"] > 2 * low[metric]["p99"], metric
    assert beyond["ttft_from_schedule_s"]["p50"] > 5 * low["ttft_from_schedule_s"]["p50"]
    assert low["in_flight"]["mean"] < 10 < beyond["in_flight"]["mean"]
    assert beyond["goodput_rps"] < 0.5 * low["goodput_rps"]
    assert beyond["good_fraction"] < 0.3 < 0.7 < low["good_fraction"]
    assert (low["overloaded"], beyond["overloaded"]) == (False, True)
    page = " ".join((run.run_dir / "report.txt").read_text().split())
    assert "stage 30/s is overloaded: " in page
    assert "stage 10/s is overloaded" not in page
    assert run.exit_code in (0, 4), "a run that shows an overload is a good run"
