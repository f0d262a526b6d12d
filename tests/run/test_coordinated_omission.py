"""A queue that builds up at the client is in the times from the schedule, and in no time from sending.

One slot, answers of half a second, ten arrivals a second: arrival k is due at 0.1 k and sent at 0.5 k seconds.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.run.simulated import OPEN_LOOP, LocustRun, run_locust, simserver
from vllm_locust.verdict.reason import THRESHOLDS

pytestmark = pytest.mark.timeout(120)

ARRIVALS = 20
SERVICE_NS = 500_000_000
GAP_NS = 100_000_000
P50, P99 = 10 - 1, 20 - 1
"""Of twenty values in order, by nearest rank."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> LocustRun:
    directory = tmp_path_factory.mktemp("omission")
    with simserver(directory, "--first-token-ms", "500", "--token-interval-ms", "1") as server:
        flags = ("--rate", "10", "-t", "2s", "--arrival", "constant", "-u", "1", "--warmup-requests", "0")
        return run_locust(directory, server.url, *flags, "--max-tokens", "1", locustfile=OPEN_LOOP)


@pytest.fixture(scope="module")
def rows(run: LocustRun) -> list[dict[str, Any]]:
    return sorted(run.requests(), key=lambda row: row["arrival"])


def test_every_request_waits_as_long_as_arithmetic_says(run: LocustRun, rows: list[dict[str, Any]]) -> None:
    t0_unix_ns = run.json("run.json")["schedule"]["t0_unix_ns"]
    assert [row["arrival"] for row in rows] == list(range(ARRIVALS)), run.output
    for number, row in enumerate(rows):
        assert row["scheduled_unix_ns"] == t0_unix_ns + GAP_NS * number
        assert row["ttft_ns"] >= SERVICE_NS
        assert row["schedule_lag_ns"] >= row["slot_wait_ns"] >= 0
        assert row["schedule_lag_ns"] - row["slot_wait_ns"] < 200_000_000, "what is left is the generator's own"
        assert row["schedule_lag_ns"] >= (SERVICE_NS - GAP_NS) * number, "the server answers one after the other"
    for row, later in pairwise(rows):
        # It is sent when the one before has ended, and that was sent at its own lag after it was due.
        between_ns = later["schedule_lag_ns"] - (row["schedule_lag_ns"] + row["done_ns"] - GAP_NS)
        assert 0 <= between_ns < 200_000_000, "nothing but the slot's own turn lies between"


def test_the_summary_has_the_queue_where_it_belongs(run: LocustRun, rows: list[dict[str, Any]]) -> None:
    (stage,) = run.summary["stages"]
    lags_s = sorted(row["schedule_lag_ns"] / 1e9 for row in rows)
    ttfts_s = sorted(row["ttft_ns"] / 1e9 for row in rows)
    from_schedule_s = sorted((row["schedule_lag_ns"] + row["ttft_ns"]) / 1e9 for row in rows)
    for name, values in (("schedule_lag", lags_s), ("ttft", ttfts_s), ("ttft_from_schedule", from_schedule_s)):
        block = stage[f"{name}_s"]
        assert (block["n"], block["p50"], block["p99"], block["max"]) == (
            ARRIVALS,
            pytest.approx(values[P50]),
            pytest.approx(values[P99]),
            pytest.approx(values[-1]),
        )
    assert stage["schedule_lag_s"]["p50"] >= 0.4 * P50
    assert stage["ttft_from_schedule_s"]["p99"] >= 0.4 * P99 + 0.5
    assert stage["ttft_s"]["p50"] < 0.75, "the service is not slow"
    # The last were sent long after the window, in the drain: they belong to it all the same.
    (worker,) = run.summary["health"]["workers"]
    assert worker["schedule_lag_max_s"] == pytest.approx(lags_s[-1])


def test_both_times_are_printed_beside_each_other(run: LocustRun, rows: list[dict[str, Any]]) -> None:
    page = (run.run_dir / "report.txt").read_text()
    (stage,) = run.summary["stages"]
    lines = page[page.index("LATENCY") :].split("\n")[2:5]
    assert [line[2:22].strip() for line in lines] == ["TTFT", "TTFT from schedule", "schedule lag"]
    for line, name in zip(lines, ("ttft", "ttft_from_schedule", "schedule_lag"), strict=True):
        assert line.split()[-2:] == _shown(stage[f"{name}_s"]["max"]), line
    told = " ".join(page.split())
    assert "before they were sent; TTFT from schedule (" in told
    assert "Requests were sent up to" in told
    assert "because every slot was busy: TTFT from schedule includes the wait; raise -u" in told
    html = (run.run_dir / "report.html").read_text()
    assert html.index(">TTFT<") < html.index(">TTFT from schedule<") < html.index(">schedule lag<")
    codes = {reason["code"] for reason in run.summary["verdict"]["reasons"]}
    assert {"slots_full", "rate_missed"} <= codes
    own_lag_ns = max(row["schedule_lag_ns"] - row["slot_wait_ns"] for row in rows)
    late = own_lag_ns > THRESHOLDS.schedule_lag_p99_ns[0]
    assert ("schedule_lag" in codes) == late, "that word is for a generator that is late"


def _shown(seconds: float) -> list[str]:
    return [f"{seconds:.3g}", "s"] if seconds >= 1 else [f"{seconds * 1e3:.3g}", "ms"]
