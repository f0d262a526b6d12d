"""The scraper: a process of its own that reads the servers' metrics while a run goes on, and publishes them.

Started by exec, with its configuration as one line of JSON on standard input, through which the API key comes, too: no
process list and no environment shows it. When it has looked at every page it tells how many requests wait at the
servers, and then again each second, in a line of JSON. The next line, or the end of the input when the parent is gone,
ends it: it reads every page once more, publishes what it has, and tells what happened in a last line.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from vllm_locust.clock import WallAxis
from vllm_locust.collect.page_request import request_page
from vllm_locust.collect.scraper import INTERVAL_NS, TIMEOUT_S, Scraper
from vllm_locust.metrics_page import MetricsPage
from vllm_locust.store.redis_url import redis_options
from vllm_locust.store.telemetry import PublisherConfig, TelemetryPublisher, new_source
from vllm_locust.store.telemetry_store import TelemetryStore
from vllm_locust.tls import TlsFiles, tls_context

_JOIN_S: Final = TIMEOUT_S + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ScraperConfig:
    run_id: str
    redis_url: str
    redis_password_file: str | None
    pages: tuple[MetricsPage, ...]
    tls: TlsFiles
    api_key: str | None
    interval_ns: int = INTERVAL_NS

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Self:
        values: dict[str, Any] = json.loads(line)
        values["pages"] = tuple(MetricsPage(**page) for page in values["pages"])
        values["tls"] = TlsFiles(**values["tls"])
        return cls(**values)


def _name(run_id: str) -> str:
    return f"server-metrics-{run_id}"


def is_scraper_of(run_id: str, source: str) -> bool:
    """Other runs publish to the same stream, and may read the same servers."""
    return source.startswith(f"{_name(run_id)}-")


def scrape_until(wait: Callable[[], object], config: ScraperConfig) -> dict[str, Any]:
    """Until ``wait`` returns. What was read of each page, by its address."""
    axis = WallAxis()
    password_file = None if config.redis_password_file is None else Path(config.redis_password_file)
    store = TelemetryStore(redis_options(config.redis_url, password_file))
    publisher = TelemetryPublisher(
        store, PublisherConfig(source=new_source(_name(config.run_id))), unix_ns=axis.unix_ns
    )
    request = functools.partial(request_page, tls=tls_context(config.tls), timeout_s=TIMEOUT_S, api_key=config.api_key)
    scrapers = {
        page.url: Scraper(page, request, publisher, axis, _tell, interval_ns=config.interval_ns)
        for page in config.pages
    }
    ending = threading.Event()
    threads = [threading.Thread(target=one.run, args=(ending,), daemon=True) for one in scrapers.values()]
    threads.append(threading.Thread(target=_tell_waiting, args=(list(scrapers.values()), ending), daemon=True))
    for thread in threads:
        thread.start()
    wait()
    ending.set()
    for thread in threads:
        thread.join(_JOIN_S)
    publisher.close()
    store.close()
    return {url: asdict(one.counts) for url, one in scrapers.items()}


def _tell_waiting(scrapers: Sequence[Scraper], ending: threading.Event) -> None:
    for one in scrapers:
        one.has_looked.wait()
    while True:
        known = [waiting for one in scrapers if (waiting := one.requests_waiting) is not None]
        _say({"requests_waiting": sum(known) if len(known) == len(scrapers) else None})
        if ending.wait(INTERVAL_NS / 1e9):
            return


def _say(words: Mapping[str, object]) -> None:
    """To the parent, which may be gone."""
    with suppress(BrokenPipeError):
        print(json.dumps(words), flush=True)


def _tell(sentence: str) -> None:
    logging.getLogger(__name__).warning("Server metrics: %s", sentence)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    config = ScraperConfig.from_line(sys.stdin.readline())
    _say({"scraped": scrape_until(sys.stdin.readline, config)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
