"""What networks and clocks do to a run: a worker that its master does not hear for a while, wrong clocks, delay,
stalls, and a server whose link dies in the middle of its answers.
"""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.faults.cluster import SERVER_PORT, SHORT, books, cluster, codes, server_host, wait_for_requests
from tests.faults.network import Network
from tests.faults.redis_host import PORT, RedisHost
from tests.faults.relay import relay
from tests.run.simulated import planned_unix_ns

pytestmark = pytest.mark.timeout(180)

AWAY_S = 30.0
"""Locust calls a worker missing after 4 s without a heartbeat, and forgets it after a minute: any time between is the
same to it.
"""
DELAY_MS = 50
STALL_S = 2.0


def test_a_worker_that_its_master_does_not_hear_and_clocks_that_are_wrong(
    network: Network, redis: RedisHost, tmp_path: Path
) -> None:
    """One worker is cut off from the master and goes on; its clock is 5 s ahead, the other's is set in mid-run."""
    with server_host(network, tmp_path) as server:
        load = ("--rate", "40", "-u", "60", "-t", "38s", "--warmup-requests", "10", *SHORT)
        stepping = str(Path(__file__).with_name("stepping_clock.py"))
        with cluster(network, tmp_path, server.url, "--redis-url", redis.url, *load, locustfile=stepping) as run:
            run.start_worker("client1", VLLM_LOCUST_TEST_CLOCK="offset=5s")
            # More than the minute of silence after which Locust gives its master up.
            run.start_worker("client2", VLLM_LOCUST_TEST_CLOCK="step=100s@14s", STEP_S="100", STEP_AT_S="14")
            wait_for_requests(server, 60)
            network["client1"].link("control", up=False)
            time.sleep(AWAY_S)
            network["client1"].link("control", up=True)
            ended = run.end()
        book = books(ended, server)
    assert "failed to send heartbeat" in ended.output, "the master missed it"
    assert [worker.exit_code for worker in ended.workers] == [0, 0], ended.worker_outputs
    assert not book.lost
    planned = planned_unix_ns(ended)
    assert sorted(row["arrival"] for row in book.rows.values()) == list(range(len(planned)))
    assert {row["outcome"] for row in book.rows.values()} == {"ok"}
    assert ended.json("run.json")["workers"]["missing"] == []
    assert ended.exit_code in (0, 4), ended.output
    assert "clock_stepped" in codes(ended)
    offsets = sorted(round(offset / 1e9) for offset in ended.json("run.json")["clock"]["offset_ns"].values())
    assert offsets == [-5, 0]
    for name, row in book.rows.items():
        truth = book.truth[name]
        assert abs(truth["received_unix_ns"] - row["sent_unix_ns"]) < 10**9, "on one axis"
        spread_ns = truth["chunk_before_ns"][-1] - truth["chunk_before_ns"][0]
        assert abs(row["chunk_ns"][-1] - row["chunk_ns"][0] - spread_ns) < 500_000_000


def test_a_slow_network_and_one_that_stalls(network: Network, redis: RedisHost, tmp_path: Path) -> None:
    """50 ms each way to the server, and for one worker to Redis; both stall for 2 s."""
    server_relay, redis_relay = 8100, 6400
    server, client = network["server"], network["client2"]
    with (
        server_host(network, tmp_path) as truth_server,
        relay(server.on(), server_relay, "127.0.0.1", SERVER_PORT) as to_server,
        relay(client.on(), redis_relay, network["redis"].address, PORT) as to_redis,
    ):
        to_server.order(f"delay {DELAY_MS}")
        to_redis.order(f"delay {DELAY_MS}", "jitter 5")
        load = ("--redis-url", redis.url, "-u", "20", "-r", "20", "-t", "10s", "--warmup-requests", "20", *SHORT)
        url = f"http://{server.address}:{server_relay}"
        with cluster(network, tmp_path, url, *load) as run:
            run.start_worker("client1")
            run.start_worker("client2", "--redis-url", f"redis://127.0.0.1:{redis_relay}/0")
            wait_for_requests(truth_server, 100)
            stalled_ns = time.time_ns()
            to_server.order(f"stall {STALL_S}")
            to_redis.order(f"stall {STALL_S}")
            ended = run.end()
        book = books(ended, truth_server)
    assert not book.lost
    assert {row["outcome"] for row in book.rows.values()} == {"ok"}
    assert ended.json("run.json")["workers"]["missing"] == []
    assert ended.exit_code in (0, 4), ended.output
    undisturbed, stalled = [], []
    for name, row in book.rows.items():
        truth = book.truth[name]
        extra_ms = (row["ttft_ns"] - (truth["chunk_before_ns"][0] - truth["received_mono_ns"])) / 1e6
        assert extra_ms > 2 * DELAY_MS - 1, "the delay is in every TTFT"
        end_ns = row["sent_unix_ns"] + row["ended_ns"]
        if row["sent_unix_ns"] > stalled_ns + 4 * 10**9 or end_ns < stalled_ns:
            undisturbed.append(extra_ms)
        elif row["sent_unix_ns"] < stalled_ns < row["sent_unix_ns"] + row["chunk_ns"][-1] - 10**8:
            gap_ms = max(after - before for before, after in pairwise(row["chunk_ns"])) / 1e6
            stalled.append(max(extra_ms, gap_ms))
    assert len(undisturbed) > 50
    assert sorted(undisturbed)[len(undisturbed) // 2] < 2 * DELAY_MS + 30
    assert len(stalled) >= 10, "users were in the middle of a request"
    assert all(seen_ms > 1e3 * STALL_S - 300 for seen_ms in stalled), sorted(stalled)[:5]


def test_a_server_whose_link_dies_in_the_middle_of_its_answers(
    network: Network, redis: RedisHost, tmp_path: Path
) -> None:
    """Half-open: nobody is told. The time limits end what hangs, and each request is on record once."""
    slow = ("--first-token-ms", "20", "--token-interval-ms", "100")
    with server_host(network, tmp_path, *slow) as server:
        limits = ("--timeout-idle", "2s", "--timeout-first-token", "3s", "--timeout-connect", "2s")
        load = ("-u", "20", "-r", "20", "-t", "38s", "--warmup-requests", "10", "--max-failures", "99%", *SHORT)
        with cluster(network, tmp_path, server.url, "--redis-url", redis.url, *limits, *load) as run:
            run.start_workers()
            wait_for_requests(server, 40)
            network["server"].link("data", up=False)
            down_ns = time.time_ns()
            time.sleep(6)
            network["server"].link("data", up=True)
            up_ns = time.time_ns()
            ended = run.end()
        book = books(ended, server)
    assert not book.lost
    assert ended.exit_code in (0, 4), ended.output
    assert "Traceback" not in ended.output + "".join(ended.worker_outputs)
    cut = [
        row
        for row in book.rows.values()
        if row["chunk_ns"] and row["sent_unix_ns"] < down_ns < row["sent_unix_ns"] + row["ended_ns"]
    ]
    assert len(cut) >= 2  # users who began together are between two answers together
    assert {row["outcome"] for row in cut} == {"timeout_idle"}
    assert all(1.9 < (row["ended_ns"] - row["chunk_ns"][-1]) / 1e9 < 4 for row in cut)
    meanwhile = [row for row in book.rows.values() if down_ns < row["sent_unix_ns"] < up_ns - 10**9]
    assert meanwhile
    assert {row["outcome"] for row in meanwhile} <= {"connect_error", "timeout_connect", "timeout_first_token"}
    again = [row for row in book.rows.values() if row["sent_unix_ns"] > up_ns + 2 * 10**9]
    assert len(again) > 20
    assert {row["outcome"] for row in again} == {"ok"}
