"""The final figures in the OpenMetrics text format, for a push gateway or a file that a node exporter reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from vllm_locust.comparison.quantity import DISTRIBUTIONS, SCALARS
from vllm_locust.export.headline import STATISTICS, few_samples
from vllm_locust.metrics import CATALOGUE

_generate: Any = generate_latest  # untyped there
PREFIX: Final = "vllm_locust_run_"
_LABELS: Final = ("run_id", "model", "stage")


class _Final(Collector):
    def __init__(self, run: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
        # To Prometheus an empty label is one that is not there.
        self._of = run["run_id"], (run["server"]["model"] or "").encode(errors="replace").decode()
        self._stages = summary["stages"]
        self._valid = float(summary["verdict"]["status"] != "invalid")

    def collect(self) -> Iterable[GaugeMetricFamily]:
        valid = GaugeMetricFamily(f"{PREFIX}valid", "0 where the measurement is invalid", labels=_LABELS[:2])
        valid.add_metric(self._of, self._valid)
        yield valid
        for metric in DISTRIBUTIONS:
            family = GaugeMetricFamily(
                f"{PREFIX}{metric}_seconds", CATALOGUE[metric].formula, labels=(*_LABELS, "statistic")
            )
            for stage in self._stages:
                for name in STATISTICS:
                    if (value := stage[f"{metric}_s"][name]) is not None:
                        family.add_metric((*self._of, stage["name"], name), value)
            yield family
        few = GaugeMetricFamily(
            f"{PREFIX}few_samples",
            "1 for a percentile that too few samples lie beyond: its tail is uncertain by more than a third",
            labels=(*_LABELS, "metric", "statistic"),
        )
        for stage in self._stages:
            for metric, name in few_samples(stage):
                few.add_metric((*self._of, stage["name"], metric, name), 1.0)
        yield few
        for name in SCALARS:
            family = GaugeMetricFamily(f"{PREFIX}{name}", CATALOGUE[name].formula, labels=_LABELS)
            for stage in self._stages:
                if (value := stage[name]) is not None:
                    family.add_metric((*self._of, stage["name"]), value)
            yield family


def openmetrics(run: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """``run.json`` and ``summary.json``; a value that is not known has no line."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Final(run, summary))
    written: bytes = _generate(registry)
    return written.decode("utf-8")
