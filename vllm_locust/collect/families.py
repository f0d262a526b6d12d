"""Which of a server's metrics become which of ours: one table for all servers and all their releases.

Every name below was read in the server's own source or on a page that a server wrote; ``since`` and ``until`` are the
releases in which it is told by default, as far as they are known. vLLM keeps a renamed metric for two releases beside
its new name, so of the names of a family the first that a page has is taken, and never two of them.

vLLM: 0.24 and 0.32 are known from real pages. ``gpu_cache_usage_perc`` and the ``gpu_prefix_cache_*`` counters were
deprecated in 0.9, still told in 0.10, hidden in 0.11 and removed in 0.12 (vllm-project/vllm pull requests 18354 and
29330); ``time_per_output_token_seconds`` was deprecated in 0.11, hidden in 0.12 and removed after it (24110, 32661).
0.6 and 0.7 have no counters of the prefix cache with their old engine, only a rate since the start, which cannot be
cut to a stage. The times of a request's phases came within 0.6 (4464, 9659); which patch release has them first is not
known, and does not matter here.

SGLang counts tokens when a request ends, TGI when it begins (prompt) or ends (answer): their rates come in steps.
TensorRT-LLM tells all this at ``/prometheus/metrics``, its first release with it without a prefix, as NVIDIA's NIM
does; at ``/metrics`` it has JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from vllm_locust.collect.metrics_text import Sample, read_samples
from vllm_locust.server_series import PROCESS_START, labelled


class FamilyKind(StrEnum):
    """How what a page tells of one engine in several series becomes one number."""

    COUNT = "count"
    """A gauge of requests: series are added up."""
    SHARE = "share"
    """A gauge between 0 and 1: the largest counts."""
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    """Of seconds; its buckets, sum and count are counters."""


@dataclass(frozen=True, slots=True)
class Name:
    """A server's name for a family. Of a counter it is the whole name of its samples, of a histogram without suffix."""

    name: str
    server: str
    since: str | None = None
    until: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    metric: str
    """Our name. A histogram's series have the suffixes ``_bucket``, ``_sum`` and ``_count``."""
    kind: FamilyKind
    names: tuple[Name, ...]
    """The first that a page has is taken."""
    label: str | None = None
    """The label by whose values it is told apart."""


def _vllm(name: str, since: str | None = None, until: str | None = None) -> Name:
    return Name(f"vllm:{name}", "vLLM", since, until)


def _sglang(name: str) -> Name:
    return Name(f"sglang:{name}", "SGLang")


def _tgi(name: str) -> Name:
    return Name(f"tgi_{name}", "TGI")


def _trtllm(name: str) -> Name:
    return Name(f"trtllm_{name}", "TensorRT-LLM")


def _llamacpp(name: str) -> Name:
    return Name(f"llamacpp:{name}", "llama.cpp")


def _unprefixed(name: str, server: str = "NIM") -> Name:
    return Name(name, server)


_FIRST_TRTLLM: Final = "TensorRT-LLM 1.1, NIM"

FAMILIES: Final = (
    Family(
        "requests_running",
        FamilyKind.COUNT,
        (
            _vllm("num_requests_running", "0.6"),
            _sglang("num_running_reqs"),
            _tgi("batch_current_size"),
            _trtllm("num_requests_running"),
            _llamacpp("requests_processing"),
            _unprefixed("num_requests_running"),
        ),
    ),
    Family(
        "requests_waiting",
        FamilyKind.COUNT,
        (
            _vllm("num_requests_waiting", "0.6"),
            _sglang("num_queue_reqs"),
            _tgi("queue_size"),
            _trtllm("num_requests_waiting"),
            _llamacpp("requests_deferred"),
            _unprefixed("num_requests_waiting"),
        ),
    ),
    Family(
        "kv_cache_usage",
        FamilyKind.SHARE,
        (
            _vllm("kv_cache_usage_perc", "0.10"),
            _vllm("gpu_cache_usage_perc", "0.6", "0.10"),
            _sglang("token_usage"),
            _trtllm("kv_cache_utilization"),
            Name("llamacpp:kv_cache_usage_ratio", "llama.cpp", until="2025"),
            _unprefixed("gpu_cache_usage_perc"),
        ),
    ),
    Family(
        "prompt_tokens_total",
        FamilyKind.COUNTER,
        (
            _vllm("prompt_tokens_total", "0.6"),
            _sglang("prompt_tokens_total"),
            _tgi("request_input_length_sum"),
            _trtllm("prompt_tokens_total"),
            _llamacpp("prompt_tokens_total"),
            _unprefixed("prompt_tokens_total"),
        ),
    ),
    Family(
        "generation_tokens_total",
        FamilyKind.COUNTER,
        (
            _vllm("generation_tokens_total", "0.6"),
            _sglang("generation_tokens_total"),
            _tgi("request_generated_tokens_sum"),
            _trtllm("generation_tokens_total"),
            _llamacpp("tokens_predicted_total"),
            _unprefixed("generation_tokens_total"),
        ),
    ),
    Family(
        "prefix_cache_queries_total",
        FamilyKind.COUNTER,
        (
            _vllm("prefix_cache_queries_total", "0.10"),
            _vllm("gpu_prefix_cache_queries_total", "0.8", "0.10"),
            _sglang("prompt_tokens_total"),
        ),
    ),
    Family(
        "prefix_cache_hits_total",
        FamilyKind.COUNTER,
        (
            _vllm("prefix_cache_hits_total", "0.10"),
            _vllm("gpu_prefix_cache_hits_total", "0.8", "0.10"),
            _sglang("cached_tokens_total"),
        ),
    ),
    Family(
        "preemptions_total",
        FamilyKind.COUNTER,
        (_vllm("num_preemptions_total", "0.6"), _sglang("num_retracted_requests_total")),
    ),
    Family(
        "request_success_total",
        FamilyKind.COUNTER,
        (
            _vllm("request_success_total", "0.6"),
            _sglang("num_requests_total"),
            _tgi("request_success"),
            _trtllm("request_success_total"),
            _unprefixed("request_success_total", _FIRST_TRTLLM),
        ),
        label="finished_reason",
    ),
    Family(
        "queue_seconds",
        FamilyKind.HISTOGRAM,
        (
            _vllm("request_queue_time_seconds", "0.6"),
            _sglang("queue_time_seconds"),
            _tgi("request_queue_duration"),
            _trtllm("request_queue_time_seconds"),
            _unprefixed("request_queue_time_seconds", _FIRST_TRTLLM),
        ),
    ),
    Family(
        "prefill_seconds",
        FamilyKind.HISTOGRAM,
        (_vllm("request_prefill_time_seconds", "0.6"), _trtllm("request_prefill_time_seconds")),
    ),
    Family(
        "decode_seconds",
        FamilyKind.HISTOGRAM,
        (_vllm("request_decode_time_seconds", "0.6"), _trtllm("request_decode_time_seconds")),
    ),
    Family(
        "ttft_seconds",
        FamilyKind.HISTOGRAM,
        (
            _vllm("time_to_first_token_seconds", "0.6"),
            _sglang("time_to_first_token_seconds"),
            _trtllm("time_to_first_token_seconds"),
            _unprefixed("time_to_first_token_seconds", _FIRST_TRTLLM),
        ),
    ),
    Family(
        "itl_seconds",
        FamilyKind.HISTOGRAM,
        (
            _vllm("inter_token_latency_seconds", "0.11"),
            _vllm("time_per_output_token_seconds", "0.6", "0.11"),
            _sglang("inter_token_latency_seconds"),
        ),
    ),
    Family(
        "e2e_seconds",
        FamilyKind.HISTOGRAM,
        (
            _vllm("e2e_request_latency_seconds", "0.6"),
            _sglang("e2e_request_latency_seconds"),
            _tgi("request_duration"),
            _trtllm("e2e_request_latency_seconds"),
            _unprefixed("e2e_request_latency_seconds", _FIRST_TRTLLM),
        ),
    ),
)

_ENGINE_LABELS: Final = ("engine", "dp_rank")
_SAME_THING_LABELS: Final = frozenset({"pid", "tp_rank", "pp_rank", "moe_ep_rank"})
"""Several processes that tell of one engine: ranks of it, or front ends before it. Their gauges repeat each other."""
ONLY_ENGINE: Final = "0"
_SUFFIXES: Final = ("_bucket", "_sum", "_count")


def _sample_names(family: Family, name: Name) -> tuple[str, ...]:
    suffixes = _SUFFIXES if family.kind is FamilyKind.HISTOGRAM else ("",)
    return tuple(name.name + suffix for suffix in suffixes)


_WANTED: Final = frozenset(
    {PROCESS_START}.union(*(_sample_names(family, name) for family in FAMILIES for name in family.names))
)


@dataclass(frozen=True, slots=True)
class Reading:
    engine: str | None
    """None: of the page as a whole."""
    metric: str
    """With its label, where the family has one: ``request_success_total{finished_reason="stop"}``."""
    value: float


@dataclass(frozen=True, slots=True)
class PageReadings:
    readings: list[Reading]
    broken_lines: int

    @property
    def of_a_server(self) -> bool:
        """Whether the page is that of a server in the table, and not of anything else that tells metrics."""
        return any(reading.engine is not None for reading in self.readings)

    @property
    def requests_waiting(self) -> float | None:
        """Over all engines; None where the page does not say."""
        waiting = [reading.value for reading in self.readings if reading.metric == "requests_waiting"]
        return sum(waiting) if waiting else None


def read_page(text: str) -> PageReadings:
    """What a page tells, in our names."""
    samples = read_samples(text, _WANTED)
    by_name: dict[str, list[Sample]] = {}
    for sample in samples.found:
        if math.isfinite(sample.value):
            by_name.setdefault(sample.name, []).append(sample)
    readings = [reading for family in FAMILIES for reading in _read_family(family, by_name)]
    starts = [sample.value for sample in by_name.get(PROCESS_START, ())]
    if starts:
        readings.append(Reading(None, PROCESS_START, max(starts)))
    return PageReadings(readings, samples.broken_lines)


def _read_family(family: Family, by_name: Mapping[str, Sequence[Sample]]) -> list[Reading]:
    """By the first of the family's names that the page has."""
    for name in family.names:
        samples = [sample for sample_name in _sample_names(family, name) for sample in by_name.get(sample_name, ())]
        if samples:
            series = _series(samples, lambda sample: _metric(family, name, sample))  # noqa: B023
            return [
                Reading(engine, metric, max(values) if family.kind is FamilyKind.SHARE else sum(values))
                for (engine, metric), values in series.items()
            ]
    return []


def _series(samples: Sequence[Sample], metric_of: Callable[[Sample], str]) -> dict[tuple[str, str], list[float]]:
    """By engine and metric: one value for each series that is not only another process's word of the same."""
    told: dict[tuple[str, str], dict[frozenset[tuple[str, str]], float]] = {}
    for sample in samples:
        engine = next((sample.labels[label] for label in _ENGINE_LABELS if label in sample.labels), ONLY_ENGINE)
        same = frozenset(item for item in sample.labels.items() if item[0] not in _SAME_THING_LABELS)
        values = told.setdefault((engine, metric_of(sample)), {})
        values[same] = max(sample.value, values.get(same, sample.value))
    return {key: list(values.values()) for key, values in told.items()}


def _metric(family: Family, name: Name, sample: Sample) -> str:
    metric = family.metric + sample.name.removeprefix(name.name)
    if metric.endswith("_bucket"):
        return labelled(metric, "le", _bound(sample.labels.get("le", "")))
    if family.label is None or family.label not in sample.labels:
        return metric
    return labelled(metric, family.label, sample.labels[family.label])


def _bound(text: str) -> str:
    """Some write 1, some 1.0."""
    try:
        bound = float(text)
    except ValueError:
        return text
    return "+Inf" if bound == math.inf else repr(bound)
