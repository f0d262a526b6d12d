"""The servers' own metrics from the master's side: where they are, and the process that reads them."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from vllm_locust.collect.families import read_page
from vllm_locust.collect.page_request import PageFailed, request_page
from vllm_locust.collect.scraper import TIMEOUT_S
from vllm_locust.config import RunConfig, Target
from vllm_locust.errors import TargetError
from vllm_locust.metrics_page import USUAL_PATH, MetricsPage
from vllm_locust.run.telemetry.server_scraper import ScraperConfig
from vllm_locust.store.child_process import send_line, start_module
from vllm_locust.store.shipper import start_thread
from vllm_locust.tls import tls_context

logger = logging.getLogger(__name__)

_MODULE: Final = "vllm_locust.run.telemetry.server_scraper"
_FIRST_LOOK_S: Final = 4 * TIMEOUT_S
_FINISH_S: Final = 4 * TIMEOUT_S


def find_pages(config: RunConfig, api_key: str | None) -> tuple[MetricsPage, ...]:
    """The pages that answer now. Those that ``--metrics-url`` names must: else ``TargetError``. Where it names none, a
    target without a page is told in the log.
    """
    named = config.metrics_pages
    pages = named if named is not None else tuple(dict.fromkeys(map(page_of_target, config.targets)))
    faults = {page: fault for page in pages if (fault := page_fault(page, config, api_key)) is not None}
    if named is not None and faults:
        raise TargetError(
            *(
                f"--metrics-url {page.url}: {fault}; give the address of the server's page of metrics, or none"
                for page, fault in faults.items()
            )
        )
    for page, fault in faults.items():
        logger.info("No server metrics are read at %s: %s (--metrics-url names another address)", page.url, fault)
    return tuple(page for page in pages if page not in faults)


def page_of_target(target: Target) -> MetricsPage:
    return MetricsPage(
        scheme=target.scheme,
        host=target.host,
        port=target.port,
        path=f"{target.prefix}{USUAL_PATH}",
        socket_path=target.socket_path,
    )


def page_fault(page: MetricsPage, config: RunConfig, api_key: str | None) -> str | None:
    """Why this page tells nothing of a server; None where it does."""
    try:
        answer = request_page(page, tls=tls_context(config.tls), timeout_s=TIMEOUT_S, api_key=api_key)
    except PageFailed as failure:
        return str(failure)
    return None if read_page(answer.text).of_a_server else "it tells nothing of a server that this version knows"


class ScraperProcess:
    """Use ``start_scraper``."""

    def __init__(self, config: ScraperConfig) -> None:
        self._process = start_module(_MODULE, config.to_line())
        self._over = threading.Event()
        self._has_looked = threading.Event()
        self._scraped: dict[str, Any] | None = None
        self.requests_waiting: float | None = None
        """At all servers together, as of about a second ago; None where one of them does not tell."""

    def listen(self) -> None:
        """Until the process has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # One that died in the middle of a line leaves half of it.
            if line.endswith(b"\n"):
                words = json.loads(line)
                self.requests_waiting = words.get("requests_waiting")
                self._scraped = words.get("scraped")
            self._has_looked.set()
        self.requests_waiting = None
        self._has_looked.set()
        self._over.set()

    def await_first_look(self) -> None:
        """Until every page has been read, or tried: what counts from then on is in the run's tables."""
        self._has_looked.wait(_FIRST_LOOK_S)

    def finish(self) -> dict[str, Any] | None:
        """Read every page once more and end. What was read of each page; None where the process does not say."""
        send_line(self._process, "finish")
        self._over.wait(_FINISH_S)
        self.kill()
        if self._scraped is None:
            logger.warning("The process that reads the servers' metrics ended before its time")
        return self._scraped

    def kill(self) -> None:
        self._process.kill()
        self._over.wait()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            # What could not be written to a dead process is in the way once more.
            with suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()


def start_scraper(
    config: ScraperConfig, *, spawn: Callable[[Callable[[], None]], object] = start_thread
) -> ScraperProcess:
    """Start the scraper and what listens to it, which in a gevent process is a greenlet."""
    scraper = ScraperProcess(config)
    spawn(scraper.listen)
    return scraper
