"""Everything that can befall a Redis in the middle of a run, and a Redis that does not come back."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.faults.cluster import (
    SHORT,
    Books,
    books,
    chunk_errors_ms,
    cluster,
    codes,
    seconds_since,
    server_host,
    wait_for_requests,
)
from tests.faults.network import Network
from tests.faults.redis_host import RedisHost
from tests.run.simulated import OPEN_LOOP, LocustRun, planned_unix_ns

pytestmark = pytest.mark.timeout(240)

HELD_S = 20.0
"""Longer than the client waits for an answer of Redis (5 s), so that a Redis that only hangs is a fault as well."""
Span = tuple[int, int]


class Faults:
    """What is done to Redis, one after the other; ``spans`` says when."""

    def __init__(self, redis: RedisHost, password_file: Path) -> None:
        self._redis = redis
        self._password_file = password_file
        self.spans: dict[str, Span] = {}

    def all(self) -> None:
        for fault in (self._hung, self._restarted_empty, self._full, self._read_only, self._password_changed):
            begin_ns = time.time_ns()
            fault()
            self.spans[fault.__name__.lstrip("_")] = begin_ns, time.time_ns()
            time.sleep(2)

    def _hung(self) -> None:
        self._redis.pause()
        time.sleep(HELD_S)
        self._redis.resume()

    def _restarted_empty(self) -> None:
        self._redis.kill()
        time.sleep(2)
        self._redis.start()

    def _full(self) -> None:
        self._redis.ask("CONFIG", "SET", "maxmemory", "1")
        time.sleep(3)
        self._redis.ask("CONFIG", "SET", "maxmemory", "0")

    def _read_only(self) -> None:
        self._redis.ask("REPLICAOF", "10.77.1.99", "6379")
        time.sleep(3)
        self._redis.ask("REPLICAOF", "NO", "ONE")

    def _password_changed(self) -> None:
        self._redis.ask("CONFIG", "SET", "requirepass", "sécond#password")
        self._redis.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        time.sleep(3)
        self._password_file.write_text("sécond#password\n")


def test_what_befalls_a_redis_touches_neither_the_load_nor_its_records(network: Network, tmp_path: Path) -> None:
    password_file = tmp_path / "password"
    password_file.write_text("first\n")
    redis = RedisHost(network["redis"], "first")
    faults = Faults(redis, password_file)
    try:
        with server_host(network, tmp_path) as server:
            flags = ("--redis-url", redis.url, "--redis-password-file", str(password_file))
            load = ("--rate", "30", "-u", "60", "-t", "54s", "--warmup-requests", "10", *SHORT)
            with cluster(network, tmp_path, server.url, *flags, *load, locustfile=OPEN_LOOP) as run:
                for name in ("client1", "client2"):
                    run.start_worker(name, "--redis-password-file", str(password_file))
                wait_for_requests(server, 120)
                faults.all()
                assert run.master.poll() is None, "the faults lie within the run"
                ended = run.end()
            book = books(ended, server)
    finally:
        redis.close()
    assert ended.exit_code in (0, 4), ended.output
    assert not book.lost
    assert not {"records_lost", "spool_left", "workers_missing", "arrivals_lost"} & codes(ended), ended.output
    assert sorted(row["arrival"] for row in book.rows.values()) == list(range(len(planned_unix_ns(ended))))
    assert {row["outcome"] for row in book.rows.values()} == {"ok"}
    assert "Traceback" not in ended.output + "".join(ended.worker_outputs)
    assert "sécond" not in ended.output + "".join(ended.worker_outputs)
    assert_spooled(ended, faults.spans)
    assert_undisturbed(book, faults.spans)


def assert_spooled(run: LocustRun, spans: dict[str, Span]) -> None:
    """In each fault every worker had batches on its own disk, and in the end none."""
    samples = pq.read_table(run.run_dir / "workers.parquet").to_pylist()
    for name, (begin_ns, end_ns) in spans.items():
        spooled = {
            row["worker_id"]
            for row in samples
            if row["spooled_batches"] and begin_ns < row["time_unix_ns"] < end_ns + 2 * 10**9
        }
        assert len(spooled) == 2, name
    assert not list(run.run_dir.parent.glob("disk-of-*/spool/*"))


def assert_undisturbed(book: Books, spans: dict[str, Span]) -> None:
    """A worker that waited for Redis in its loop would read everything seconds late. What a busy machine does to some
    requests leaves the median alone.
    """
    first_ns = min(begin_ns for begin_ns, _ in spans.values())
    before = {name for name, row in book.rows.items() if row["sent_unix_ns"] < first_ns - 10**9}
    lags_before_ms = milliseconds(book, before, "receive_lag_max_ns")
    for fault, (begin_ns, end_ns) in spans.items():
        during = {name for name, row in book.rows.items() if begin_ns < row["sent_unix_ns"] < end_ns}
        assert len(during) > 40, fault
        lags_ms = milliseconds(book, during, "receive_lag_max_ns")
        assert percentile(lags_ms, 0.5) < 10 + 3 * percentile(lags_before_ms, 0.5), fault
        schedule_lags_ms, errors_ms = milliseconds(book, during, "schedule_lag_ns"), chunk_errors_ms(book, during)
        assert percentile(schedule_lags_ms, 0.5) < 20, fault
        assert percentile(errors_ms, 0.5) < 5, fault
        for values in (lags_ms, schedule_lags_ms, errors_ms):
            assert percentile(values, 0.9) < 500, fault


def milliseconds(book: Books, names: set[str], column: str) -> list[float]:
    return [book.rows[name][column] / 1e6 for name in names]


def percentile(values: list[float], q: float) -> float:
    return sorted(values)[int(q * (len(values) - 1))]


def test_a_redis_that_does_not_come_back_and_a_worker_killed_meanwhile(
    network: Network, redis: RedisHost, tmp_path: Path
) -> None:
    """The run ends with 1 and says where the records are; a merge takes them in, those that the killed worker had
    spooled too.
    """
    with server_host(network, tmp_path) as server:
        load = ("--redis-url", redis.url, "-u", "20", "-r", "20", "-t", "9s", "--warmup-requests", "10", *SHORT)
        with cluster(network, tmp_path, server.url, *load) as run:
            run.start_workers()
            wait_for_requests(server, 80)
            redis.kill()
            wait_for_requests(server, 200)
            killed_ns = time.time_ns()
            os.killpg(run.workers["client2"].pid, signal.SIGKILL)
            begin = time.monotonic()
            ended = run.end()
            assert seconds_since(begin) < 60
            assert ended.exit_code == 1, ended.output
            assert {"spool_left", "workers_missing"} <= codes(ended)
            assert "Traceback" not in ended.output + "".join(ended.worker_outputs)
            spools = {name: run.disk(name) / "spool" for name in ("client1", "client2")}
            files = {name: next(spool.iterdir()).name for name, spool in spools.items()}
            assert files["client1"] in (tmp_path / "run" / "summary.json").read_text()
            before = len(ended.requests())
            merged = run.merge("run", *(word for spool in spools.values() for word in ("--spool", str(spool))))
            book = books(merged, server)
    assert len(book.rows) > before
    assert merged.exit_code == 1, merged.output
    assert "workers_missing" in codes(merged)
    assert "spool_left" not in codes(merged)
    assert len(book.lost) >= 10, "the killed worker's ten users were in the middle of a request each"
    assert all(book.truth[name]["received_unix_ns"] > killed_ns - 4 * 10**9 for name in book.lost)
    (missing,) = merged.json("run.json")["workers"]["missing"]
    of_missing = [row for row in book.rows.values() if row["worker_id"] == missing]
    assert max(row["sent_unix_ns"] for row in of_missing) > killed_ns - 4 * 10**9, "spooled until shortly before"
    lost_prefixes = {name.rpartition("-")[0] for name in book.lost}
    assert lost_prefixes == {of_missing[0]["request_id"].rpartition("-")[0]}
    assert 5 <= merged.json("run.json")["records"]["lost"] <= len(book.lost)
