"""Workers and whole client hosts that are lost, and a recorder that is: what is there counts once, the rest is
named."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.faults.cluster import SHORT, books, cluster, codes, seconds_since, server_host, wait_for_requests
from tests.faults.network import Network
from tests.faults.redis_host import RedisHost
from tests.run.simulated import OPEN_LOOP, planned_unix_ns

pytestmark = pytest.mark.timeout(150)


def test_a_killed_worker_and_a_killed_recorder(network: Network, redis: RedisHost, tmp_path: Path) -> None:
    """Closed loop: what the worker had sent in its last seconds is lost, and counted as far as it is known."""
    with server_host(network, tmp_path) as server:
        flags = ("--redis-url", redis.url, "-u", "20", "-r", "20", "-t", "8s", "--warmup-requests", "10")
        with cluster(network, tmp_path, server.url, *flags, *SHORT) as run:
            run.start_workers()
            wait_for_requests(server, 60)
            first_recorder = run.recorder_pid()
            os.kill(first_recorder, signal.SIGKILL)
            wait_for_requests(server, 100)
            assert run.recorder_pid() != first_recorder
            killed_ns = time.time_ns()
            os.killpg(run.workers["client2"].pid, signal.SIGKILL)
            ended = run.end()
        book = books(ended, server)
    assert ended.exit_code == 1, ended.output
    assert "workers_missing" in codes(ended), ended.output
    assert ended.summary["verdict"]["status"] != "valid"
    facts = ended.json("run.json")
    assert facts["recorder"]["restarts"] == 1
    (missing,) = facts["workers"]["missing"]
    assert {row["worker_id"] for row in book.rows.values()} == set(facts["workers"]["ids"])
    # Its ten users were in the middle of a request each, and it ships what has ended once a second.
    assert len(book.lost) >= 10
    assert all(book.truth[name]["received_unix_ns"] > killed_ns - 3 * 10**9 for name in book.lost)
    assert 5 <= facts["records"]["lost"] <= len(book.lost), "at least those under way when it made its last batch"
    assert "records_lost" in codes(ended)
    survivors = {name for name, row in book.rows.items() if row["worker_id"] != missing}
    assert all(book.rows[name]["outcome"] == "ok" for name in survivors)


def test_a_client_host_that_goes_away_for_good(network: Network, redis: RedisHost, tmp_path: Path) -> None:
    """Open loop: every planned arrival is on record or named as lost, and nobody waits for the dead."""
    with server_host(network, tmp_path) as server:
        load = ("--rate", "40", "-u", "60", "-t", "10s", "--warmup-requests", "10", *SHORT)
        with cluster(network, tmp_path, server.url, "--redis-url", redis.url, *load, locustfile=OPEN_LOOP) as run:
            run.start_workers()
            wait_for_requests(server, 120)
            for net in ("data", "control"):
                network["client2"].link(net, up=False)
            time.sleep(0.5)
            os.killpg(run.workers["client2"].pid, signal.SIGKILL)
            begin = time.monotonic()
            ended = run.end()
            assert seconds_since(begin) < 60
        book = books(ended, server)
    assert ended.exit_code == 1, ended.output
    assert {"workers_missing", "arrivals_lost"} <= codes(ended), ended.output
    missed = pq.read_table(tmp_path / "run" / "arrivals.parquet").to_pylist()
    assert {row["status"] for row in missed} == {"lost"}
    (missing,) = ended.json("run.json")["workers"]["missing"]
    assert {row["worker_id"] for row in missed} == {missing}
    numbers = [row["number"] for row in missed] + [row["arrival"] for row in book.rows.values()]
    assert sorted(numbers) == list(range(len(planned_unix_ns(ended))))
    assert len(book.lost) <= len(missed) == ended.json("run.json")["arrivals"]["lost"]
