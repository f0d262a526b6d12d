from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.store.runs import MILLISECOND_NS, Run, assert_durable, flush
from tests.store.servers import Server, health, request, wait_until
from vllm_locust import clock
from vllm_locust.errors import StoreError
from vllm_locust.record import ArrivalRecord
from vllm_locust.store.clock_offset import ClockOffset
from vllm_locust.store.finalize import finalize
from vllm_locust.store.intake import absorb_spools
from vllm_locust.store.parts import list_parts, read_part_rows
from vllm_locust.store.redis_store import RunStore
from vllm_locust.store.rundir import RunDirectory, read_json
from vllm_locust.store.schema import BatchHeader, BatchKind, empty_rows, encode_batch
from vllm_locust.store.shipper import Shipper
from vllm_locust.store.shipper_config import ShipperConfig
from vllm_locust.store.spool import read_spool, spools_of_run


@pytest.fixture
def run(server: Server, run_dir: RunDirectory, tmp_path: Path) -> Iterator[Run]:
    run = Run(server, run_dir, tmp_path / "spool")
    yield run
    run.close()


def stream_length(run: Run) -> object:
    return run.server.command("XLEN", f"vllm_locust:1:run:{run.run_id}:records")


def test_every_record_is_in_the_result_once(run: Run) -> None:
    run.start_recorder()
    workers = ["w1", "../w/2 ü{}:*", "w3"]
    shippers = [run.shipper(worker_id) for worker_id in workers]
    for number in range(20):
        for worker_id, shipper in zip(workers, shippers, strict=True):
            run.put(shipper, 3, worker_id)
            shipper.put_health(health(number, worker_id))
            shipper.put_arrival(ArrivalRecord(number, worker_id, 7, "dropped"))
    flushed = [flush(shipper) for shipper in shippers]
    for worker_id, vouched in zip(workers, flushed, strict=True):
        assert_durable(vouched)
        assert (vouched.worker_id, vouched.requests) == (worker_id, 60)
    report = run.finish()
    assert report.durable == {vouched.worker_id: vouched.last_seq for vouched in flushed}
    assert report.worker_rows == dict.fromkeys(workers, 60)
    assert (report.drained, report.rows, report.lost_rows, report.refused, report.error) == (True, 180, 0, {}, None)
    assert read_json(run.run_dir.recorder_json)["rows"] == 180
    run.assert_complete()
    finalize(run.run_dir.parts, BatchKind.HEALTH, run.run_dir.workers_parquet)
    samples = pq.read_table(run.run_dir.workers_parquet).select(["worker_id", "time_unix_ns"]).to_pylist()
    assert Counter((row["worker_id"], row["time_unix_ns"]) for row in samples) == Counter(
        (worker_id, number) for worker_id in workers for number in range(20)
    )
    finalize(run.run_dir.parts, BatchKind.ARRIVALS, run.run_dir.arrivals_parquet)
    arrivals = pq.read_table(run.run_dir.arrivals_parquet).select(["worker_id", "number"]).to_pylist()
    assert Counter((row["worker_id"], row["number"]) for row in arrivals) == Counter(
        (worker_id, number) for worker_id in workers for number in range(20)
    )
    assert stream_length(run) == 0
    assert not run.spool_dir.exists()


def test_a_run_in_which_nothing_was_sent_ends(run: Run) -> None:
    run.start_recorder()
    shipper = run.shipper()
    flushed = flush(shipper)
    assert (flushed.last_seq, flushed.durable_seq, flushed.requests, flushed.spool_path) == (0, 0, 0, None)
    report = run.finish()
    assert (report.drained, report.batches) == (True, 0)
    assert run.request_ids() == Counter()


def test_a_recorder_killed_again_and_again_loses_and_doubles_nothing(run: Run) -> None:
    recorder = run.start_recorder()
    shipper = run.shipper()
    for _ in range(3):
        run.put(shipper, 30)
        clock.sleep(0.15)
        killed = recorder.pid
        os.kill(killed, signal.SIGKILL)
        run.put(shipper, 30)
        wait_until(lambda killed=killed: recorder.pid != killed)
    assert_durable(flush(shipper))
    report = run.finish()
    assert report.restarts == 3
    run.assert_complete()


def test_a_recorder_killed_between_disk_and_trim_counts_nothing_twice(run: Run) -> None:
    """The worst moment: parts written, nothing published, nothing trimmed."""
    recorder = run.start_recorder()
    shipper = run.shipper()
    run.put(shipper, 50)
    wait_until(lambda: stream_length(run) == 0 and len(shipper._outbox) == 0)
    recorder.kill()
    store = run.server.store(run.run_id)
    columns = _recorded(run)
    store.add_batches([(BatchKind.REQUESTS, payload) for payload in columns])
    run.server.command("DEL", f"vllm_locust:1:run:{run.run_id}:durable")
    run.start_recorder()
    report = run.finish()
    assert report.duplicates == len(columns)
    assert store.durable() == {"w1": report.durable["w1"]}
    store.close()
    run.assert_complete()


def _recorded(run: Run) -> list[bytes]:
    """The batches on disk, as they once lay in Redis."""
    payloads = []
    for part in list_parts(run.run_dir.parts):
        rows, begin = read_part_rows(part), 0
        for batch in part.batches:
            header = BatchHeader(run.run_id, batch.worker_id, batch.seq, part.kind)
            payloads.append(encode_batch(header, rows.slice(begin, batch.rows).combine_chunks().to_batches()[0]))
            begin += batch.rows
    assert payloads
    return payloads


def published_offsets(store: RunStore) -> list[ClockOffset]:
    return [ClockOffset(**json.loads(line)) for line in store.read_control().get("clock:w1", "").splitlines()]


def test_a_redis_that_comes_back_empty_gets_everything_again(run: Run) -> None:
    run.start_recorder()
    shipper = run.shipper()
    run.put(shipper, 40)
    wait_until(lambda: shipper._outbox.durable_seq > 0)
    shipper_store = run.server.store(run.run_id)
    shipper_store.publish_control({"t0": "5"})
    wait_until(lambda: run.run_dir.control_json.exists() and "t0" in read_json(run.run_dir.control_json))
    run.server.kill()
    run.put(shipper, 40)
    wait_until(lambda: shipper.spooled_batches > 0)
    run.server.start()
    run.put(shipper, 40)
    assert_durable(flush(shipper))
    assert shipper.spooled_batches == 0
    offsets = published_offsets(shipper_store)
    assert len(offsets) == len({offset.redis_run_id for offset in offsets}) == 2
    control = shipper_store.read_control()
    run.finish()
    kept = read_json(run.run_dir.control_json)
    assert kept["t0"] == "5"
    assert kept["clock:w1"] == control["clock:w1"]
    shipper_store.close()
    run.assert_complete()
    shipper.close()
    assert spools_of_run(run.spool_dir, run.run_id) == []


def test_batches_lost_inside_redis_are_missed_and_sent_again(run: Run) -> None:
    """FLUSHALL: the same server, no broken connection, and the data is gone."""
    shipper = run.shipper()
    run.put(shipper, 40)
    wait_until(lambda: shipper._outbox.last_seq > 0 and not shipper._outbox.unsent(1))
    run.server.command("FLUSHALL")
    run.put(shipper, 10)
    run.start_recorder()
    assert_durable(flush(shipper))
    run.finish()
    run.assert_complete()


def test_the_durable_hash_is_published_again_when_it_is_lost(run: Run) -> None:
    run.start_recorder()
    shipper = run.shipper()
    run.put(shipper, 20)
    assert_durable(flush(shipper))
    run.server.command("FLUSHALL")
    store = run.server.store(run.run_id)
    wait_until(lambda: store.durable() == {"w1": shipper._outbox.last_seq})
    store.close()


def test_while_redis_is_away_all_is_on_the_workers_disk(run: Run) -> None:
    run.start_recorder()
    run.server.kill()
    shipper = run.shipper()
    run.put(shipper, 40)
    flushed = flush(shipper, 0.3)
    assert flushed.spool_path is not None
    assert (flushed.durable_seq, flushed.requests) == (0, 40)
    assert len(list(read_spool(Path(flushed.spool_path)))) == flushed.last_seq
    assert shipper.last_error is not None
    assert shipper._outbox.memory_bytes == 0
    run.server.start()
    assert_durable(flush(shipper))
    run.finish()
    run.assert_complete()


def test_a_full_redis_sends_batches_to_the_spool_and_gets_them_when_it_has_room(run: Run) -> None:
    run.server.command("CONFIG", "SET", "maxmemory", "1")
    run.start_recorder()
    shipper = run.shipper()
    run.put(shipper, 40)
    wait_until(lambda: shipper.spooled_batches > 0)
    assert "maxmemory" in str(shipper.last_error)
    run.server.command("CONFIG", "SET", "maxmemory", "0")
    assert_durable(flush(shipper))
    run.finish()
    run.assert_complete()


def test_a_redis_that_is_full_of_our_batches_is_emptied(run: Run) -> None:
    """The recorder can trim where it cannot publish, so a full Redis gets room again by itself."""
    shipper = run.shipper()
    run.put(shipper, 200)
    wait_until(lambda: shipper._outbox.last_seq > 0 and not shipper._outbox.unsent(1))
    info = run.server.command("INFO", "memory")
    assert isinstance(info, dict)
    run.server.command("CONFIG", "SET", "maxmemory", int(info["used_memory"]) - 10_000)
    run.put(shipper, 10)
    wait_until(lambda: shipper.last_error is not None)
    run.start_recorder()
    wait_until(lambda: stream_length(run) == 0)
    run.server.command("CONFIG", "SET", "maxmemory", "0")
    assert_durable(flush(shipper))
    run.finish()
    run.assert_complete()


def test_a_redis_that_refuses_writes_is_waited_for(run: Run) -> None:
    run.start_recorder()
    shipper = run.shipper()
    run.put(shipper, 20)
    assert_durable(flush(shipper))
    run.server.command("REPLICAOF", "127.0.0.1", "1")
    run.put(shipper, 20)
    wait_until(lambda: shipper.spooled_batches > 0)
    run.server.command("REPLICAOF", "NO", "ONE")
    assert_durable(flush(shipper))
    run.finish()
    run.assert_complete()


def test_memory_is_bounded_when_nothing_becomes_durable(run: Run) -> None:
    shipper = run.shipper(memory_bytes=20_000)
    for _ in range(20):
        run.put(shipper, 50, chunks=50)
        wait_until(lambda: not shipper._outbox.unsent(1) and len(shipper._columns) == 0)
        assert shipper._outbox.memory_bytes <= 20_000 + 40_000
    wait_until(lambda: shipper._outbox.memory_bytes <= 20_000)
    assert shipper.spooled_batches > 0
    run.start_recorder()
    assert_durable(flush(shipper))
    run.finish()
    run.assert_complete()


def test_redis_holds_no_more_of_a_worker_than_its_share_while_the_recorder_is_away(run: Run) -> None:
    """And the rest of a long spool follows as the recorder takes it in, while new records go the same way."""
    shipper = run.shipper(memory_bytes=20_000, stream_bytes=60_000)
    run.put(shipper, 1500, chunks=50)
    wait_until(lambda: shipper.spooled_batches > 20 and len(shipper._columns) == 0)
    wait_until(lambda: shipper._outbox.sent_bytes > 30_000)
    for _ in range(5):
        clock.sleep(0.05)
        assert shipper._outbox.sent_bytes <= 60_000 + 10_000, "one batch more at most"
        assert int(str(stream_length(run))) < shipper._outbox.last_seq // 2
    assert shipper.last_error is None
    run.start_recorder()
    while shipper.spooled_batches:
        run.put(shipper, 5, chunks=50)
        assert shipper._outbox.memory_bytes <= 20_000 + 40_000
        clock.sleep(0.02)
    assert_durable(flush(shipper))
    assert shipper._outbox.sent_bytes == 0
    run.finish()
    run.assert_complete()


def test_a_redis_too_slow_for_much_at_a_time_is_sent_little(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a link where a large exchange does not end within the client's time limit."""
    refused, taken = [], []
    add_batches = RunStore.add_batches

    def slow(store: RunStore, batches: Sequence[tuple[BatchKind, bytes]]) -> list[str | StoreError]:
        nbytes = sum(len(payload) for _, payload in batches)
        if nbytes > 100_000:
            refused.append(nbytes)
            raise StoreError("Redis could not take a batch: Timeout writing to socket")
        taken.append(nbytes)
        return add_batches(store, batches)

    monkeypatch.setattr(RunStore, "add_batches", slow)
    run.server.kill()
    shipper = run.shipper()
    run.put(shipper, 1000, chunks=200)
    wait_until(lambda: shipper.spooled_batches > 20 and len(shipper._columns) == 0)
    run.server.start()
    run.start_recorder()
    assert_durable(flush(shipper, 30))
    assert 0 < len(refused) < len(taken)
    wait_until(lambda: len(caplog.records) == 2)
    assert "could not tell" in caplog.records[0].getMessage(), "each trouble is told once"
    run.finish()
    run.assert_complete()


def test_with_neither_redis_nor_disk_what_is_given_up_has_a_number(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.spool_dir.write_text("a file where the spool's directory should be")
    run.server.kill()
    shipper = run.shipper(memory_bytes=200_000)
    run.put(shipper, 400, chunks=1000)
    wait_until(lambda: shipper.lost_rows > 0 and len(shipper._columns) == 0)
    wait_until(lambda: "cannot be written" in str(shipper.last_error))
    wait_until(lambda: shipper._outbox.memory_bytes < 400_000)
    run.server.start()
    run.start_recorder()
    flushed = flush(shipper)
    assert_durable(flushed)
    wait_until(lambda: len(caplog.records) == 3)
    told = [record.getMessage().replace(str(run.spool_dir), "DIR") for record in caplog.records]
    assert told[0].startswith("Redis at unix:")
    assert told[0].endswith("; records are kept in DIR until it can")
    assert told[1].startswith("the spool DIR/run.w1-")
    assert told[1].endswith(
        " cannot be written: File exists; make room: beyond 0 MiB in memory records are lost, and counted"
    )
    report = run.finish()
    assert told[2] == (
        f"What Redis did not take is on the recorder's disk now, but for {report.lost_rows} rows, which are lost"
    )
    assert report.lost_rows == report.worker_lost_rows["w1"] == shipper.lost_rows > 0
    assert report.rows + report.lost_rows == flushed.requests == 400
    assert report.rows > 0
    assert max(run.request_ids().values()) == 1


def test_a_value_that_no_batch_can_hold_costs_its_batch_and_no_other(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.start_recorder()
    shipper = run.shipper(batch_rows=1000)
    odd = request(10_000)
    odd.conversation_id = 40  # type: ignore[assignment]
    bad = request(10_001)
    bad.host = None  # type: ignore[assignment]
    run.put(shipper, 3)
    shipper.put_request(odd)
    assert_durable(flush(shipper))
    shipper.put_request(bad)
    assert_durable(flush(shipper))
    run.put(shipper, 4)
    flushed = flush(shipper)
    assert_durable(flushed)
    report = run.finish()
    assert (report.rows, report.lost_rows, shipper.lost_rows, flushed.unstorable_values) == (8, 1, 1, 1)
    assert report.rows + report.lost_rows == flushed.requests
    assert "1 rows of records cannot be stored and are lost" in caplog.text
    run.sent.append(odd.request_id)
    run.assert_complete()


def test_a_fault_that_nobody_foresaw_does_not_end_the_shipping(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run.start_recorder()
    shipper = run.shipper()
    with monkeypatch.context() as patch:
        patch.setattr(shipper, "_exchange", lambda _: 1 // 0)
        run.put(shipper, 20)
        wait_until(lambda: shipper.last_error is not None)
        assert "ZeroDivisionError" in str(shipper.last_error)
        assert "records cannot be shipped" in caplog.text
    assert_durable(flush(shipper))
    run.finish()
    run.assert_complete()


def test_the_disk_of_the_run_directory_is_full(run: Run) -> None:
    """The data stays in Redis, the reason is told, and goes away with its cause."""
    run.start_recorder()
    shipper = run.shipper()
    run.put(shipper, 10)
    assert_durable(flush(shipper))
    wall = run.run_dir.parts / f".requests-{2:06}.parquet.tmp"
    assert not wall.exists()
    parts = run.run_dir.path / "moved"
    run.run_dir.parts.rename(parts)
    run.put(shipper, 30)
    assert flush(shipper, 0.5).durable_seq < shipper._outbox.last_seq
    assert stream_length(run) != 0
    parts.rename(run.run_dir.parts)
    assert_durable(flush(shipper))
    assert run.finish().error is None
    run.assert_complete()


def test_two_runs_on_one_redis_do_not_mix(run: Run, tmp_path: Path) -> None:
    other = Run(run.server, RunDirectory.create(tmp_path / "run2"), run.spool_dir, "run2")
    try:
        for each in (run, other):
            each.start_recorder()
            each.shipper()
        for _ in range(5):
            run.put(run.shippers[0], 4)
            other.put(other.shippers[0], 7)
        for each in (run, other):
            assert_durable(flush(each.shippers[0]))
            each.finish()
            each.assert_complete()
        assert (len(run.sent), len(other.sent)) == (20, 35)
    finally:
        other.close()


def test_unreadable_batches_are_counted_by_reason_and_harm_no_other(run: Run) -> None:
    store = run.server.store(run.run_id)
    empty = empty_rows(BatchKind.REQUESTS)
    foreign = encode_batch(BatchHeader("another", "w1", 1, BatchKind.REQUESTS), empty)
    store.add_batches([(BatchKind.REQUESTS, b"noise"), (BatchKind.HEALTH, b"more"), (BatchKind.REQUESTS, foreign)])
    run.server.command("XADD", f"vllm_locust:1:run:{run.run_id}:records", "*", "other", "field")
    run.start_recorder()
    shipper = run.shipper()
    run.put(shipper, 20)
    assert_durable(flush(shipper))
    report = run.finish()
    assert report.refused == {"unreadable": 3, "other_run": 1}
    assert stream_length(run) == 0
    store.add_batches([(BatchKind.REQUESTS, b"noise")])
    run.start_recorder()
    assert run.finish().refused == {"unreadable": 4, "other_run": 1}
    assert read_json(run.run_dir.recorder_json)["refused"] == {"unreadable": 4, "other_run": 1}
    store.close()
    run.assert_complete()


def test_merge_takes_in_the_spool_of_a_worker_that_is_gone(run: Run) -> None:
    run.start_recorder()
    shipper = run.shipper()
    run.put(shipper, 20)
    assert_durable(flush(shipper))
    run.server.kill()
    run.put(shipper, 25)
    flushed = flush(shipper, 0.2)
    run.recorder.kill() if run.recorder else None
    run.server.start()
    assert flushed.spool_path is not None
    shipper.close()
    spools = spools_of_run(run.spool_dir, run.run_id)
    assert spools == [Path(flushed.spool_path)]
    for _ in range(2):
        absorb_spools(run.run_dir, run.run_id, spools)
        run.start_recorder()
        report = run.finish()
        assert (report.rows, report.durable) == (45, {"w1": flushed.last_seq})
    run.assert_complete()


def test_an_orphaned_recorder_drains_and_ends(run: Run) -> None:
    recorder = run.start_recorder()
    shipper = run.shipper()
    run.put(shipper, 20)
    recorder._finishing.set()
    process = recorder._process
    assert process.stdin is not None
    process.stdin.close()
    run.put(shipper, 20)
    assert_durable(flush(shipper))
    wait_until(lambda: process.poll() == 0)
    assert read_json(run.run_dir.recorder_json)["drained"] is True
    run.assert_complete()


def test_sigterm_drains_and_ends(run: Run) -> None:
    recorder = run.start_recorder()
    shipper = run.shipper()
    run.put(shipper, 20)
    assert_durable(flush(shipper))
    recorder._finishing.set()
    os.kill(recorder.pid, signal.SIGTERM)
    wait_until(lambda: recorder._process.poll() == 0)
    run.assert_complete()


def test_a_redis_that_is_away_at_the_end_makes_the_report_say_so(run: Run) -> None:
    run.start_recorder()
    wait_until(lambda: (run.run_dir.parts / ".lock").exists())
    run.server.kill()
    report = run.finish(1.0)
    assert not report.drained
    assert run.server.url in str(report.error)


def test_put_does_not_wait_for_redis_or_disk(run: Run) -> None:
    """The server is stopped, not gone: connections open and nothing answers."""
    shipper = run.shipper()
    assert run.server._process is not None
    run.put(shipper, 5)
    os.kill(run.server._process.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: shipper._outbox.last_seq > 0)
        run.put(shipper, 100)
        wait_until(lambda: shipper.spooled_batches > 0)
    finally:
        os.kill(run.server._process.pid, signal.SIGCONT)
    run.start_recorder()
    assert_durable(flush(shipper))
    run.finish()
    run.assert_complete()


def test_a_worker_id_that_is_used_twice_is_refused_and_nothing_passes_for_durable(run: Run) -> None:
    run.start_recorder()
    first = run.shipper()
    run.put(first, 50)
    assert_durable(flush(first))
    first.close()
    second = run.shipper()
    run.put(second, 400)
    flushed = flush(second, 0.5)
    assert (flushed.durable_seq, flushed.requests) == (0, 400)
    assert flushed.spool_path is not None
    assert "needs a new id" in str(second.last_error)


def test_clock_measurements_are_few_however_long_the_run(run: Run) -> None:
    store = run.server.store(run.run_id)
    shipper = Shipper(
        run.server.store(run.run_id),
        ShipperConfig(worker_id="w1", spool_dir=run.spool_dir, batch_interval_ns=MILLISECOND_NS, clock_interval_ns=1),
    )
    run.shippers.append(shipper)
    wait_until(lambda: len(published_offsets(store)) > 50)
    first = published_offsets(store)[0]
    wait_until(lambda: len(published_offsets(store)) < 40)
    offsets = published_offsets(store)
    assert offsets[0] == first
    measured = [offset.measured_monotonic_ns for offset in offsets]
    assert measured == sorted(measured)


def test_a_run_whose_redis_is_no_more_is_completed_from_spools(run: Run) -> None:
    run.start_recorder()
    shipper = run.shipper()
    run.put(shipper, 20)
    assert_durable(flush(shipper))
    assert run.recorder is not None
    run.recorder.kill()
    run.server.kill()
    run.put(shipper, 25)
    flushed = flush(shipper, 0.2)
    shipper.close()
    for duplicates in (0, flushed.last_seq - flushed.durable_seq):
        report = absorb_spools(run.run_dir, run.run_id, spools_of_run(run.spool_dir, run.run_id))
        assert (report.rows, report.durable, report.duplicates) == (45, {"w1": flushed.last_seq}, duplicates)
    run.assert_complete()
