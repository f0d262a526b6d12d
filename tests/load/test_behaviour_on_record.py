"""What retries and patience leave in a request's record."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from tests.load.scripted_server import End, ScriptedServer, Step, chunked, serving, whole
from tests.load.stream_cases import ABC
from vllm_locust import clock
from vllm_locust.arrival import ArrivalProcess, Piece, Schedule
from vllm_locust.clock import WallAxis
from vllm_locust.config import RunConfig, Target
from vllm_locust.errors import UsageError
from vllm_locust.load.dispatcher import DueArrival
from vllm_locust.load.worker import Assignment, LoadWorker
from vllm_locust.outcome import Outcome
from vllm_locust.record import ArrivalRecord, FlushReport, HealthSample, RequestRecord
from vllm_locust.workload.workload import Workload

SECOND = 1_000_000_000
BUSY: tuple[Step, ...] = (whole(b"{}", b"429 Too Many Requests", retry_after=b"1"),)
SCRIPTS: dict[str, tuple[Step, ...]] = {
    "r-00000000": chunked(*ABC),
    "r-00000000#1": BUSY,
    "silent-00000000": (End.BY_CLIENT,),
}


class Kept:
    spooled_batches = 0

    def __init__(self) -> None:
        self.requests: list[RequestRecord] = []

    def announce_request(self) -> None: ...

    def put_request(self, record: RequestRecord) -> None:
        self.requests.append(record)

    def put_arrival(self, record: ArrivalRecord) -> None: ...

    def put_health(self, sample: HealthSample) -> None: ...

    def flush(self, deadline_ns: int) -> FlushReport:  # noqa: ARG002 - as the protocol says
        return FlushReport("w", 0, 0, len(self.requests), None)


@contextmanager
def working(names: str, **settings: Any) -> Iterator[tuple[ScriptedServer, LoadWorker, Kept]]:
    """A worker whose requests are called ``names-00000000`` and so on."""
    with serving(SCRIPTS) as server:
        config = RunConfig(targets=(Target.parse(f"http://127.0.0.1:{server.listener.getsockname()[1]}"),), **settings)
        kept = Kept()
        assignment = Assignment("run", "w", 0, 1, 0, "m", token_detail=False)
        worker = LoadWorker(config, assignment, cast(Workload, None), kept, None, WallAxis())
        worker._prefix = names
        try:
            yield server, worker, kept
        finally:
            worker.drain()


KEY = "sk-told-to-the-server-alone"
LEAKS: dict[str, Step] = {
    "the error's body": whole(b'{"message":"unknown key: %b"}' % KEY.encode(), b"401 Unauthorized"),
    "an answer": whole(
        b'{"id":"%b","choices":[{"index":0,"message":{"content":"A"},"finish_reason":"%b"}]}'
        % (KEY.encode(), KEY.encode())
    ),
}


@pytest.mark.parametrize("transport", ["kernel", "sse", "openai"])
@pytest.mark.parametrize("leak", LEAKS)
def test_a_key_that_the_server_repeats_is_on_no_record(transport: str, leak: str) -> None:
    with serving({"k-00000000": (LEAKS[leak],)}) as server:
        target = Target.parse(f"http://127.0.0.1:{server.listener.getsockname()[1]}")
        config = RunConfig(targets=(target,), transport=cast(Any, transport), stream=False)
        kept = Kept()
        assignment = Assignment("run", "w", 0, 1, 0, "m", token_detail=False)
        worker = LoadWorker(config, assignment, cast(Workload, None), kept, KEY, WallAxis())
        worker._prefix = "k"
        ask(worker)
        worker.drain()
        assert KEY.encode() in server.requests[0].head
    (record,) = kept.requests
    assert KEY not in repr(record)
    assert "***" in repr(record)


def ask(worker: LoadWorker, due: DueArrival | None = None) -> RequestRecord:
    messages = [{"role": "user", "content": "Hello"}]
    return worker.perform(messages, user_id=0, task="t", max_tokens=3, extra={}, due=due)[0]


def test_all_attempts_are_one_request_that_was_sent_when_the_first_was() -> None:
    with working("r", retries=2) as (server, worker, kept):
        record = ask(worker)
        assert kept.requests == [record]
        assert (worker.aggregate.sent, worker.aggregate.in_flight) == (1, 0)
    assert (record.outcome, record.attempts, record.http_status, record.error) == (Outcome.OK, 2, 200, None)
    assert SECOND <= record.retry_wait_ns < 1.5 * SECOND
    assert record.ttft_ns is not None
    assert record.e2e_ns is not None
    assert record.retry_wait_ns < record.ttft_ns <= record.e2e_ns
    assert [entry.name for entry in server.requests] == [record.request_id] * 2
    assert record.sent_unix_ns - worker.axis.offset_ns <= server.requests[0].received_ns
    assert record.connect_ns is not None


def test_without_retries_there_is_one_attempt_and_no_wait() -> None:
    with working("r") as (_, worker, _kept):
        record = ask(worker)
    assert (record.outcome, record.attempts, record.retry_wait_ns) == (Outcome.HTTP_ERROR, 1, 0)


def test_a_user_that_gave_up_is_counted_as_abandoned() -> None:
    with working("silent", patience_ns=(200_000_000, 200_000_000)) as (_, worker, _kept):
        record = ask(worker)
        assert worker.aggregate.finished == {Outcome.ABANDONED: 1}
    assert record.error == "its user gave up: no token in time after it was sent (--patience)"
    assert record.ttft_ns is record.e2e_ns is None
    assert record.ended_ns is not None
    assert 200_000_000 < record.ended_ns < SECOND


def test_an_arrival_whose_user_left_before_a_slot_was_free_was_never_sent() -> None:
    with working("r", patience_ns=(SECOND, SECOND)) as (server, worker, _kept):
        now_ns = clock.monotonic_ns()
        due = DueArrival(7, now_ns - 2 * SECOND, now_ns - 2 * SECOND + worker.axis.offset_ns).waited()
        record = ask(worker, due)
    assert (record.outcome, record.attempts, record.arrival) == (Outcome.ABANDONED, 0, 7)
    assert record.schedule_lag_ns is None
    assert record.slot_wait_ns is not None
    assert 2 * SECOND <= record.slot_wait_ns < 3 * SECOND
    assert record.sent_unix_ns - due.scheduled_unix_ns >= 2 * SECOND
    assert server.requests == []


def test_a_worker_whose_proxy_variable_is_no_proxy_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://me:secret@proxy:port")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    config = RunConfig(targets=(Target.parse("http://server"),), proxy="env")
    assignment = Assignment("run", "w", 0, 1, 0, "m", token_detail=False)
    schedule = Schedule(ArrivalProcess.CONSTANT, seed=1, pieces=[Piece(SECOND, 100, 100)])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UsageError, match="http_proxy") as raised:
        LoadWorker(config, assignment, cast(Workload, None), Kept(), None, WallAxis(), schedule)
    assert len(os.listdir("/proc/self/fd")) == before, "no timer is left behind"
    assert "secret" not in str(raised.value)


def scheduled() -> tuple[LoadWorker, Kept]:
    """A worker without users, of 100 arrivals per second, before its schedule begins."""
    config = RunConfig(targets=(Target.parse("http://a"), Target.parse("http://b")), drain_timeout_ns=0)
    schedule = Schedule(ArrivalProcess.CONSTANT, seed=1, pieces=[Piece(SECOND, 100, 100)])
    kept = Kept()
    assignment = Assignment("run", "w", 0, 1, 0, "m", token_detail=False)
    return LoadWorker(config, assignment, cast(Workload, None), kept, None, WallAxis(), schedule), kept


def test_what_was_never_sent_does_not_take_a_target_s_turn() -> None:
    worker, kept = scheduled()
    assert worker.dispatcher is not None
    worker.dispatcher.begin(clock.monotonic_ns() - 45_000_000, 0)
    worker.drain()
    assert len(kept.requests) >= 5
    assert {(row.attempts, row.target) for row in kept.requests} == {(0, "http://a")}


def test_a_worker_that_is_abandoned_leaves_nothing_running() -> None:
    before = len(gc.callbacks)
    worker, _ = scheduled()
    assert worker.dispatcher is not None
    assert len(gc.callbacks) == before + 1
    worker.abandon()
    assert worker.draining.is_set()
    assert worker._health._greenlet.dead
    assert len(gc.callbacks) == before
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(worker.dispatcher._timer.fd)
