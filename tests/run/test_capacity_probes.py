"""The order of what a search sends, in virtual time: settling, windows, tails, silence, resets and the record."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from vllm_locust.aggregate import RunAggregate, Snapshot
from vllm_locust.capacity.search import CapacitySettings
from vllm_locust.capacity_options import CapacityOrder
from vllm_locust.config import RunConfig, Target
from vllm_locust.core_time import CoreTime
from vllm_locust.errors import TargetError
from vllm_locust.load_profile import Quantity
from vllm_locust.outcome import Outcome
from vllm_locust.run.capacity import probes as capacity_probes
from vllm_locust.run.capacity.probes import CapacityProbes
from vllm_locust.run.course.stage_spans import StageSpan, Stretch, append_stretch
from vllm_locust.store.rundir import RunDirectory

if TYPE_CHECKING:
    from vllm_locust.run.course.course import Course, RunView

NS = 1_000_000_000
SERVICE_S = 0.5
LIMIT_RPS = 20.0
START_NS = 1_000 * NS


@dataclass
class World:
    """A server of 20 requests/s behind an open loop; the queue is what came beyond that."""

    directory: Path
    now_ns: int = START_NS
    planned_end_ns: int = START_NS + 2 * NS
    spans: tuple[StageSpan, ...] = ()
    stretches: list[Stretch] = field(default_factory=list)
    queue: float = 0.0
    sent: int = 0
    finished: int = 0
    reset_at: list[int] = field(default_factory=list)
    resets_fail: bool = False
    lag_ns: int = 0
    waiting: int = 0
    lost: int = 0
    outcome: Outcome = Outcome.OK
    gone_from_ns: int | None = None
    refused: int = 0
    refused_as: Outcome = Outcome.CONNECT_ERROR
    disturbed_stages: int = 0
    """In so many stages from the first on the worker waits for a core for half of the time."""
    waited_ns: int = 0
    worker_ids: tuple[str, ...] = ("here",)

    def view(self) -> RunView:
        config = RunConfig(targets=(Target.parse("http://h:1"),), slos=("p90(ttft)<=1s",))
        fake = SimpleNamespace(
            config=config,
            workload=SimpleNamespace(rows=10, repeats=True),
            snapshots=self,
            common_unix_ns=lambda: self.now_ns,
            requests_waiting=lambda: None,
            messenger=SimpleNamespace(worker_ids=lambda: ["here"]),
            run_id="run-1",
            run_dir=RunDirectory(self.directory),
        )
        return cast("RunView", fake)

    # As a course

    def span(self, stage: int) -> StageSpan | None:
        return next((span for span in self.spans if span.stage == stage), None)

    def arrivals_due(self, span: StageSpan) -> int:
        assert span.end_unix_ns is not None
        return round(span.load.start_value * (span.end_unix_ns - span.start_unix_ns) / NS)

    # As snapshots

    def of_worker(self, worker_id: str) -> Snapshot:
        stages = {span.stage: told for span in self.spans if (told := self.of_stage(span.stage)) is not None}
        core_time = CoreTime(self.now_ns, self.now_ns // 10, self.waited_ns)
        return Snapshot(worker_id, 1, self.merged(), stages, core_time)

    def merged(self) -> RunAggregate:
        load = self.stretches[-1].load.start_value if self.stretches else 0.0
        gone = self.gone_from_ns is not None and self.now_ns > self.gone_from_ns
        in_flight = 0 if gone else round(self.queue + min(load, LIMIT_RPS) * SERVICE_S)
        finished = {self.outcome: self.finished} | ({self.refused_as: self.refused} if self.refused else {})
        return RunAggregate(
            sent=self.sent, finished=finished, in_flight=in_flight, waiting_arrivals=self.waiting if load else 0
        )

    def of_stage(self, stage: int) -> RunAggregate | None:
        span = self.span(stage)
        if span is None or span.end_unix_ns is None or self.now_ns < span.start_unix_ns:
            return None
        seconds = (min(self.now_ns, span.end_unix_ns) - span.start_unix_ns) / NS
        due, known = self.arrivals_due(span), round(span.load.start_value * seconds)
        told = due if self.now_ns > span.end_unix_ns + self.queue * NS / LIMIT_RPS else max(0, known - 20)
        told = min(told, due - self.lost)
        in_flight = due - self.lost - told
        aggregate = RunAggregate(sent=due, finished={self.outcome: told}, in_flight=in_flight, output_tokens=told)
        slow = span.load.start_value > LIMIT_RPS
        if told:
            aggregate.histograms["ttft"].record(3 * NS if slow else NS // 10, told)
            aggregate.histograms["e2e"].record(4 * NS if slow else round(SERVICE_S * NS), told)
            aggregate.histograms["generator_lag"].record(self.lag_ns, told)
        return aggregate

    def reset(self) -> None:
        if self.resets_fail:
            raise TargetError("it is not there")
        assert self.merged().in_flight == 0
        self.reset_at.append(len(self.stretches))

    def run(self, probes: CapacityProbes) -> None:
        """To the end, as the open course does it: asked two seconds before the planned end."""
        probes.follow(cast("Course", self))
        while (stretch := probes.next_stretch()) is not None:
            assert stretch.load.length_ns is not None
            assert len(self.stretches) < 2_000
            self.spans = append_stretch(self.spans, stretch, Quantity.RATE, self.planned_end_ns)
            self.stretches.append(stretch)
            self.planned_end_ns += stretch.load.length_ns
            while self.now_ns < self.planned_end_ns - 2 * NS:
                self.now_ns += NS
                self.waited_ns += NS // 2 if stretch.stage is not None and stretch.stage < self.disturbed_stages else 0
                load = stretch.load.start_value
                self.sent += round(load)
                if self.gone_from_ns is not None and self.now_ns > self.gone_from_ns:
                    self.refused += round(load)
                else:
                    self.finished += round(min(load + self.queue, LIMIT_RPS))
                self.queue = max(0.0, self.queue + (load - LIMIT_RPS if load else -LIMIT_RPS))
                probes.look()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path)
    monkeypatch.setattr(capacity_probes, "clock", SimpleNamespace(monotonic_ns=lambda: made.now_ns))
    return made


def search(world: World, *, reset: bool = False, **settings: Any) -> dict[str, Any]:
    asked = {"start_load": 10.0, "min_load": 1.0, "budget_s": 600.0, "max_probes": 4, "probe_s": 30.0, "settle_s": 3.0}
    order = CapacityOrder(settings=CapacitySettings(quantity=Quantity.RATE, **{**asked, **settings}))
    made = CapacityProbes(world.view(), order, terms={}, reset_prefix_cache=world.reset if reset else None)
    world.run(made)
    content: dict[str, Any] = json.loads((world.directory / "capacity.json").read_text(encoding="utf-8"))
    return content


def shape(world: World) -> list[tuple[float, int | None, float]]:
    """The stretches with equal neighbours joined: load, stage, seconds."""
    joined: list[tuple[float, int | None, float]] = []
    for stretch in world.stretches:
        assert stretch.load.length_ns is not None
        load, seconds = stretch.load.start_value, stretch.load.length_ns / NS
        if joined and joined[-1][:2] == (load, stretch.stage):
            joined[-1] = (load, stretch.stage, joined[-1][2] + seconds)
        else:
            joined.append((load, stretch.stage, seconds))
    return joined


def test_a_load_settles_is_measured_and_goes_on_until_all_is_answered(world: World) -> None:
    kept = search(world)
    stretches = shape(world)
    assert stretches[:2] == [(10, None, 3.0), (10, 0, 30.0)]
    assert [one[:2] for one in stretches[2:5]] == [(10, None), (20, None), (20, 1)]
    tail_s = stretches[2][2]
    assert tail_s >= 2, "of the window's last requests nothing is known two seconds before its end"
    assert [(probe["stage"], probe["load"]) for probe in kept["probes"][:3]] == [(0, 10), (1, 20), (2, 40)]
    assert kept["probes"][0]["requests"] == 300
    assert kept["probes"][0]["elapsed_s"] == pytest.approx(3 + 30 + tail_s, abs=2)
    assert kept["notes"] == [
        "The workload's 10 prompts were sent more than once: where the server keeps a prefix cache, later probes found "
        "more in it (a larger workload, or --reset-prefix-cache, avoids that)."
    ]


def test_a_hopeless_probe_ends_early_and_its_queue_is_waited_for(world: World) -> None:
    kept = search(world, start_load=40.0, max_probes=2)
    hopeless = kept["probes"][0]
    assert hopeless["ended_early"].startswith("queue grows")
    assert 15 <= hopeless["window_s"] < 30
    stretches = shape(world)
    assert stretches[2][:2] == (0, None), "silence at once, and not the load that was too much"
    queue_s = 20 * (hopeless["window_s"] + 3) / LIMIT_RPS
    assert stretches[2][2] >= queue_s - 3
    lower = stretches[3]
    assert lower[0] < 40
    assert lower[1] is None


def test_the_cache_is_reset_before_each_probe_when_nothing_is_in_flight(world: World) -> None:
    search(world, reset=True, max_probes=2)
    assert len(world.reset_at) == 2
    for place in world.reset_at:
        assert world.stretches[place - 1].load.start_value == 0
        assert world.stretches[place].load.start_value > 0


def test_a_cache_that_could_not_be_reset_is_told(world: World) -> None:
    world.resets_fail = True
    kept = search(world, reset=True, max_probes=1)
    assert kept["notes"] == ["The server's prefix cache was not reset before probe 1: it is not there"]


def test_a_generator_that_is_always_late_ends_the_search(world: World) -> None:
    world.lag_ns = NS // 5
    kept = search(world, max_probes=4)
    assert [probe["load"] for probe in kept["probes"]] == [10, 10, 10]
    assert all("add workers" in probe["left_out"] for probe in kept["probes"])
    assert kept["ended"] == (
        "The search ended early: 3 probes in a row do not count, the last since its requests were sent up to 200 ms "
        "(p99) after they were due; add workers."
    )


def test_a_probe_that_the_generator_disturbed_is_repeated_and_steers_nothing(world: World) -> None:
    world.disturbed_stages = 2
    kept = search(world, max_probes=6)
    left_out = [probe["left_out"] for probe in kept["probes"]]
    words = "a worker waited for a core 48.3 % of the time: something else runs on its machine"
    assert left_out == [words, words, None, None, None, None], "half of it, less the second before the first look"
    assert [probe["load"] for probe in kept["probes"][:5]] == [10, 10, 10, 20, 40]
    assert kept["ended"] is None


def test_too_few_probes_that_count_in_all_end_the_search(world: World) -> None:
    """One after the other never three in a row, yet more than half of them."""
    world.disturbed_stages = 1
    kept = search(world, max_probes=1)
    assert [probe["left_out"] is None for probe in kept["probes"]] == [False]
    assert kept["ended"].startswith("The search ended early: 1 probes do not count")


def test_slots_that_are_too_few_end_the_search(world: World) -> None:
    world.waiting = 5
    kept = search(world)
    assert [probe["left_out"] for probe in kept["probes"]] == ["every slot was busy; raise -u"] * 2
    assert all(probe["window_s"] < 10 for probe in kept["probes"]), "it is over as soon as that is seen"
    assert kept["ended"].startswith("The search ended early: in 2 probes in a row every slot was busy")
    assert kept["ended"].endswith("raise -u.")


def test_a_server_that_is_gone_ends_the_search(world: World) -> None:
    world.outcome = Outcome.CONNECT_ERROR
    kept = search(world)
    (probe,) = kept["probes"]
    assert probe["left_out"].startswith("the server could not be reached, and ")
    assert probe["window_s"] < 15
    assert kept["ended"] == "The search ended early: the server cannot be reached."


def test_a_probe_does_not_end_while_the_server_may_be_gone(world: World) -> None:
    world.gone_from_ns = START_NS + (3 + 5 + 2) * NS
    kept = search(world, probe_s=5.0, min_requests=10, max_probes=2)
    (probe,) = kept["probes"]
    assert (probe["window_s"], probe["left_out"] is None) == (5.0, False)
    assert kept["ended"] == "The search ended early: the server cannot be reached."


def test_a_probe_that_lost_arrivals_steers_nothing(world: World) -> None:
    world.lost = 7
    kept = search(world)
    assert [probe["load"] for probe in kept["probes"]] == [10, 10, 10]
    fault = (
        "no worker has told of 7 of its arrivals: they have too much to do; add workers, or give a lower --start-load"
    )
    assert {probe["left_out"] for probe in kept["probes"]} == {fault}
    assert all(probe["elapsed_s"] < 3 + 30 + 10 for probe in kept["probes"]), "they are not waited for"
    assert kept["ended"] == f"The search ended early: 3 probes in a row do not count, the last since {fault}."


def test_answers_are_waited_for_no_longer_than_the_budget(world: World) -> None:
    kept = search(world, start_load=1000.0, budget_s=45.0)
    assert kept["probes"]
    assert sum(probe["elapsed_s"] for probe in kept["probes"]) < 45 + 10
    assert (world.now_ns - START_NS) / NS < 45 + 12


def test_a_server_that_serves_nothing_ends_the_search(world: World) -> None:
    world.outcome = Outcome.HTTP_ERROR
    kept = search(world)
    (probe,) = kept["probes"]
    assert probe["left_out"].startswith("the server answered no request any more: of ")
    assert probe["left_out"].endswith(" http_error")
    assert kept["ended"] == "The search ended early: the server answers no request any more."


def test_a_gateway_whose_server_is_gone_is_no_slow_server(world: World) -> None:
    """In the middle of the second probe, at a load that it can take: half of the probe's requests fail."""
    world.refused_as = Outcome.HTTP_ERROR
    world.gone_from_ns = START_NS + 60 * NS
    kept = search(world)
    held, gone = kept["probes"]
    assert held["left_out"] is None
    assert gone["left_out"].startswith("the server answered no request any more: of ")
    assert kept["ended"] == "The search ended early: the server answers no request any more."
