"""The scraper's deadlines and rows, on a clock that stands still unless somebody waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from vllm_locust import clock
from vllm_locust.collect.page_request import Page, PageFailed
from vllm_locust.collect.scraper import INTERVAL_NS, Scraper
from vllm_locust.metrics_page import MetricsPage
from vllm_locust.telemetry import Row, TelemetryKind

PAGE = MetricsPage.parse("http://h:8000")
TEXT = (
    'vllm:num_requests_running{engine="1"} 3\nvllm:kv_cache_usage_perc{engine="1"} 0.5\nprocess_start_time_seconds 9\n'
)
SECOND = INTERVAL_NS


@dataclass
class World:
    """A clock, a server whose answers take their time, and what came of it."""

    now_ns: int = 100 * SECOND
    answers: dict[int, Callable[[], str]] = field(default_factory=dict)
    """By number of the attempt; all others are ``TEXT`` after 10 ms."""
    asked_ns: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def put(self, kind: TelemetryKind, rows: Sequence[Row]) -> None:
        assert kind is TelemetryKind.SERVER
        self.rows += rows

    def request(self, page: MetricsPage) -> Page:
        assert page is PAGE
        began_ns = self.now_ns
        self.asked_ns.append(began_ns)
        answer = self.answers.get(len(self.asked_ns), lambda: TEXT)
        self.now_ns += 10_000_000
        return Page(answer(), began_ns, self.now_ns)

    def takes(self, seconds: float, text: str | None = TEXT) -> Callable[[], str]:
        def answer() -> str:
            self.now_ns += round(seconds * SECOND)
            if text is None:
                raise PageFailed("Connection refused")
            return text

        return answer

    def scraper(self) -> Scraper:
        axis = clock.WallAxis()
        axis.offset_ns = 1_000 * SECOND
        return Scraper(PAGE, self.request, self, axis, self.told.append)

    def run(self, seconds: float) -> Scraper:
        """Until so many have passed."""
        end_ns = self.now_ns + round(seconds * SECOND)
        world = self

        class Ending(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                assert timeout is not None
                due_ns = world.now_ns + round(timeout * SECOND)
                world.now_ns = min(due_ns, max(world.now_ns, end_ns))
                return due_ns > end_ns

        scraper = self.scraper()
        scraper.run(Ending())
        return scraper


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(clock, "monotonic_ns", lambda: made.now_ns)
    return made


def up(world: World) -> list[object]:
    return [row["value"] for row in world.rows if row["metric"] == "up"]


def test_the_rows_of_a_page(world: World) -> None:
    world.scraper().scrape()
    common = {"time_unix_ns": 1_100 * SECOND + 5_000_000, "target": "http://h:8000"}
    assert world.rows == [
        common | {"engine": None, "metric": "up", "value": 1.0},
        common | {"engine": None, "metric": "scrape_duration_seconds", "value": 0.01},
        common | {"engine": "1", "metric": "requests_running", "value": 3.0},
        common | {"engine": "1", "metric": "kv_cache_usage", "value": 0.5},
        common | {"engine": None, "metric": "process_start_time_seconds", "value": 9.0},
    ]


def test_fixed_deadlines_and_a_last_look(world: World) -> None:
    scraper = world.run(3.5)
    assert [at / SECOND - 100 for at in world.asked_ns] == [0, 1, 2, 3, 3.5]
    assert scraper.counts.pages == 5
    assert scraper.counts.missed_ticks == 0


def test_a_slow_page_misses_ticks_and_moves_none(world: World) -> None:
    world.answers[2] = world.takes(2.5)
    scraper = world.run(6.5)
    assert [at / SECOND - 100 for at in world.asked_ns] == [0, 1, 4, 5, 6, 6.5]
    assert scraper.counts.missed_ticks == 2


def test_a_server_that_goes_away_and_comes_back(world: World) -> None:
    world.answers = {n: world.takes(0.2, None) for n in (2, 3, 4)} | {5: world.takes(0, "<html>starting</html>")}
    scraper = world.run(6.5)
    assert up(world) == [1, 0, 0, 0, 0, 1, 1, 1]
    assert world.told == [
        "http://h:8000/metrics: Connection refused",
        "http://h:8000/metrics: it tells nothing of a server that this version knows",
        "http://h:8000/metrics is back",
    ]
    assert (scraper.counts.pages, scraper.counts.failures) == (4, 4)
    gone = next(row for row in world.rows if row["value"] == 0)
    assert gone["time_unix_ns"] == 1_101 * SECOND + 105_000_000, "the middle of the attempt"


def test_a_broken_line_costs_no_page(world: World) -> None:
    world.answers[1] = world.takes(0, TEXT + "vllm:num_requests_waiting{ 3\n")
    scraper = world.scraper()
    scraper.scrape()
    assert up(world) == [1]
    assert scraper.counts.broken_lines == 1
