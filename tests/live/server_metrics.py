"""vLLM's own counters and histograms, as ``/metrics`` shows them, and what a run added to them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from tests.run.simulated import get

SETTLED_S = 0.5
"""The server counts a request when its last token is made, which its client may see first."""

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass(frozen=True)
class Histogram:
    bounds: list[float]
    cumulative: list[float]
    count: float
    sum: float

    def bucket_of_quantile(self, q: float) -> int:
        """Index of the bucket with the value of nearest rank."""
        rank = max(1, math.ceil(q * self.count))
        return next(i for i, reached in enumerate(self.cumulative) if reached >= rank)

    def bucket_of(self, value: float) -> int:
        return next(i for i, bound in enumerate(self.bounds) if value <= bound)


@dataclass
class Added:
    """What the server counted while the block ran; filled when it ends. Sums over engines and all labels not given."""

    samples: Samples = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        wanted = set(labels.items())
        return sum(value for (known, has), value in self.samples.items() if known == name and wanted <= has)

    def histogram(self, name: str) -> Histogram:
        bounds = sorted(
            {float(dict(labels)["le"]) for known, labels in self.samples if known == f"{name}_bucket"},
        )
        cumulative = [
            sum(
                value
                for (known, labels), value in self.samples.items()
                if known == f"{name}_bucket" and float(dict(labels)["le"]) == bound
            )
            for bound in bounds
        ]
        return Histogram(bounds, cumulative, self.total(f"{name}_count"), self.total(f"{name}_sum"))


def read_samples(url: str) -> Samples:
    """Every sample of vLLM's own metrics."""
    text = get(f"{url}/metrics").decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("vllm:")
    }


def settled_samples(url: str, timeout_s: float = 60) -> Samples:
    """The samples, once no request is left in the server and the counters stand still."""
    deadline = time.monotonic() + timeout_s
    before: Samples = {}
    while time.monotonic() < deadline:
        now = read_samples(url)
        busy = Added(now).total("vllm:num_requests_running") + Added(now).total("vllm:num_requests_waiting")
        if busy == 0 and _counts(now) == _counts(before):
            return now
        before = now
        time.sleep(SETTLED_S)
    raise AssertionError(f"{url} did not become idle within {timeout_s} s: is something else using it?")


def _counts(samples: Samples) -> dict[object, float]:
    return {key: value for key, value in samples.items() if key[0].endswith(("_total", "_count", "_sum"))}


@contextmanager
def counting(url: str) -> Iterator[Added]:
    """What the block makes the server count. Nothing else may use the server meanwhile."""
    before = settled_samples(url)
    added = Added()
    yield added
    after = settled_samples(url)
    added.samples = {key: value - before.get(key, 0.0) for key, value in after.items()}
