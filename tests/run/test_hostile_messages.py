"""A peer that sends the master anything but what a worker says: the run goes on, and its result has all requests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.simulated import CHAT, FAST, ROOT, end_of, free_port, simserver, start_locust, wait_for_text

pytestmark = pytest.mark.timeout(120)


def test_the_master_outlives_it_and_counts_what_it_refused(tmp_path: Path) -> None:
    port = str(free_port())
    with simserver(tmp_path, *FAST) as server:
        master = start_locust(
            tmp_path,
            server.url,
            *("--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--expect-workers", "1"),
            *("--headless", "--only-summary", "--run-dir", "run", "-u", "4", "-r", "4", "-t", "5s"),
            *("--warmup-requests", "4", "--max-tokens", "20", "--force-length"),
            locustfile=CHAT,
        )
        worker = start_locust(tmp_path, None, "--worker", "--master-host", "127.0.0.1", "--master-port", port)
        wait_for_text(server.truth_log, 50)
        peer = [sys.executable, "-m", "tests.run.hostile_peer", port]
        subprocess.run(peer, cwd=ROOT, check=True, timeout=60)
        run = end_of(master, tmp_path)
        end_of(worker, tmp_path, 20)
        server.stop()
        truth = {row["request_id"] for row in server.truth()}
    assert len(truth) > 100
    assert {row["request_id"] for row in run.requests()} == truth, run.output
    workers = run.json("run.json")["workers"]
    refused = workers["refused_messages"]
    # Nine pieces of nonsense from each of two peers, of which one more from each is in another's name.
    assert refused["vllm_locust.ready"] == refused["vllm_locust.snapshot"] == 18
    assert refused["vllm_locust.flushed"] == 20
    assert refused["heartbeat"] > 0
    assert workers["missing"] == ["registered"], "it has taken part without a word, as a worker that was lost would"
    assert set(workers["flushed"]) == set(workers["ids"]) - {"registered"}
    assert run.exit_code == 1
    (stage,) = run.summary["stages"]
    assert stage["requests"]["ok"] > 50
    assert "etc/passwd" not in (run.run_dir / "run.json").read_text()
    beside = {".experiments.csv.lock", "experiments.csv", "run", "truth.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == beside
