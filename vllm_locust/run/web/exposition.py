"""``/llm/metrics``: the live figures as Prometheus reads them. Counters begin anew with each run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from vllm_locust.aggregate import RunAggregate
from vllm_locust.live.figures import LATENCIES
from vllm_locust.metrics import CATALOGUE
from vllm_locust.statistics import PERCENTILES
from vllm_locust.verdict.reason import Status

_P: Final = "vllm_locust_"
_BOUNDS_S: Final = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
_COUNTERS: Final = {
    "sent": ("requests_sent", "requests sent, warm-up included"),
    "dropped_arrivals": ("arrivals_dropped", "arrivals that were due while every slot was busy and were never sent"),
    "prompt_tokens": ("prompt_tokens", "prompt tokens of finished requests"),
    "output_tokens": ("output_tokens", "output tokens of finished requests"),
    "chunks": ("chunks", "token-bearing chunks of finished requests"),
    "good": ("requests_good", "requests that met every per-request SLO"),
    "not_good": ("requests_not_good", "requests that did not"),
}
_NOW: Final = {
    "in_flight": "requests in flight",
    "waiting_arrivals": "arrivals that are due and have no free slot",
    "users": "simulated users, or slots",
    "offered_rps": "requests per second that are asked for now",
    "achieved_rps": "requests per second sent in the last 5 s",
    "requests_per_s": "ok requests per second finished in the last 5 s",
    "goodput_rps": "requests per second in the last 5 s that met every per-request SLO",
    "input_tokens_per_s": "prompt tokens per second of requests finished in the last 5 s",
    "output_tokens_per_s": "output tokens per second of requests finished in the last 5 s",
    "server_requests_running": "requests running, by the servers' own metrics",
    "server_requests_waiting": "requests waiting, by the servers' own metrics",
    "server_kv_cache_usage": "share of the KV cache in use, of the fullest server",
}
_WORKER: Final = {
    "cpu_fraction": "of a core, in the worker's last second",
    "loop_lag_s": "how late the worker's loop was in its last second, at most",
    "in_flight": "requests in flight at this worker",
    "rss_bytes": "resident memory of the worker",
    "spooled_batches": "batches of records that wait on the worker's disk",
}
_GPU: Final = {
    "utilization": "share of time in which a kernel ran",
    "memory_used_bytes": "memory in use",
    "memory_total_bytes": "memory there is",
    "power_w": "power in watts",
    "temperature_c": "temperature in degrees Celsius",
}


def exposition(stats: Mapping[str, Any], merged: RunAggregate | None) -> bytes:
    """``stats`` as ``LiveRun.stats`` gives them, ``merged`` what they were made from."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(stats, merged))
    return generate_latest(registry)


class _Figures(Collector):
    def __init__(self, stats: Mapping[str, Any], merged: RunAggregate | None) -> None:
        self._stats, self._merged = stats, merged

    def collect(self) -> Iterator[Metric]:
        stats, merged = self._stats, self._merged
        yield _states(f"{_P}state", "what the generator does", stats["state"], _STATES)
        if stats["run"] is None or merged is None:
            return
        run = {name: str(stats["run"][name]) for name in ("run_id", "model", "workload", "open_loop")}
        yield InfoMetricFamily(f"{_P}run", "the run that these figures are of", run | {"version": stats["version"]})
        yield from _counters(stats)
        for name, text in _NOW.items():
            yield from _gauge(f"{_P}{_in_words(name)}", text, stats["now"].get(name))
        yield from _latencies(merged, stats["latency"])
        yield _states(
            f"{_P}verdict",
            "the verdict so far, and once the run is over the final one",
            stats["verdict"]["status"],
            tuple(Status),
        )
        yield from _table("worker", _WORKER, stats["workers"], "worker_id")
        yield from _table("gpu", _GPU, stats["gpus"], "gpu")


_STATES: Final = ("ready", "preparing", "running", "finishing")


def _in_words(name: str) -> str:
    name = name.replace("achieved_rps", "achieved_requests_per_second").replace("_rps", "_requests_per_second")
    return name.replace("_per_s", "_per_second") if name.endswith("_per_s") else name


def _states(name: str, text: str, now: str | None, states: tuple[str, ...]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["status"])
    for state in states:
        family.add_metric([str(state)], float(state == now))
    return family


def _counters(stats: Mapping[str, Any]) -> Iterator[Metric]:
    for key, (name, text) in _COUNTERS.items():
        yield CounterMetricFamily(f"{_P}{name}", text, stats["totals"][key])
    family = CounterMetricFamily(f"{_P}requests_finished", "requests that have ended, by outcome", labels=["outcome"])
    for outcome, count in stats["outcomes"].items():
        family.add_metric([outcome], count)
    yield family


def _gauge(name: str, text: str, value: float | None) -> Iterator[Metric]:
    if value is not None:
        yield GaugeMetricFamily(name, text, value)


def _latencies(merged: RunAggregate, table: list[dict[str, Any]]) -> Iterator[Metric]:
    for name in LATENCIES:
        histogram = merged.histograms[name]
        n = histogram.n
        family = HistogramMetricFamily(f"{_P}{name}_seconds", f"{CATALOGUE[name].title}: {CATALOGUE[name].formula}")
        below = [(str(bound), float(n - histogram.above(bound * 1e9))) for bound in _BOUNDS_S]
        family.add_metric([], [*below, ("+Inf", float(n))], sum_value=histogram.sum_ns / 1e9)
        yield family
    quantiles = GaugeMetricFamily(
        f"{_P}latency_quantile_seconds", "percentiles since the beginning, within 0.5 %", labels=["metric", "quantile"]
    )
    for row in table:
        for label, q in PERCENTILES.items():
            quantiles.add_metric([row["metric"], str(float(q))], row[f"{label}_s"])
    yield quantiles


def _table(prefix: str, columns: Mapping[str, str], rows: list[dict[str, Any]], label: str) -> Iterator[Metric]:
    for column, text in columns.items():
        name = f"{column.removesuffix('_s')}_seconds" if column.endswith("_s") else column
        family = GaugeMetricFamily(f"{_P}{prefix}_{name}", text, labels=[prefix])
        for row in rows:
            if row[column] is not None:
                family.add_metric([row[label]], row[column])
        yield family
