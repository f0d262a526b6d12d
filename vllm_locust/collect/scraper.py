"""Reads the metrics of one server again and again at fixed deadlines, and turns each page into rows of
``server.parquet``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from vllm_locust import clock
from vllm_locust.collect.families import PageReadings, read_page
from vllm_locust.collect.page_request import Page, PageFailed
from vllm_locust.metrics_page import MetricsPage
from vllm_locust.server_series import SCRAPE_DURATION, UP
from vllm_locust.telemetry import Row, TelemetryKind, TelemetrySink

INTERVAL_NS: Final = 1_000_000_000
TIMEOUT_S: Final = 5.0
"""A server under load answers late: its page comes out of the same loop as the tokens. No further attempt is made
meanwhile."""

RequestPage = Callable[[MetricsPage], Page]


def rows_of_page(page: MetricsPage, readings: PageReadings, answer: Page, offset_ns: int) -> list[Row]:
    """``offset_ns`` puts a monotonic time on the wall. The server read its numbers somewhere between being asked and
    having answered, so their time is the middle of that, uncertain by half of ``scrape_duration_seconds``.
    """
    time_unix_ns = (answer.began_ns + answer.ended_ns) // 2 + offset_ns
    duration_s = (answer.ended_ns - answer.began_ns) / 1e9
    common = {"time_unix_ns": time_unix_ns, "target": page.target}
    return [
        common | {"engine": None, "metric": UP, "value": 1.0},
        common | {"engine": None, "metric": SCRAPE_DURATION, "value": duration_s},
        *(common | {"engine": one.engine, "metric": one.metric, "value": one.value} for one in readings.readings),
    ]


@dataclass(slots=True)
class ScraperCounts:
    """What happened, for the log."""

    pages: int = 0
    failures: int = 0
    missed_ticks: int = 0
    broken_lines: int = 0


class Scraper:
    """One page. ``run`` is the whole life of a thread."""

    def __init__(
        self,
        page: MetricsPage,
        request: RequestPage,
        sink: TelemetrySink,
        axis: clock.WallAxis,
        tell: Callable[[str], None],
        *,
        interval_ns: int = INTERVAL_NS,
    ) -> None:
        """``tell`` gets a sentence when the page is gone, changes its fault, or is back."""
        self._page = page
        self._request = request
        self._sink = sink
        self._axis = axis
        self._tell = tell
        self._interval_ns = interval_ns
        self._fault: str | None = None
        self.counts = ScraperCounts()
        self.has_looked = threading.Event()
        self.requests_waiting: float | None = None
        """On the newest page; None while there is none, or where it does not say."""

    def run(self, ending: threading.Event) -> None:
        """Until ``ending`` is set, and once more after it: the last page tells what the whole run came to."""
        due_ns = clock.monotonic_ns()
        while not ending.wait(max(0, due_ns - clock.monotonic_ns()) / 1e9):
            self.scrape()
            late = max(0, clock.monotonic_ns() - due_ns) // self._interval_ns
            self.counts.missed_ticks += late
            due_ns += (late + 1) * self._interval_ns
        self.scrape()

    def scrape(self) -> None:
        self._scrape()
        self.has_looked.set()

    def _scrape(self) -> None:
        began_ns = clock.monotonic_ns()
        try:
            answer = self._request(self._page)
        except PageFailed as failure:
            self._failed(str(failure), began_ns)
            return
        readings = read_page(answer.text)
        if not readings.of_a_server:
            self._failed("it tells nothing of a server that this version knows", began_ns)
            return
        self.counts.pages += 1
        self.counts.broken_lines += readings.broken_lines
        self.requests_waiting = readings.requests_waiting
        self._put(rows_of_page(self._page, readings, answer, self._axis.offset_ns))
        if self._fault is not None:
            self._tell(f"{self._page.url} is back")
            self._fault = None

    def _failed(self, fault: str, began_ns: int) -> None:
        self.counts.failures += 1
        self.requests_waiting = None
        self._put(
            [
                {
                    "time_unix_ns": (began_ns + clock.monotonic_ns()) // 2 + self._axis.offset_ns,
                    "target": self._page.target,
                    "metric": UP,
                    "value": 0.0,
                }
            ]
        )
        if fault != self._fault:
            self._tell(f"{self._page.url}: {fault}")
            self._fault = fault

    def _put(self, rows: Sequence[Row]) -> None:
        self._sink.put(TelemetryKind.SERVER, rows)
