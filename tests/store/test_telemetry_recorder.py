"""Telemetry through a real server and a recorder process to part files: from the run's start on, each batch once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.runs import Run
from tests.store.servers import Server, wait_until
from tests.store.test_telemetry import gpu_row, publisher
from vllm_locust import clock
from vllm_locust.store.redis_url import redis_options
from vllm_locust.store.rundir import RunDirectory
from vllm_locust.store.telemetry import TelemetryPublisher
from vllm_locust.store.telemetry_intake import TelemetryIntake, read_telemetry_rows, telemetry_parts
from vllm_locust.store.telemetry_store import TelemetryStore
from vllm_locust.telemetry import TelemetryKind


@pytest.fixture
def run(server: Server, run_dir: RunDirectory, tmp_path: Path) -> Iterator[Run]:
    run = Run(server, run_dir, tmp_path / "spool")
    yield run
    run.close()


def times(directory: Path, kind: TelemetryKind = TelemetryKind.HOST) -> list[int]:
    found: list[int] = []
    for part in telemetry_parts(directory):
        if part.kind is kind:
            found += map(int, read_telemetry_rows(part).column("time_unix_ns").to_numpy())
    return found


def put(sink: TelemetryPublisher, time_unix_ns: int) -> None:
    sink.put(TelemetryKind.HOST, [{"time_unix_ns": time_unix_ns, "host": "h"}])


def intake(server: Server, directory: Path, from_unix_ns: int = 0) -> TelemetryIntake:
    made = TelemetryIntake(directory, TelemetryStore(redis_options(server.url)))
    made.restart(from_unix_ns)
    return made


def test_a_recorder_takes_every_kind_and_waits_for_the_rows_up_to_its_end(run: Run, server: Server) -> None:
    sink = publisher(server, batch_interval_ns=500_000_000)
    try:
        put(sink, clock.unix_ns())
        run.start_recorder()
        sink.put(TelemetryKind.GPU, [gpu_row(1, throttle_reasons=["sw_power_cap"], utilization=0.5), gpu_row(2)])
        sink.put(TelemetryKind.GPU_PROCESSES, [gpu_row(1, pid=7)])
        wait_until(lambda: sink.last_error is None and len(sink._kept) == 3 and all(one.sent for one in sink._kept))
        # What is sampled just before the end is published up to half a second later.
        late_ns = clock.unix_ns()
        put(sink, late_ns)
        put(sink, clock.unix_ns() + 600_000_000)
        report = run.finish()
        assert report.drained
        assert times(run.run_dir.telemetry_parts)[1] == late_ns
        parts = {part.kind: part for part in telemetry_parts(run.run_dir.telemetry_parts)}
        gpu = read_telemetry_rows(parts[TelemetryKind.GPU])
        assert gpu.column("throttle_reasons").to_pylist() == [["sw_power_cap"], None]
        assert gpu.column("utilization").to_pylist() == [0.5, None]
        assert read_telemetry_rows(parts[TelemetryKind.GPU_PROCESSES]).column("pid").to_pylist() == [7]
        (measured,) = parts[TelemetryKind.GPU].clocks["h-1"]
        assert abs(measured.offset_ns) <= measured.uncertainty_ns + 5_000_000
    finally:
        sink.close()


def test_who_fell_silent_is_not_waited_for_long(run: Run, server: Server) -> None:
    run.start_recorder()
    sink = publisher(server)
    put(sink, clock.unix_ns() - 1_000_000_000)
    sink.close()
    wait_until(lambda: server.command("EXISTS", "vllm_locust:1:telemetry:host") == 1)
    clock.sleep(1.0)
    started_ns = clock.monotonic_ns()
    assert run.finish().drained
    assert 3 < (clock.monotonic_ns() - started_ns) / 1e9 < 9
    assert len(times(run.run_dir.telemetry_parts)) == 1


def test_what_was_published_before_the_run_is_not_its_own(server: Server, tmp_path: Path) -> None:
    sink = publisher(server)
    put(sink, 1)
    wait_until(lambda: bool(sink._kept) and sink._kept[0].sent)
    clock.sleep(0.05)
    begin_ns = clock.unix_ns()
    clock.sleep(0.05)
    put(sink, 2)
    sink.close()
    for from_unix_ns, expected in ((0, [1, 2]), (begin_ns, [2])):
        taken = intake(server, tmp_path / str(from_unix_ns), from_unix_ns)
        taken.turn()
        taken.write()
        assert times(tmp_path / str(from_unix_ns)) == expected


def test_batches_are_taken_once_over_restarts_and_new_servers(server: Server, tmp_path: Path) -> None:
    directory = tmp_path / "telemetry"
    sink = publisher(server)
    try:
        put(sink, 1)
        wait_until(lambda: bool(sink._kept) and sink._kept[0].sent)
        first = intake(server, directory)
        first.turn()
        first.write()
        again = intake(server, directory)
        again.turn()
        again.write()
        assert times(directory) == [1]
        server.kill()
        put(sink, 2)
        wait_until(lambda: sink.last_error is not None)
        server.start()
        wait_until(lambda: all(batch.sent for batch in sink._kept))
        wait_until(lambda: sink.last_error is None)
        third = intake(server, directory)
        third.turn()
        third.write()
        assert times(directory) == [1, 2]
    finally:
        sink.close()


def test_entries_that_cannot_be_read_stop_no_others(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "vllm_locust:1:telemetry:host"
    server.command("XADD", key, "*", "b", "nonsense")
    server.command("XADD", key, "*", "x", "no batch")
    sink = publisher(server)
    put(sink, 1)
    sink.close()
    taken = intake(server, tmp_path / "telemetry")
    taken.turn()
    taken.write()
    assert times(tmp_path / "telemetry") == [1]
    assert capsys.readouterr().err.count("recorder: telemetry:") == 1
