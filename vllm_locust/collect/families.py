"""Which of a server's metrics become which of ours: one table for all servers and all their releases.

vLLM keeps a renamed metric for two releases beside its new name, so of the names of a family the first that a page has
is taken, and never two of them.

vLLM 0.24 and 0.32 are known from real pages, 0.6 and 0.10 from their source. ``gpu_cache_usage_perc`` and the
``gpu_prefix_cache_*`` counters were deprecated in 0.9, still told in 0.10, hidden in 0.11 and removed in 0.12
(vllm-project/vllm pull requests 18354 and 29330); ``time_per_output_token_seconds`` was deprecated in 0.11, hidden in
0.12 and removed after it (24110, 32661). Both of its names count one gap for each piece of an answer that a step made,
not for each token. The old engine of 0.6 and 0.7 has no counters of the prefix cache, only a rate since its start,
which cannot be cut to a stage. The times of a request's phases came within 0.6 (4464, 9659), in which patch release is
not known.

SGLang, TensorRT-LLM and TGI are known from their source, llama.cpp from its source and users, NVIDIA's NIM from its
manual. SGLang counts tokens when a request ends, TGI when it begins (prompt) or ends (answer): their rates come in
steps. TensorRT-LLM tells all this at ``/prometheus/metrics``, while ``/metrics`` is JSON, and NIM at ``/v1/metrics``.
NIM's names have no prefix, nor had TensorRT-LLM's at first.
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
class Family:
    metric: str
    """Our name. A histogram's series have the suffixes ``_bucket``, ``_sum`` and ``_count``."""
    kind: FamilyKind
    names: tuple[str, ...]
    """The servers': the first that a page has is taken. Of a counter it is the whole name of its samples, of a
    histogram the name without a suffix. A release is vLLM's, if nothing else is said."""
    label: str | None = None
    """The label by whose values it is told apart."""


FAMILIES: Final = (
    Family(
        "requests_running",
        FamilyKind.COUNT,
        (
            "vllm:num_requests_running",
            "sglang:num_running_reqs",
            "tgi_batch_current_size",
            "trtllm_num_requests_running",
            "llamacpp:requests_processing",
            "num_requests_running",
        ),
    ),
    Family(
        "requests_waiting",
        FamilyKind.COUNT,
        (
            "vllm:num_requests_waiting",
            "sglang:num_queue_reqs",
            "tgi_queue_size",
            "trtllm_num_requests_waiting",
            "llamacpp:requests_deferred",
            "num_requests_waiting",
        ),
    ),
    Family(
        "kv_cache_usage",
        FamilyKind.SHARE,
        (
            "vllm:kv_cache_usage_perc",  # since 0.10
            "vllm:gpu_cache_usage_perc",  # until 0.10
            "sglang:token_usage",
            "trtllm_kv_cache_utilization",
            "llamacpp:kv_cache_usage_ratio",  # until some time in 2025
            "gpu_cache_usage_perc",
        ),
    ),
    Family(
        "prompt_tokens_total",
        FamilyKind.COUNTER,
        (
            "vllm:prompt_tokens_total",
            "sglang:prompt_tokens_total",
            "tgi_request_input_length_sum",
            "trtllm_prompt_tokens_total",
            "llamacpp:prompt_tokens_total",
            "prompt_tokens_total",
        ),
    ),
    Family(
        "generation_tokens_total",
        FamilyKind.COUNTER,
        (
            "vllm:generation_tokens_total",
            "sglang:generation_tokens_total",
            "tgi_request_generated_tokens_sum",
            "trtllm_generation_tokens_total",
            "llamacpp:tokens_predicted_total",
            "generation_tokens_total",
        ),
    ),
    Family(
        "prefix_cache_queries_total",
        FamilyKind.COUNTER,
        (
            "vllm:prefix_cache_queries_total",  # since 0.10
            "vllm:gpu_prefix_cache_queries_total",  # until 0.10
            "sglang:prompt_tokens_total",
        ),
    ),
    Family(
        "prefix_cache_hits_total",
        FamilyKind.COUNTER,
        (
            "vllm:prefix_cache_hits_total",  # since 0.10
            "vllm:gpu_prefix_cache_hits_total",  # until 0.10
            "sglang:cached_tokens_total",
        ),
    ),
    Family(
        "preemptions_total",
        FamilyKind.COUNTER,
        ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total"),
    ),
    Family(
        "request_success_total",
        FamilyKind.COUNTER,
        (
            "vllm:request_success_total",
            "sglang:num_requests_total",
            "tgi_request_success",
            "trtllm_request_success_total",
            "request_success_total",
        ),
        label="finished_reason",
    ),
    Family(
        "queue_seconds",
        FamilyKind.HISTOGRAM,
        (
            "vllm:request_queue_time_seconds",
            "sglang:queue_time_seconds",
            "tgi_request_queue_duration",
            "trtllm_request_queue_time_seconds",
            "request_queue_time_seconds",
        ),
    ),
    Family(
        "prefill_seconds",
        FamilyKind.HISTOGRAM,
        ("vllm:request_prefill_time_seconds", "trtllm_request_prefill_time_seconds"),
    ),
    Family(
        "decode_seconds",
        FamilyKind.HISTOGRAM,
        ("vllm:request_decode_time_seconds", "trtllm_request_decode_time_seconds"),
    ),
    Family(
        "ttft_seconds",
        FamilyKind.HISTOGRAM,
        (
            "vllm:time_to_first_token_seconds",
            "sglang:time_to_first_token_seconds",
            "trtllm_time_to_first_token_seconds",
            "time_to_first_token_seconds",
        ),
    ),
    Family(
        "itl_seconds",
        FamilyKind.HISTOGRAM,
        (
            "vllm:inter_token_latency_seconds",  # since 0.11
            "vllm:time_per_output_token_seconds",  # until 0.11
            "sglang:inter_token_latency_seconds",
        ),
    ),
    Family(
        "e2e_seconds",
        FamilyKind.HISTOGRAM,
        (
            "vllm:e2e_request_latency_seconds",
            "sglang:e2e_request_latency_seconds",
            "tgi_request_duration",
            "trtllm_e2e_request_latency_seconds",
            "e2e_request_latency_seconds",
        ),
    ),
)

_ENGINE_LABELS: Final = ("engine", "dp_rank")
_SAME_THING_LABELS: Final = frozenset({"pid", "tp_rank", "pp_rank", "moe_ep_rank"})
"""Several processes that tell of one engine: ranks of it, or front ends before it. Their gauges repeat each other."""
ONLY_ENGINE: Final = "0"
_SUFFIXES: Final = ("_bucket", "_sum", "_count")


def _sample_names(family: Family, name: str) -> tuple[str, ...]:
    suffixes = _SUFFIXES if family.kind is FamilyKind.HISTOGRAM else ("",)
    return tuple(name + suffix for suffix in suffixes)


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


def _metric(family: Family, name: str, sample: Sample) -> str:
    metric = family.metric + sample.name.removeprefix(name)
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
