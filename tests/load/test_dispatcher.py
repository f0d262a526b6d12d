"""Whole shares of a schedule, played by Locust users against a server whose service time is known."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from typing import Any

import pytest

from tests.load.scripted_server import Step, chunked, serving
from vllm_locust.arrival import ArrivalProcess, Piece, Schedule
from vllm_locust.workload.sampler import positions

MS = 1_000_000
ROWS = 40
SEED = 7
"""Of the prompts."""
Played = dict[str, Any]
Play = Callable[..., Played]


class Always(dict[str, tuple[Step, ...]]):
    """One script for every request."""

    def __init__(self, service_s: float) -> None:
        super().__init__()
        answer = chunked(b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n', b"data: [DONE]\n\n")
        self._script: tuple[Step, ...] = (service_s, *answer)

    def __missing__(self, name: str) -> tuple[Step, ...]:
        return self._script


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[[dict[str, Any]], Any]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.load.drive_open_loop"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def ask(plan: dict[str, Any]) -> Any:
        stdin.write(json.dumps(plan) + "\n")
        stdin.flush()
        line = stdout.readline()
        assert line, "the driver has died: its words are on stderr"
        return json.loads(line)

    yield ask
    process.communicate(timeout=10)


@pytest.fixture
def play(ask: Callable[[dict[str, Any]], Any]) -> Play:
    def play(service_s: float = 0.0, **plan: Any) -> Played:
        defaults: dict[str, Any] = {
            "user": "Asks",
            "arrival": "constant",
            "slots": 8,
            "when_full": "queue",
            "drain_s": 10.0,
            "share": 0,
            "shares": 1,
            "first_arrival": 0,
            "rows": ROWS,
            "replays_times": False,
            "lead_s": 0.1,
            "stages": [],
            "acts": [],
            "drain_at_s": sum(length_s for length_s, *_ in plan["pieces"]),
        }
        with serving(Always(service_s)) as server:
            url = "http://{}:{}".format(*server.listener.getsockname())
            played: Played = ask({**defaults, **plan, "url": url})
        assert played["requests"], "a run in which nothing happened proves nothing"
        return played

    return play


def by_arrival(played: Played) -> dict[int, dict[str, Any]]:
    rows = {row["arrival"]: row for row in played["requests"] if row["arrival"] is not None}
    assert len(rows) == sum(row["arrival"] is not None for row in played["requests"]), "one was sent twice"
    return rows


def outcomes(played: Played) -> Counter[str]:
    return Counter(row["outcome"] for row in played["requests"])


@pytest.mark.parametrize(("share", "shares", "first"), [(0, 1, 0), (1, 3, 0), (2, 3, 31)])
@pytest.mark.parametrize("arrival", ["constant", "poisson"])
def test_each_arrival_is_sent_once_when_it_is_due(
    play: Play, arrival: str, share: int, shares: int, first: int
) -> None:
    played = play(
        arrival=arrival,
        pieces=[[0.3, 150, 150], [0.3, 150, 300]],
        share=share,
        shares=shares,
        first_arrival=first,
        slots=200,
    )
    pieces = (Piece(300 * MS, 150, 150), Piece(300 * MS, 150, 300))
    whole = Schedule(ArrivalProcess(arrival), seed=1, pieces=pieces).offsets_ns().tolist()
    mine = {k: at for k, at in enumerate(whole) if k % shares == share and k >= first}
    rows = by_arrival(played)
    assert {k: row["scheduled_unix_ns"] - played["t0_unix_ns"] for k, row in rows.items()} == mine
    for k, row in rows.items():
        sent_ns = row["sent_unix_ns"] - played["axis_offset_ns"] - played["t0_ns"]
        assert row["schedule_lag_ns"] == sent_ns - mine[k] >= 0
        assert row["slot_wait_ns"] == 0, "a slot was idle"
        assert (row["outcome"], row["attempts"]) == ("ok", 1)
    assert played["counters"]["sent"] == len(mine)


def test_the_queue_before_one_slot_shows_in_the_lag_and_not_in_the_service_time(play: Play) -> None:
    """Coordinated omission: service 0.5 s, 10/s, one slot. Arrival k is due at 0.1 k and sent at 0.5 k."""
    played = play(service_s=0.5, pieces=[[0.6, 10, 10]], slots=1)
    rows = by_arrival(played)
    assert sorted(rows) == list(range(6))
    for k in range(6):
        assert 400 * k * MS <= rows[k]["schedule_lag_ns"] < (400 * k + 600) * MS
        assert 500 * MS <= rows[k]["ttft_ns"] < 900 * MS
        wait_ns = rows[k]["slot_wait_ns"]
        assert (wait_ns == 0) if k == 0 else (400 * k * MS <= wait_ns <= rows[k]["schedule_lag_ns"])
    for row, later in pairwise(rows.values()):
        between_ns = later["slot_wait_ns"] + 100 * MS - (row["schedule_lag_ns"] + row["done_ns"])
        assert 0 <= between_ns < 200 * MS, "the slot is free when the answer before has ended"
    growth_ns = [later["schedule_lag_ns"] - row["schedule_lag_ns"] for row, later in pairwise(rows.values())]
    assert min(growth_ns) >= 400 * MS
    assert played["waiting_at_drain"] >= 4  # 0 and 1 can be sent by then
    first, second, *_ = (sample["schedule_lag_max_ns"] for sample in played["health"])
    assert 400 * MS <= first < second


def test_what_is_due_while_every_slot_is_busy_is_dropped_where_that_was_asked_for(play: Play) -> None:
    played = play(service_s=0.6, pieces=[[1.6, 2.5, 2.5]], slots=1, when_full="drop")
    rows = by_arrival(played)
    assert sorted(rows) == [0, 2]
    dropped = played["arrivals"]
    assert [row["number"] for row in dropped] == [1, 3]
    assert [row["scheduled_unix_ns"] - played["t0_unix_ns"] for row in dropped] == [400 * MS, 1200 * MS]
    assert {(row["worker_id"], row["status"]) for row in dropped} == {("w", "dropped")}
    assert played["counters"]["dropped_arrivals"] == 2
    assert prompts(rows) == expected_prompts(rows)


def prompts(rows: dict[int, dict[str, Any]]) -> dict[int, str]:
    return {k: row["prompt_id"] for k, row in rows.items()}


def expected_prompts(numbers: Any) -> dict[int, str]:
    sequence = list(islice(positions(ROWS, seed=SEED, share=0, shares=1), max(numbers) + 1))
    return {k: f"{sequence[k][0]}:{sequence[k][1]}" for k in numbers}


@pytest.mark.parametrize(("share", "shares", "first"), [(0, 1, 0), (1, 3, 0), (2, 3, 31)])
def test_an_arrival_has_its_prompt_whoever_sends_it(play: Play, share: int, shares: int, first: int) -> None:
    rows = by_arrival(play(pieces=[[0.3, 400, 400]], share=share, shares=shares, first_arrival=first))
    assert len(rows) == sum(k % shares == share for k in range(first, 120))
    assert max(rows) >= 2 * ROWS
    assert prompts(rows) == expected_prompts(rows)


def test_an_arrival_has_its_task_whoever_sends_it(play: Play) -> None:
    def tasks(share: int, shares: int) -> dict[int, str]:
        played = play(user="Chooses", pieces=[[0.3, 200, 200]], share=share, shares=shares)
        return {k: row["task"] for k, row in by_arrival(played).items()}

    whole = tasks(0, 1)
    assert whole == tasks(0, 2) | tasks(1, 2)
    assert 4 <= Counter(whole.values())["seldom"] <= 30  # a quarter of 60


def test_what_a_task_sends_further_has_no_schedule(play: Play) -> None:
    played = play(user="AsksTwice", pieces=[[0.2, 50, 50]], drain_at_s=0.7, stages=[[0.0, 60.0]])
    assert Counter(row["task"] for row in played["requests"]) == {"first": 10, "second": 10}
    for row in played["requests"]:
        scheduled = (row["arrival"], row["scheduled_unix_ns"], row["schedule_lag_ns"])
        assert (row["task"] == "second") == (scheduled == (None, None, None))
    assert sorted(by_arrival(played)) == list(range(10))
    assert [part["counters"]["sent"] for part in played["stages"]] == [20], "each counts by when it was sent"


def test_a_session_belongs_to_its_arrival(play: Play) -> None:
    played = play(user="HoldsSessions", pieces=[[0.2, 50, 50]], drain_at_s=0.7)
    first_turns = {row["arrival"]: row["conversation_id"] for row in played["requests"] if row["turn"] == 0}
    assert first_turns == {k: prompt.partition(":")[2] for k, prompt in expected_prompts(range(10)).items()}
    assert [row["arrival"] for row in played["requests"] if row["turn"] == 1] == [None] * 10


@pytest.mark.parametrize("act", ["stop_users", "stop_users_gently"])
def test_users_that_are_stopped_while_they_wait_end_at_once_and_lose_nothing(play: Play, act: str) -> None:
    pieces = [[0.2, 60, 60], [0.6, 0, 0], [0.3, 60, 60]]
    played = play(pieces=pieces, slots=6, acts=[[0.5, act, 4], [0.5, "spawn_users", 2]])
    assert played["acts_s"][0] < 2, "a user that waits must not be waited for"
    assert sorted(by_arrival(played)) == list(range(30))
    assert outcomes(played) == {"ok": 30}
    assert len({row["user_id"] for row in played["requests"]}) == 8


def test_an_arrival_whose_user_is_killed_before_it_sends_goes_to_another(play: Play) -> None:
    acts = [[0.15, "stop_users", 2], [0.25, "spawn_users", 2]]
    rows = by_arrival(play(user="Dawdles", pieces=[[0.2, 10, 10]], slots=2, acts=acts))
    assert sorted(rows) == [0, 1]
    assert prompts(rows) == expected_prompts(rows)
    assert [(row["outcome"], row["attempts"]) for row in rows.values()] == [("ok", 1)] * 2
    assert {row["user_id"] for row in rows.values()} == {2, 3}


def test_a_user_that_is_stopped_while_its_request_runs_ends_it_first(play: Play) -> None:
    acts = [[0.15, "stop_users", 2], [0.2, "spawn_users", 2]]
    played = play(service_s=1.0, pieces=[[0.4, 10, 10]], slots=2, acts=acts)
    users = {k: row["user_id"] for k, row in by_arrival(played).items()}
    assert ({users[0], users[1]}, {users[2], users[3]}) == ({0, 1}, {2, 3})
    assert outcomes(played) == {"ok": 4}


def test_what_waits_is_sent_while_the_drain_lasts_and_on_record_when_it_ends(play: Play) -> None:
    played = play(service_s=0.4, pieces=[[0.8, 10, 10]], slots=1, drain_s=0.6)
    rows = by_arrival(played)
    assert sorted(rows) == list(range(8))
    assert [rows[k]["outcome"] for k in range(8)] == ["ok"] * 3 + ["censored"] * 5
    assert (rows[3]["attempts"], rows[3]["user_id"]) == (1, rows[0]["user_id"])
    for k in range(4, 8):
        row = rows[k]
        assert (row["attempts"], row["user_id"], row["schedule_lag_ns"], row["chunk_ns"]) == (0, None, None, [])
        assert row["scheduled_unix_ns"] == played["t0_unix_ns"] + 100 * k * MS
        given_up_ns = row["sent_unix_ns"] - played["axis_offset_ns"] - played["t0_ns"]
        assert given_up_ns >= 1400 * MS
        assert (1400 - 100 * k) * MS <= row["slot_wait_ns"] <= given_up_ns - 100 * k * MS
    counters = played["counters"]
    assert (counters["in_flight"], counters["waiting_arrivals"], counters["not_good"]) == (0, 0, 5)


def test_slots_go_home_when_there_is_nothing_left_to_send(play: Play) -> None:
    assert play(pieces=[[0.2, 50, 50]], slots=5)["users_left"] == 0


def test_nothing_is_due_after_an_early_stop(play: Play) -> None:
    numbers = sorted(by_arrival(play(pieces=[[5.0, 100, 100]], drain_at_s=0.205)))
    assert numbers == list(range(len(numbers)))
    assert 21 <= len(numbers) < 200


@pytest.mark.parametrize(("slots", "when_full"), [(100, "queue"), (1, "queue"), (1, "drop"), (40, "drop")])
def test_what_was_due_before_a_stop_is_accounted_for_though_it_was_not_looked_at_yet(
    play: Play, slots: int, when_full: str
) -> None:
    """More of them are due than the dispatcher hands out in one turn of the event loop."""
    played = play(pieces=[[1.0, 200, 200]], lead_s=-0.5, drain_at_s=0.5, slots=slots, when_full=when_full)
    sent, dropped = sorted(by_arrival(played)), [row["number"] for row in played["arrivals"]]
    assert sorted(sent + dropped) == list(range(len(sent) + len(dropped)))
    assert len(sent) + len(dropped) >= 101
    assert outcomes(played) == {"ok": len(sent)}
    if when_full == "queue":
        assert dropped == []
    else:
        assert sent[:slots] == list(range(slots))
        assert dropped


def test_a_late_beginning_sends_what_is_due_at_once_and_in_order(play: Play) -> None:
    played = play(pieces=[[1.0, 100, 100]], lead_s=-0.5, slots=100)
    assert sorted(by_arrival(played)) == list(range(100))
    begun = sorted(played["requests"], key=lambda row: row["request_id"])
    assert [row["scheduled_unix_ns"] - played["t0_unix_ns"] for row in begun] == [10 * k * MS for k in range(100)]
    for k, row in enumerate(begun):
        assert row["schedule_lag_ns"] >= max(0, 500 - 10 * k) * MS


def test_the_plan_is_lengthened_while_it_runs_and_after_it_has_run_out(play: Play) -> None:
    extensions = [[0.1, "extend", [0.2, 100, 100]], [0.5, "extend", [0.2, 50, 50]]]
    rows = by_arrival(played := play(pieces=[[0.2, 50, 50]], acts=extensions, drain_at_s=0.7))
    due_ms = [*range(0, 200, 20), *range(200, 400, 10), *range(400, 600, 20)]
    assert [(rows[k]["scheduled_unix_ns"] - played["t0_unix_ns"]) / MS for k in range(40)] == due_ms
    overdue = [rows[k]["schedule_lag_ns"] for k in range(30, 35)]
    assert [lag >= (100 - 20 * i) * MS for i, lag in enumerate(overdue)] == [True] * 5


def test_an_arrival_for_which_nothing_is_sent_is_on_record(play: Play) -> None:
    """Of four users one asks, one breaks its task, one does nothing, and one ends and leaves its arrival to another."""
    played = play(user="Fails", pieces=[[0.3, 100, 100]], slots=4)
    rows = by_arrival(played)
    assert sorted(rows) == list(range(30))
    failed = [row for row in rows.values() if row["outcome"] != "ok"]
    assert {(row["outcome"], row["attempts"]) for row in failed} == {("client_error", 0)}
    words = Counter(row["error"] for row in failed)
    assert set(words) == {
        "its task ended without a request",
        "its task failed before it sent a request: ValueError: broken",
    }
    assert {row["user_id"] % 4 for row in rows.values()} == {0, 1, 2}


def test_arrivals_beyond_a_workload_s_end_fail_by_name(play: Play) -> None:
    played = play(pieces=[[0.2, 100, 100]], rows=12, replays_times=True)
    rows = by_arrival(played)
    assert [rows[k]["outcome"] for k in range(20)] == ["ok"] * 12 + ["client_error"] * 8
    assert prompts({k: rows[k] for k in range(12)}) == {k: f"0:{k}" for k in range(12)}
    assert rows[12]["error"] == "the workload ends before arrival 12; give a longer one, or a shorter test"


def test_a_request_counts_for_the_stage_in_which_it_was_due(play: Play) -> None:
    played = play(service_s=0.15, pieces=[[0.6, 20, 20]], slots=2, stages=[[0.0, 0.2], [0.2, 0.6]])
    assert sorted(by_arrival(played)) == list(range(12))
    sent = {part["stage"]: part["counters"]["sent"] for part in played["stages"]}
    good = {part["stage"]: part["counters"]["good"] for part in played["stages"]}
    assert sent == good == {0: 4, 1: 8}
    assert [part["counters"]["in_flight"] for part in played["stages"]] == [0, 0]


def test_what_is_dropped_counts_for_its_stage(play: Play) -> None:
    played = play(service_s=0.35, pieces=[[0.4, 10, 10]], slots=1, when_full="drop", stages=[[0.0, 0.2], [0.2, 0.6]])
    assert [part["counters"]["dropped_arrivals"] for part in played["stages"]] == [1, 2]


@pytest.mark.parametrize(
    ("kind", "open_loop", "fix"),
    [
        ("Asks", True, None),
        ("Closed", False, None),
        ("Closed", True, "derive it from OpenLoopChatUser"),
        ("Asks", False, "give --rate"),
        ("Thinks", True, "remove it"),
        ("Nested", True, "as one @task method"),
    ],
)
def test_a_user_class_of_the_wrong_kind_is_named_with_the_fix(
    ask: Callable[[dict[str, Any]], Any], kind: str, open_loop: bool, fix: str | None
) -> None:
    problems = ask({"kinds": [kind], "open_loop": open_loop})
    assert len(problems) == (fix is not None)
    for problem in problems:
        assert problem.startswith(f"{kind} ")
        assert fix is not None
        assert fix in problem
