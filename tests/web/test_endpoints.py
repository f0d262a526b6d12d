"""One run through the web UI of a single process, by HTTP alone: what is told, what may be had, what is refused."""

from __future__ import annotations

import io
import json
import os
import signal
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.run.simulated import FAST, free_port, get, simserver, start_locust, wait_for_web
from tests.store.servers import Server
from vllm_locust.store.redis_url import redis_options
from vllm_locust.store.telemetry import PublisherConfig, TelemetryPublisher, new_source
from vllm_locust.store.telemetry_store import TelemetryStore
from vllm_locust.telemetry import TelemetryKind

pytestmark = pytest.mark.timeout(240)

LOCUSTFILE = str(Path(__file__).parent / "secret_locustfile.py")
KEY, OWN_SECRET = "sk-never-in-a-page", "own-secret-never-in-a-page"
GPU = {"host": "gpu-host", "gpu_index": 3, "gpu_uuid": "GPU-3", "gpu_name": "H200", "utilization": 0.5}


@dataclass
class Site:
    web: str
    directory: Path
    server: str

    def stats(self) -> Any:
        return json.loads(get(f"{self.web}/llm/stats.json"))

    def swarm(self, fields: dict[str, str], **headers: str) -> Any:
        data = urllib.parse.urlencode({"user_count": "4", "spawn_rate": "4"} | fields).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        asked = urllib.request.Request(f"{self.web}/swarm", data=data, headers=named)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.loads(answer.read())

    def await_state(self, state: str, finished: int = 0) -> Any:
        for _ in range(300):
            stats = self.stats()
            if stats["state"] == state and (not finished or stats["totals"]["finished"] >= finished):
                return stats
            time.sleep(0.2)
        raise AssertionError(f"it did not get {state}: {stats}")

    def samples(self) -> dict[str, float]:
        """Of ``/llm/metrics``, as another program reads it."""
        families = text_string_to_metric_families(get(f"{self.web}/llm/metrics").decode())
        return {
            sample.name + "".join(f"|{value}" for value in sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    valkey, port = Server(), free_port()
    with simserver(directory, *FAST, VLLM_API_KEY=KEY) as server:
        flags = ("--web-host", "127.0.0.1", "--web-port", str(port), "--redis-url", valkey.url, "--run-dir", "run")
        more = ("--warmup-requests", "0", "--max-tokens", "20", "--own-secret", OWN_SECRET)
        load = start_locust(directory, server.url, *flags, *more, locustfile=LOCUSTFILE, OPENAI_API_KEY=KEY)
        try:
            wait_for_web(f"http://127.0.0.1:{port}", load)
            yield Site(f"http://127.0.0.1:{port}", directory, server.url)
        finally:
            os.killpg(load.pid, signal.SIGKILL)
            output = load.communicate()[0]
            valkey.close()
    assert "Traceback" not in output, output
    assert OWN_SECRET not in output
    assert KEY not in output


def test_what_cannot_be_started_is_said_in_the_answer(site: Site) -> None:
    for fields, words in (
        ({"rate": "fast"}, "--rate"),
        ({"rate": "5"}, "OpenLoopChatUser"),
        ({"host": "http://127.0.0.1:1"}, "API key goes only to"),
        ({"workload": "/etc/passwd"}, "opens no other file"),
        ({"api_key_file": "/etc/passwd"}, "api_key_file"),
        ({"user_count": "0"}, "number of users"),
    ):
        answer = site.swarm(fields)
        assert answer["success"] is False
        assert words in answer["message"], answer
    assert site.stats()["state"] == "ready"


def test_another_site_starts_and_stops_nothing(site: Site) -> None:
    for name, value in (("Origin", "http://evil.example"), ("Sec_Fetch_Site", "cross-site")):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            site.swarm({}, **{name: value})
    answer = urllib.request.urlopen(
        urllib.request.Request(f"{site.web}/llm/stats.json", headers={"Origin": "http://evil.example"})
    )
    assert "Access-Control-Allow-Origin" not in answer.headers
    assert site.stats()["state"] == "ready"


def test_a_run_is_told_of_alike_everywhere(site: Site) -> None:
    begun = site.swarm({"run_time": "8s", "slo": "ttft<=1s", "own_secret": ""})
    assert begun["success"] is True, begun
    store = TelemetryStore(redis_options(valkey_url(site)))
    publisher = TelemetryPublisher(store, PublisherConfig(source=new_source("gpu-host"), batch_interval_ns=200_000_000))
    site.await_state("running", finished=20)
    for _ in range(15):
        publisher.put(TelemetryKind.GPU, [GPU | {"time_unix_ns": time.time_ns(), "power_w": 123.0}])
        time.sleep(0.2)
    publisher.close()
    store.close()
    running = site.stats()
    assert [(gpu["gpu"], gpu["power_w"], gpu["utilization"]) for gpu in running["gpus"]] == [("gpu-host/3", 123.0, 0.5)]
    assert running["now"]["gpus"] == {"gpu-host/3": [0.5, None, 123.0]}
    assert site.samples()["vllm_locust_gpu_power_w|gpu-host/3"] == 123.0
    assert_a_run_that_goes_on_keeps_its_options(site)
    assert site.swarm({"slo": "ttft<=1s", "own_secret": ""})["success"] is True, (
        "the number of users of a closed loop may be changed"
    )
    over = site.await_state("ready")
    assert over["result"]["run_id"] == over["run"]["run_id"]
    assert over["verdict"] == over["result"]["verdict"], "the final one, which knows more than the live one"
    assert_metrics_are_the_json(site.samples(), over)
    summary = json.loads((site.directory / "run" / "summary.json").read_text(encoding="utf-8"))
    assert over["totals"]["finished"] == summary["totals"]["all_phases"]["requests"] > 20
    assert over["result"]["totals"]["ttft_s"]["p99"] == summary["totals"]["ttft_s"]["p99"]
    assert over["result"]["slo"]["per_request"] == ["ttft<=1s"]
    tabs = json.loads(get(f"{site.web}/stats/requests"))["extended_stats"]
    words = {row["figure"]: row["value"] for row in tabs[1]["data"]}
    assert (words["Phase"], words["Verdict"]) == ("over", over["result"]["verdict"]["status"])
    rows = {row["metric"]: row for row in tabs[0]["data"]}
    assert int(rows["TTFT"]["n"].replace(",", "")) == over["latency"][0]["n"]


def assert_a_run_that_goes_on_keeps_its_options(site: Site) -> None:
    page = site.directory / "page.html"
    for fields in (
        {"html_file": str(page)},
        {"stop_timeout": "x"},
        {"workload": "/etc/passwd"},
        {"run_dir": "elsewhere"},
        {"own_secret": "another"},
    ):
        answer = site.swarm(fields)
        assert answer["success"] is False
        assert next(iter(fields)) in answer["message"], answer
    assert not page.exists()


def valkey_url(site: Site) -> str:
    run = json.loads((site.directory / "run" / "run.json").read_text(encoding="utf-8"))
    return str(run["config"]["redis_url"])


def assert_metrics_are_the_json(samples: dict[str, float], stats: Any) -> None:
    for key, name in (("sent", "requests_sent"), ("output_tokens", "output_tokens"), ("good", "requests_good")):
        assert samples[f"vllm_locust_{name}_total"] == stats["totals"][key]
    assert samples["vllm_locust_requests_finished_total|ok"] == stats["outcomes"]["ok"]
    assert samples["vllm_locust_verdict|" + stats["verdict"]["status"]] == 1
    for row in stats["latency"]:
        name = row["metric"]
        assert samples[f"vllm_locust_{name}_seconds_count"] == row["n"]
        assert samples[f"vllm_locust_{name}_seconds_bucket|+Inf"] == row["n"]
        assert samples[f"vllm_locust_{name}_seconds_sum"] == pytest.approx(row["mean_s"] * row["n"])
        assert samples[f"vllm_locust_latency_quantile_seconds|{name}|0.99"] == row["p99_s"]
        buckets = [value for key, value in samples.items() if key.startswith(f"vllm_locust_{name}_seconds_bucket|")]
        assert buckets == sorted(buckets)
        assert len(set(buckets)) > 1


def test_the_finished_run_can_be_had_and_nothing_else(site: Site) -> None:
    run = site.directory / "run"
    with zipfile.ZipFile(io.BytesIO(get(f"{site.web}/llm/results.zip"))) as archive:
        names = set(archive.namelist())
        assert {"summary.json", "requests.parquet", "report.html", "run.json", "workers.parquet"} <= names
        for name in names:
            assert archive.read(name) == (run / name).read_bytes()
    assert set(site.stats()["result"]["files"]) == names
    with urllib.request.urlopen(f"{site.web}/llm/results/report.html") as answer:
        assert answer.read() == (run / "report.html").read_bytes()
        assert "sandbox" in answer.headers["Content-Security-Policy"]
    for path in (
        "../run/summary.json",
        "..%2f..%2f..%2fetc%2fpasswd",
        "parts",
        "%2fetc%2fpasswd",
        "spool",
        "summary.json%00",
    ):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(f"{site.web}/llm/results/{path}")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{site.web}/llm/assets/..%2fpages.py")


def test_no_page_has_a_secret(site: Site) -> None:
    """The run before has kept the locustfile's secret, although its field came back empty."""
    for path in ("/", "/llm", "/llm/form.json", "/llm/stats.json", "/llm/metrics", "/logs", "/stats/requests"):
        page = get(f"{site.web}{path}").decode()
        assert KEY not in page, path
        assert OWN_SECRET not in page, path
        assert "redis_url" not in page, path
