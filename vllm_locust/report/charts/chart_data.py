"""Everything that the pictures of ``report.html`` draw, as JSON of a bounded size: percentiles that were measured, in
bins, whatever the number of requests and tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm_locust.report.charts.bins import TimeBins
from vllm_locust.report.charts.curves import load_curve, percentile_curves
from vllm_locust.report.charts.request_charts import RequestCharts
from vllm_locust.report.charts.telemetry_charts import generator_json, gpus_json, server_json
from vllm_locust.report.columns import Source
from vllm_locust.report.run_facts import Interval
from vllm_locust.report.summary import Measured

Json = Mapping[str, Any]


def chart_data(measured: Measured, requests: Source, workers: Source | None) -> dict[str, Any] | None:
    """All columns over time have ``time.count`` values. None without a window or without requests."""
    reading, summary = measured.reading, measured.summary
    window, extent = reading.facts.window, reading.times.extent
    if window is None or extent is None:
        return None
    bins = TimeBins.over(
        min(extent.start_unix_ns, window.start_unix_ns),
        max(extent.end_unix_ns, window.end_unix_ns),
        window.start_unix_ns,
    )
    pictures = RequestCharts(requests, bins, "itl" if reading.total.gaps["itl"].n else "chunk_gap")
    return {
        "time": {
            "start_s": (bins.start_unix_ns - window.start_unix_ns) / 1e9,
            "step_s": bins.step_ns / 1e9,
            "count": bins.count,
        },
        "spans": list(_spans(window, bins, summary["stages"])),
        "load": pictures.load_json(reading.times),
        "latency": pictures.latency_json(),
        "gap_map": pictures.gap_map_json(),
        "lengths": pictures.lengths_json(),
        "failures": pictures.failures_json(),
        "server": server_json(measured.telemetry.servers, bins),
        "gpus": gpus_json(measured.telemetry.gpus.series, bins),
        "generator": generator_json(workers, bins),
        "percentiles": percentile_curves(summary["stages"], reading.stages),
        "load_curve": load_curve(summary),
    }


def _spans(window: Interval, bins: TimeBins, stages: list[Json]) -> Iterator[dict[str, Any]]:
    """Warm-up, stages and drain, in seconds after the start of the window."""
    first, last = bins.start_unix_ns, bins.start_unix_ns + bins.step_ns * bins.count
    parts = [("warmup", "warm-up", first, window.start_unix_ns)]
    parts += [(s["stage_kind"], s["name"], s["start_unix_ns"], s["end_unix_ns"]) for s in stages]
    parts += [("drain", "drain", window.end_unix_ns, last)]
    for kind, name, start, end in parts:
        if end > start:
            at_s = [(edge - window.start_unix_ns) / 1e9 for edge in (start, end)]
            yield {"kind": kind, "name": name, "from_s": at_s[0], "to_s": at_s[1]}
