"""The process that reads the servers' metrics, without a run around it: how it is started, ends and dies."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.load.scripted_server import End, ScriptedServer, serving, whole
from vllm_locust.config import RunConfig
from vllm_locust.errors import TargetError
from vllm_locust.metrics_page import MetricsPage
from vllm_locust.run.telemetry.server_metrics import ScraperProcess, find_pages, start_scraper
from vllm_locust.run.telemetry.server_scraper import ScraperConfig, is_scraper_of
from vllm_locust.store.embedded import EmbeddedValkey, start_embedded
from vllm_locust.store.redis_url import redis_options
from vllm_locust.store.telemetry_schema import decode_telemetry
from vllm_locust.store.telemetry_store import TelemetryStore
from vllm_locust.tls import TlsFiles

pytestmark = pytest.mark.timeout(60)

PAGE = whole(b'vllm:num_requests_waiting{engine="0"} 3\nvllm:num_requests_waiting{engine="1"} 4\n')
SECRET = whole(b"no", b"401 Unauthorized")


@pytest.fixture(scope="module")
def valkey() -> Iterator[EmbeddedValkey]:
    started = start_embedded()
    yield started
    started.stop()


def url(server: ScriptedServer, path: str = "") -> str:
    return f"http://127.0.0.1:{server.listener.getsockname()[1]}{path}"


def config(valkey: EmbeddedValkey, *urls: str, run_id: str = "r", api_key: str | None = None) -> ScraperConfig:
    return ScraperConfig(
        run_id=run_id,
        redis_url=valkey.url,
        redis_password_file=None,
        pages=tuple(MetricsPage.parse(one) for one in urls),
        tls=TlsFiles(),
        api_key=api_key,
        interval_ns=50_000_000,
    )


def published(valkey: EmbeddedValkey, run_id: str) -> list[dict[str, object]]:
    store = TelemetryStore(redis_options(valkey.url))
    batches = [decode_telemetry(entry.payload or b"") for entry in store.read_telemetry({"server": "0-0"}, count=1000)]
    store.close()
    mine = [batch for batch in batches if is_scraper_of(run_id, batch.header.source)]
    return [row for batch in mine for row in batch.rows.to_pylist()]


def test_from_the_first_look_to_the_last(valkey: EmbeddedValkey) -> None:
    with serving({"GET": (PAGE, End.CLOSE)}) as server:
        scraper = start_scraper(config(valkey, url(server)))
        scraper.await_first_look()
        assert scraper.requests_waiting == 7
        before = len(server.requests)
        assert before >= 1
        scraped = scraper.finish()
        assert scraped is not None
        (counts,) = scraped.values()
        assert counts["pages"] == len(server.requests) > before, "it looks once more at the end"
    rows = published(valkey, "r")
    assert sum(row["metric"] == "up" for row in rows) == counts["pages"]
    assert [row["target"] for row in rows] == [next(iter(scraped)).removesuffix("/metrics")] * len(rows)
    assert scraper.requests_waiting is None, "nobody looks any more"


def test_of_several_servers_all_must_tell_how_many_wait(valkey: EmbeddedValkey) -> None:
    gone = "http://127.0.0.1:9"
    with serving({"GET": (PAGE, End.CLOSE)}) as one, serving({"GET": (PAGE, End.CLOSE)}) as two:
        for urls, waiting in (((url(one), url(two)), 14), ((url(one), gone), None)):
            scraper = start_scraper(config(valkey, *urls))
            scraper.await_first_look()
            assert scraper.requests_waiting == waiting
            scraper.finish()


def test_a_scraper_that_dies_is_told_and_ends_no_run(valkey: EmbeddedValkey, caplog: pytest.LogCaptureFixture) -> None:
    with serving({"GET": (PAGE, End.CLOSE)}) as server:
        scraper = start_scraper(config(valkey, url(server)))
        scraper.await_first_look()
        os.kill(pid(scraper), signal.SIGKILL)
        with caplog.at_level(logging.WARNING):
            assert scraper.finish() is None
    assert "ended before its time" in caplog.text


def pid(scraper: ScraperProcess) -> int:
    return scraper._process.pid


def test_it_ends_with_its_parent(valkey: EmbeddedValkey) -> None:
    """Whose end of the pipe closes, whatever became of it."""
    with serving({"GET": (PAGE, End.CLOSE)}) as server:
        orphan = subprocess.Popen(
            [sys.executable, "-m", "vllm_locust.run.telemetry.server_scraper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        output, _ = orphan.communicate(config(valkey, url(server), run_id="orphan").to_line() + "\n", timeout=30)
    assert orphan.returncode == 0
    assert json.loads(output.splitlines()[-1])["scraped"]
    assert published(valkey, "orphan"), "what it had was published"


def test_the_key_is_in_no_process_list(valkey: EmbeddedValkey) -> None:
    with serving({"GET#1": (SECRET, End.CLOSE), "GET": (PAGE, End.CLOSE)}) as server:
        scraper = start_scraper(config(valkey, url(server), api_key="sk-very-secret"))
        scraper.await_first_look()
        process = Path(f"/proc/{pid(scraper)}")
        assert b"sk-very" not in (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        scraper.finish()
        assert b"Authorization: Bearer sk-very-secret" in server.requests[1].head
        assert not any(b"sk-very" in request.head for request in server.requests[2:])


def test_runs_are_told_apart() -> None:
    assert is_scraper_of("20261201-a", "server-metrics-20261201-a-77-abcd")
    assert not is_scraper_of("20261201-a", "server-metrics-20261201-ab-77-abcd")
    assert not is_scraper_of("20261201-a", "gpu-host-77-abcd")


# Where the pages are


def run_config(host: str, *urls: str) -> RunConfig:
    return RunConfig.from_options({"metrics_url": list(urls)}, host=host, run_time_s=None)


def test_pages_are_looked_for_beside_the_targets(caplog: pytest.LogCaptureFixture) -> None:
    with serving({"GET": (PAGE, End.CLOSE)}) as server:
        (page,) = find_pages(run_config(url(server, "/v1")), None)
        assert page.url == url(server, "/metrics")
        assert server.requests[0].head.startswith(b"GET /metrics ")
        assert find_pages(run_config(url(server), "none"), None) == ()
    with serving({"GET": (whole(b"", b"404 Not Found"), End.CLOSE)}) as server, caplog.at_level(logging.INFO):
        assert find_pages(run_config(url(server)), None) == ()
        assert f"No server metrics are read at {url(server)}/metrics: it answered 404" in caplog.text


def test_pages_that_were_asked_for_must_answer() -> None:
    with serving({"GET": (PAGE, End.CLOSE)}) as server:
        asked = url(server, "/a/metrics"), url(server, "/b/metrics")
        assert [page.url for page in find_pages(run_config("http://127.0.0.1:9", *asked), None)] == list(asked)
        with pytest.raises(TargetError) as caught:
            find_pages(run_config(url(server), asked[0], "http://127.0.0.1:9/metrics"), None)
    assert caught.value.problems == (
        "--metrics-url http://127.0.0.1:9/metrics: Connection refused; give the address of the server's page of "
        "metrics, or none",
    )
