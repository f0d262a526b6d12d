from __future__ import annotations

from typing import Any

from vllm_locust.live.telemetry import STALE_NS, GpusNow, ServersNow

A, B = "http://a", "http://b"


def row(target: str, metric: str, value: float, engine: str | None = "0") -> dict[str, Any]:
    return {"target": target, "metric": metric, "value": value, "engine": engine}


def test_servers_add_up_and_of_a_share_the_largest_counts() -> None:
    now = ServersNow([A, B])
    now.take(0, [row(A, "requests_running", 3), row(A, "requests_running", 2, "1"), row(A, "kv_cache_usage", 0.2)])
    now.take(
        0, [row(B, "requests_running", 5), row(B, "kv_cache_usage", 0.7), row("http://other", "requests_running", 9)]
    )
    assert now.figures(0) == {
        "server_requests_running": 10,
        "server_requests_waiting": None,
        "server_kv_cache_usage": 0.7,
    }


def test_what_a_server_said_before_it_went_away_is_no_longer_told() -> None:
    now = ServersNow([A, B])
    now.take(0, [row(A, "requests_running", 3), row(B, "requests_running", 4)])
    now.take(1, [row(A, "up", 0.0, None)])
    assert now.figures(1)["server_requests_running"] == 4
    assert now.figures(STALE_NS + 1)["server_requests_running"] is None


def test_gpus_are_told_apart_by_host_index_and_instance() -> None:
    now = GpusNow()
    for host, index, mig, watts in (("h", 1, None, 300.0), ("h", 0, None, 100.0), ("g", 0, 2, None)):
        now.take(0, [{"host": host, "gpu_index": index, "mig_instance": mig, "power_w": watts, "gpu_name": "H200"}])
    now.take(1, [{"host": "h", "gpu_index": 0, "mig_instance": None, "power_w": 150.0, "gpu_name": "H200"}])
    table = now.table(1)
    assert [(gpu["gpu"], gpu["power_w"]) for gpu in table] == [("g/0.2", None), ("h/0", 150.0), ("h/1", 300.0)]
    assert [gpu["gpu"] for gpu in now.table(STALE_NS + 1)] == ["h/0"]
