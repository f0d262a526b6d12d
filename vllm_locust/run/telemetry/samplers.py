"""The processes that sample beside a run: the scraper of the servers' metrics, and the collector of ``--collect``."""

from __future__ import annotations

from typing import Any

import gevent

from vllm_locust.run.run_description import Checked
from vllm_locust.run.telemetry.own_collector import OwnCollector, OwnCollectorConfig
from vllm_locust.run.telemetry.server_metrics import ScraperProcess, start_scraper
from vllm_locust.run.telemetry.server_scraper import ScraperConfig


class Samplers:
    """Of one run. ``end`` must follow ``start``, whatever has come of it."""

    def __init__(self, checked: Checked, run_id: str) -> None:
        self._checked = checked
        self._run_id = run_id
        self._scraper: ScraperProcess | None = None
        self._collector: OwnCollector | None = None
        self.pages_scraped: dict[str, Any] | None = None
        """What the scraper says of each page at its end; None where there is none."""

    @property
    def requests_waiting(self) -> float | None:
        """At all servers together, by their own metrics; None where they do not tell."""
        return None if self._scraper is None else self._scraper.requests_waiting

    def start(self, redis_url: str) -> None:
        """Those that the run asks for. Raises ``UsageError`` where there is nothing to sample."""
        pages, secrets, config = self._checked.metrics_pages, self._checked.secrets, self._checked.config
        password_file = None if secrets.redis_password_file is None else str(secrets.redis_password_file)
        if pages:
            self._scraper = start_scraper(
                ScraperConfig(
                    run_id=self._run_id,
                    redis_url=redis_url,
                    redis_password_file=password_file,
                    pages=pages,
                    tls=config.tls,
                    api_key=secrets.api_key,
                ),
                spawn=gevent.spawn,
            )
        if config.collect != "none":
            self._collector = OwnCollector(
                OwnCollectorConfig(what=config.collect, redis_url=redis_url, redis_password_file=password_file)
            )

    def await_first_look(self) -> None:
        if self._scraper is not None:
            self._scraper.await_first_look()

    def end_scraper(self) -> None:
        """When the load is over; the collector goes on."""
        if self._scraper is not None:
            self.pages_scraped = self._scraper.finish()
            self._scraper = None

    def end(self) -> None:
        if self._scraper is not None:
            self._scraper.kill()
            self._scraper = None
        if self._collector is not None:
            self._collector.end()
            self._collector = None
