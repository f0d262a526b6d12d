"""Retries and lost patience in whole runs: what the server saw is what the records say."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.run.simulated import FAST, run_locust, simserver
from vllm_locust.load.retry import BACKOFF_BASE_NS, BACKOFF_CAP_NS

LOAD = ("-u", "6", "-r", "6", "-t", "2s", "--warmup-requests", "0", "--max-tokens", "5", "--drain-timeout", "10s")


def test_every_attempt_reaches_the_server_under_one_id(tmp_path: Path) -> None:
    fault = "status:share=0.3,code=429,retry_after=0.05"
    with simserver(tmp_path, *FAST, "--fault", fault, "--seed", "4") as server:
        run = run_locust(tmp_path, server.url, *LOAD, "-t", "4s", "--retries", "10", "--max-failures", "100%")
        truth = server.truth()
    rows = run.requests()
    assert run.exit_code in (0, 4), run.output
    assert len(rows) > 50
    assert Counter(entry["request_id"] for entry in truth) == {row["request_id"]: row["attempts"] for row in rows}
    again = [row for row in rows if row["attempts"] > 1]
    assert len(rows) * 0.15 < len(again) < len(rows) * 0.5
    for row in rows:
        # Who was waiting when the run ended has the server's last words, and a wait that came to nothing.
        ended_first = row["outcome"] == "http_error" and "the run was ending" in row["error"]
        assert ended_first or row["outcome"] == "ok"
        waits = row["attempts"] - 1
        backoff_ns = sum(min(BACKOFF_CAP_NS, BACKOFF_BASE_NS << retry) for retry in range(waits + ended_first))
        assert waits * 50_000_000 <= row["retry_wait_ns"] <= backoff_ns + (waits + ended_first) * 200_000_000
        assert ended_first or row["ttft_ns"] > row["retry_wait_ns"]


def test_users_who_lost_patience_are_counted_and_the_server_sees_them_go(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST, "--fault", "slow_headers:share=0.3,s=3", "--seed", "4") as server:
        run = run_locust(tmp_path, server.url, *LOAD, "--patience", "200ms-400ms", "--max-failures", "100%")
        truth = {entry["request_id"]: entry for entry in server.truth()}
    rows = run.requests()
    outcomes = Counter(row["outcome"] for row in rows)
    assert outcomes.keys() <= {"ok", "abandoned"}
    assert min(outcomes.values()) > 10
    left = [row for row in rows if row["outcome"] == "abandoned"]
    waited_ns = [row["ended_ns"] for row in left]
    assert min(waited_ns) > 200_000_000
    assert max(waited_ns) < 400_000_000 + 200_000_000
    assert max(waited_ns) - min(waited_ns) > 50_000_000
    assert all("--patience" in row["error"] for row in left)
    assert all(row["ttft_ns"] < 400_000_000 + 200_000_000 for row in rows if row["outcome"] == "ok")
    assert {truth[row["request_id"]]["outcome"] for row in left} == {"client_closed"}
    (stage,) = run.summary["stages"]
    assert stage["requests"]["failed_by_outcome"]["abandoned"] <= outcomes["abandoned"]
    (told,) = run.summary["errors"]
    assert told["examples"] == [{"text": left[0]["error"], "count": len(left)}], "one text, however long each waited"
