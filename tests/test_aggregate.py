from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_locust.aggregate import (
    COUNTERS,
    HEALTH,
    HISTOGRAMS,
    KEPT_STAGES,
    RunAggregate,
    Snapshot,
    Snapshots,
    StageAggregates,
)
from vllm_locust.core_time import CoreTime
from vllm_locust.outcome import Outcome


@dataclass
class Request:
    outcome: Outcome = Outcome.OK
    ttft_ns: int | None = None
    e2e_ns: int | None = None
    schedule_lag_ns: int | None = None
    slot_wait_ns: int | None = None
    receive_lag_max_ns: int | None = None
    chunk_ns: list[int] = field(default_factory=list)
    chunk_tokens: list[int] | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    coalesced: int = 0
    chunk_width_ns: list[int] | None = None


def of(requests: list[Request]) -> RunAggregate:
    aggregate = RunAggregate()
    for request in requests:
        aggregate.request_sent()
        aggregate.observe(request)
    return aggregate


def union(*parts: RunAggregate) -> RunAggregate:
    return RunAggregate.union(parts)


EXAMPLE = Request(
    ttft_ns=100,
    e2e_ns=160,
    schedule_lag_ns=30,
    slot_wait_ns=20,
    receive_lag_max_ns=7,
    chunk_ns=[100, 140, 160],
    chunk_tokens=[1, 4, 1],
    prompt_tokens=11,
    output_tokens=6,
    coalesced=1,
)


def test_one_request_in_small_whole_numbers() -> None:
    aggregate = of([EXAMPLE])
    assert (aggregate.sent, aggregate.in_flight, aggregate.finished) == (1, 0, {Outcome.OK: 1})
    assert (aggregate.prompt_tokens, aggregate.output_tokens) == (11, 6)
    assert (aggregate.chunks, aggregate.coalesced_chunks) == (3, 1)
    expected = {
        "ttft": (1, 100),
        "ttft_from_schedule": (1, 130),
        "chunk_gap": (2, 60),
        "itl": (5, 60),  # 10 10 10 10 20
        "tpot": (1, 12),  # 60 / (6 - 1)
        "e2e": (1, 160),
        "schedule_lag": (1, 30),
        "generator_lag": (1, 10),
        "receive_lag": (1, 7),
    }
    assert {name: (h.n, h.sum_ns) for name, h in aggregate.histograms.items()} == expected
    assert aggregate.histograms["itl"].quantile(Fraction(4, 5)) == pytest.approx(10, rel=0.005)


@pytest.mark.parametrize(
    ("at_ns", "width_ns", "doubtful"),
    [(10_000_000, 1_000_001, 1), (10_000_000, 1_000_000, 0), (100_000_000, 5_000_001, 1), (100_000_000, 5_000_000, 0)],
)
def test_a_request_whose_ends_are_uncertain_is_doubtful(at_ns: int, width_ns: int, doubtful: int) -> None:
    """By more than 1 ms and by more than 5 %."""
    chunk_ns = [at_ns, at_ns + 1, at_ns + 2]
    assert of([Request(chunk_ns=chunk_ns, chunk_width_ns=[width_ns, 0, 0])]).doubtful == doubtful
    assert of([Request(chunk_ns=chunk_ns, chunk_width_ns=[0, 9 * width_ns, 0])]).doubtful == 0, "only its ends count"
    failed = Request(outcome=Outcome.TRUNCATED, chunk_ns=chunk_ns, chunk_width_ns=[width_ns, 0, 0])
    assert of([failed]).doubtful == 0


def test_shares_of_a_core_are_those_of_the_time_between_two_looks() -> None:
    first, last = CoreTime(1_000, 600, 10), CoreTime(3_000, 1_600, 510)
    assert (last.used_share(first), last.waited_share(first)) == (0.5, 0.25)
    assert CoreTime(3_000, 1_600, None).waited_share(first) is None
    assert last.waited_share(CoreTime(1_000, 600, None)) is None
    assert (last.used_share(last), last.waited_share(last)) == (None, None), "no time, no share"
    assert (first.used_share(last), first.waited_share(last)) == (None, None), "a worker that began anew"


def test_a_chunk_without_tokens_passes_its_gap_on() -> None:
    itl = of([Request(chunk_ns=[0, 30, 50], chunk_tokens=[0, 0, 2])]).histograms["itl"]
    assert (itl.n, itl.sum_ns) == (2, 50)


def test_a_failed_request_counts_and_its_lags_do_but_not_its_latency() -> None:
    aggregate = of([Request(outcome=Outcome.TRUNCATED, ttft_ns=5, chunk_ns=[5, 9], schedule_lag_ns=3, slot_wait_ns=0)])
    assert aggregate.finished == {Outcome.TRUNCATED: 1}
    assert aggregate.histograms["ttft"].n == aggregate.histograms["chunk_gap"].n == 0
    assert aggregate.histograms["generator_lag"].n == 1


def test_unknown_stays_unknown() -> None:
    aggregate = of([Request(e2e_ns=9, chunk_ns=[3, 9], chunk_tokens=None, output_tokens=None)])
    assert aggregate.histograms["itl"].n == aggregate.histograms["tpot"].n == aggregate.histograms["ttft"].n == 0
    assert aggregate.histograms["chunk_gap"].n == 1


def test_good_requests_are_counted_as_they_were_judged() -> None:
    aggregate = RunAggregate()
    for good in (True, True, False, None):
        aggregate.request_sent()
        aggregate.observe(Request(), good)
    assert (aggregate.good, aggregate.not_good) == (2, 1)


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    number = st.none() | st.integers(0, 10**10)
    made = []
    for _ in range(draw(st.integers(0, 4))):
        gaps = draw(st.lists(st.integers(0, 10**9), max_size=5))
        chunk_ns = [sum(gaps[: i + 1]) for i in range(len(gaps))]
        tokens = draw(st.none() | st.lists(st.integers(0, 5), min_size=len(gaps), max_size=len(gaps)))
        made.append(
            Request(
                outcome=draw(st.sampled_from(list(Outcome))),
                ttft_ns=draw(number),
                e2e_ns=draw(number),
                schedule_lag_ns=draw(number),
                slot_wait_ns=0,
                chunk_ns=chunk_ns,
                chunk_tokens=tokens,
                output_tokens=draw(number),
            )
        )
    return made


@given(requests(), requests())
@settings(max_examples=40, deadline=None)
def test_merging_is_algebra(a: list[Request], b: list[Request]) -> None:
    assert union(of(a), RunAggregate()) == of(a) == union(RunAggregate(), of(a))
    assert union(of(a), of(b)) == union(of(b), of(a)) == of(a + b)


@given(requests(), st.integers(0, 1 << 53))
@settings(max_examples=40, deadline=None)
def test_a_snapshot_survives_its_message(made: list[Request], sequence: int) -> None:
    for core_time in (None, CoreTime(sequence, 5, None), CoreTime(7, sequence, 9)):
        snapshot = Snapshot.from_message(of(made).to_message("worker 1", sequence, core_time=core_time))
        assert snapshot == Snapshot("worker 1", sequence, of(made), core_time=core_time)


def test_the_newest_snapshot_of_each_worker_counts_whatever_the_order() -> None:
    snapshots = Snapshots()
    old, new = of([EXAMPLE]), of([EXAMPLE, EXAMPLE])
    assert snapshots.offer(Snapshot("a", 2, new))
    assert not snapshots.offer(Snapshot("a", 1, old))
    assert not snapshots.offer(Snapshot("a", 2, new))
    assert snapshots.offer(Snapshot("b", 7, old))
    assert snapshots.worker_ids == ["a", "b"]
    assert snapshots.merged() == of([EXAMPLE] * 3)
    assert Snapshots().merged() == RunAggregate()


def test_a_stage_has_the_requests_of_its_own_time() -> None:
    stages = StageAggregates()
    stages.open(0, 100, 200)
    stages.open(1, 200, 300)
    first, second = stages.aggregates[0], stages.aggregates[1]
    assert [stages.at(time_ns) for time_ns in (99, 100, 199, 200, 299, 300)] == [
        None,
        first,
        first,
        second,
        second,
        None,
    ]
    stages.open(1, 200, 250)
    assert stages.at(249) is second
    assert stages.at(250) is None


def test_only_the_last_stages_are_kept() -> None:
    stages = StageAggregates()
    for stage in range(10):
        stages.open(stage, stage, stage + 1)
    assert list(stages.aggregates) == list(range(10 - KEPT_STAGES, 10))
    assert stages.at(0) is None
    assert stages.at(9) is stages.aggregates[9]


def test_a_stage_is_merged_over_the_workers_that_know_it() -> None:
    snapshots = Snapshots()
    for worker, stages in (("a", {0: of([EXAMPLE]), 1: of([EXAMPLE] * 2)}), ("b", {1: of([EXAMPLE])}), ("c", {})):
        message = of([EXAMPLE] * 5).to_message(worker, 1, stages)
        assert Snapshot.from_message(message) == Snapshot(worker, 1, of([EXAMPLE] * 5), stages)
        snapshots.offer(Snapshot.from_message(message))
    assert snapshots.of_stage(0) == of([EXAMPLE])
    assert snapshots.of_stage(1) == of([EXAMPLE] * 3)
    assert snapshots.of_stage(2) is None
    assert snapshots.merged() == of([EXAMPLE] * 15)


def test_a_worker_tells_of_itself_beside_its_requests() -> None:
    health = {name: 1.5 * number for number, name in enumerate(HEALTH)} | {"open_fds": None}
    snapshot = Snapshot.from_message(RunAggregate().to_message("a", 1, health=health))
    assert snapshot.health == health
    assert Snapshot.from_message(RunAggregate().to_message("a", 1)).health is None


@given(requests(), requests())
def test_what_has_come_since_is_what_was_observed_since(before: list[Request], after: list[Request]) -> None:
    earlier, both, alone = of(before), of([*before, *after]), of(after)
    since = both.since(earlier)
    for name in HISTOGRAMS:
        mine, true = since.histograms[name], alone.histograms[name]
        assert (mine.n, mine.sum_ns) == (true.n, true.sum_ns)
        for q in (0.01, 0.5, 0.99):
            exact = true.quantile(q)
            assert mine.quantile(q) == (None if exact is None else pytest.approx(exact, rel=0.011, abs=1))
    assert {k: v for k, v in since.finished.items() if v} == alone.finished
    assert [getattr(since, name) for name in COUNTERS] == [getattr(alone, name) for name in COUNTERS]


def test_what_knew_more_is_no_former_state() -> None:
    with pytest.raises(ValueError, match="former state"):
        of([EXAMPLE]).since(of([EXAMPLE] * 2))
    failed = RunAggregate(finished={Outcome.HTTP_ERROR: 1})
    with pytest.raises(ValueError, match="former state"):
        RunAggregate(finished={Outcome.TRUNCATED: 1}).since(failed)


def message(**changes: Any) -> dict[str, Any]:
    return {**RunAggregate().to_message("w", 1), **changes}


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (None, "mapping"),
        (message(schema=1), "'schema'"),
        (message(worker_id=""), "'worker_id'"),
        (message(worker_id=b"w"), "'worker_id'"),
        (message(worker_id="x" * 257), "'worker_id'"),
        (message(sequence=-1), "'sequence'"),
        (message(sequence=True), "'sequence'"),
        (message(counters=[]), "'counters'"),
        (message(counters={"sent": 1}), "'counters'"),
        (message(counters={**message()["counters"], "chunks": 1.5}), r"'counters\.chunks'"),
        (message(finished={"fine": 1}), "'finished'"),
        (message(finished={"ok": 1 << 60}), r"'finished\.ok'"),
        (message(finished={7: 1}), "'finished'"),
        (message(histograms={}), "'histograms'"),
        (message(histograms={**message()["histograms"], "itl": "text"}), r"'histograms\.itl'"),
        (message(histograms={**message()["histograms"], "itl": b"junk"}), r"'histograms\.itl'"),
        (message(core_time=5), "'core_time'"),
        (message(core_time={"at_ns": 1, "used_ns": 1}), "waited_ns"),
        (message(core_time={"at_ns": -1, "used_ns": 1, "waited_ns": None}), "at_ns"),
        (message(stages=None), "'stages'"),
        (message(stages=["x"]), "'stages'"),
        (message(stages=[{}] * 4), "'stages'"),
        (message(stages=[{**message(), "stage": -1}]), r"'stages\.stage'"),
        (message(stages=[{**message(), "stage": 0, "finished": 5}]), "'finished'"),
        (message(health={"cpu_fraction": 0.5}), "'health'"),
        (message(health=dict.fromkeys(HEALTH, "1")), r"'health\.cpu_fraction'"),
        (message(health=dict.fromkeys(HEALTH, float("nan"))), r"'health\.cpu_fraction'"),
    ],
)
def test_a_hostile_message_is_refused_by_its_field(value: object, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Snapshot.from_message(value)
