"""``/metrics`` with the names, labels and buckets of vLLM 0.32. Counting is plain arithmetic."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

NS_PER_S = 1_000_000_000
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
CACHE_TIERS = ("device", "host", "p2p", "disk", "external_unspecified")
_FOR_MFU = "(for Model Flops Utilization calculations)."
_EXTERNAL = "from KV connector cross-instance cache sharing, in terms of number of"
_NEVER_COUNTED = {
    "estimated_flops_per_gpu": f"Estimated number of floating point operations per GPU {_FOR_MFU}",
    "estimated_read_bytes_per_gpu": f"Estimated number of bytes read from memory per GPU {_FOR_MFU}",
    "estimated_write_bytes_per_gpu": f"Estimated number of bytes written to memory per GPU {_FOR_MFU}",
    "external_prefix_cache_queries": f"External prefix cache queries {_EXTERNAL} queried tokens.",
    "external_prefix_cache_hits": f"External prefix cache hits {_EXTERNAL} cached tokens.",
    "mm_cache_queries": "Multi-modal cache queries, in terms of number of queried items.",
    "mm_cache_hits": "Multi-modal cache hits, in terms of number of cached items.",
}
"""There, and zero: the simulation has no such thing."""


class Histogram:
    """``observe`` costs one bisection. The bound belongs to its bucket, as in Prometheus."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


@dataclass(frozen=True, slots=True)
class Gauges:
    """Read from the engine at each scrape."""

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


def _bound(value: float) -> str:
    return "+Inf" if value == float("inf") else str(float(value))


class ServerMetrics(Collector):
    """The server's counters. Each is counted when vLLM counts it: prompt tokens with the first token."""

    def __init__(
        self, model: str, created_unix_ns: int, gauges: Callable[[], Gauges], cache_config: dict[str, str]
    ) -> None:
        self._labels = {"engine": "0", "model_name": model}
        self._model_label = {"model_name": model}
        self._created_s = created_unix_ns / NS_PER_S
        self._gauges = gauges
        self._cache_config = cache_config
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FINISHED_REASONS, 0)
        self.rejected = dict.fromkeys(REJECTION_REASONS, 0)
        self.request_prompt_tokens = Histogram(_TOKENS)
        self.request_generation_tokens = Histogram(_TOKENS)
        self.iteration_tokens = Histogram(_ITERATION)
        self.request_max_num_generation_tokens = Histogram(_TOKENS)
        self.request_params_n = Histogram((1, 2, 5, 10, 20))
        self.request_params_max_tokens = Histogram(_TOKENS)
        self.time_to_first_token = Histogram(_TTFT)
        self.inter_token_latency = Histogram(_ITL)
        self.time_per_output_token = Histogram(_ITL)
        self.e2e_latency = Histogram(_LATENCY)
        self.queue_time = Histogram(_LATENCY)
        self.inference_time = Histogram(_LATENCY)
        self.prefill_time = Histogram(_LATENCY)
        self.decode_time = Histogram(_LATENCY)
        self.num_preemptions = Histogram((1, 2, 3, 4, 5, 10, 20))
        self.prefill_kv_computed_tokens = Histogram(_TOKENS)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        now = self._gauges()
        yield self._gauge("num_requests_running", "Number of requests in model execution batches.", now.running)
        yield self._gauge("num_requests_waiting", "Number of requests waiting to be processed.", now.waiting)
        by_reason = (
            "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity;"
            " 'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). Sum of all"
            " reasons equals vllm:num_requests_waiting."
        )
        yield self._gauges_by(
            "num_requests_waiting_by_reason", by_reason, "reason", {"capacity": now.waiting, "deferred": 0}
        )
        sleep = (
            "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; weights_offloaded"
            " = 1 means sleep level 1; discard_all = 1 means sleep level 2."
        )
        states = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        yield self._gauges_by("engine_sleep_state", sleep, "sleep_state", states)
        yield self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", now.kv_cache_usage)
        for name, text in _NEVER_COUNTED.items():
            yield self._counter(name, text, 0)
        queries = "Prefix cache queries, in terms of number of queried tokens."
        yield self._counter("prefix_cache_queries", queries, now.prefix_queries)
        yield self._counter(
            "prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", now.prefix_hits
        )
        yield self._counter("num_preemptions", "Cumulative number of preemption from the engine.", now.preemptions)
        yield from self._token_counters()
        yield from self._request_counters()
        for name, text, histogram in self._histograms():
            yield self._histogram(name, text, histogram)
        config = Metric("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", "gauge")
        config.add_sample(config.name, {"engine": "0", **self._cache_config}, 1)
        yield config

    def _token_counters(self) -> Iterator[Metric]:
        yield self._counter("prompt_tokens", "Number of prefill tokens processed.", self.prompt_tokens)
        computed = self.prompt_tokens - self.cached_tokens
        sources = dict.fromkeys(PROMPT_SOURCES, 0) | {"local_compute": computed, "local_cache_hit": self.cached_tokens}
        yield self._counters_by("prompt_tokens_by_source", "Number of prompt tokens by source.", "source", sources)
        yield self._counter(
            "prompt_tokens_cached", "Number of cached prompt tokens (local + external).", self.cached_tokens
        )
        tiers = dict.fromkeys(CACHE_TIERS, 0) | {"device": self.cached_tokens}
        by_tier = (
            "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host (offloaded to"
            " DRAM), disk, p2p (transferred from another vLLM instance) or external_unspecified. Counted at admission;"
            " sums to vllm:prefix_cache_hits + vllm:external_prefix_cache_hits."
        )
        yield self._counters_by("prompt_tokens_cached_by_source", by_tier, "source", tiers)
        yield self._counter("generation_tokens", "Number of generation tokens processed.", self.generation_tokens)

    def _request_counters(self) -> Iterator[Metric]:
        yield self._counters_by(
            "request_success", "Count of successfully processed requests.", "finished_reason", self.finished
        )
        text = "Number of admission attempts rejected by a queue limit, by reason."
        yield self._counters_by("admission_rejections", text, "reason", self.rejected, self._model_label)

    def _histograms(self) -> list[tuple[str, str, Histogram]]:
        return [
            ("request_prompt_tokens", "Number of prefill tokens processed.", self.request_prompt_tokens),
            ("request_generation_tokens", "Number of generation tokens processed.", self.request_generation_tokens),
            ("iteration_tokens_total", "Histogram of number of tokens per engine_step.", self.iteration_tokens),
            (
                "request_max_num_generation_tokens",
                "Histogram of maximum number of requested generation tokens.",
                self.request_max_num_generation_tokens,
            ),
            ("request_params_n", "Histogram of the n request parameter.", self.request_params_n),
            (
                "request_params_max_tokens",
                "Histogram of the max_tokens request parameter.",
                self.request_params_max_tokens,
            ),
            ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", self.time_to_first_token),
            ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", self.inter_token_latency),
            (
                "request_time_per_output_token_seconds",
                "Histogram of time_per_output_token_seconds per request.",
                self.time_per_output_token,
            ),
            ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", self.e2e_latency),
            ("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", self.queue_time),
            (
                "request_inference_time_seconds",
                "Histogram of time spent in RUNNING phase for request.",
                self.inference_time,
            ),
            (
                "request_prefill_time_seconds",
                "Histogram of time spent in PREFILL phase for request.",
                self.prefill_time,
            ),
            ("request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", self.decode_time),
            (
                "request_num_preemptions",
                "Histogram of the number of times a request was preempted.",
                self.num_preemptions,
            ),
            (
                "request_prefill_kv_computed_tokens",
                "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
                self.prefill_kv_computed_tokens,
            ),
        ]

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        metric = Metric(f"vllm:{name}", text, "gauge")
        metric.add_sample(metric.name, self._labels, value)
        return metric

    def _gauges_by(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        metric = Metric(f"vllm:{name}", text, "gauge")
        for key, value in values.items():
            metric.add_sample(metric.name, {**self._labels, label: key}, value)
        return metric

    def _counter(self, name: str, text: str, value: int) -> Metric:
        metric = Metric(f"vllm:{name}", text, "counter")
        metric.add_sample(f"{metric.name}_total", self._labels, value)
        metric.add_sample(f"{metric.name}_created", self._labels, self._created_s)
        return metric

    def _counters_by(
        self, name: str, text: str, label: str, values: dict[str, int], labels: dict[str, str] | None = None
    ) -> Metric:
        metric = Metric(f"vllm:{name}", text, "counter")
        base = self._labels if labels is None else labels
        for suffix in ("_total", "_created"):
            for key, value in values.items():
                metric.add_sample(
                    metric.name + suffix, {**base, label: key}, value if suffix == "_total" else self._created_s
                )
        return metric

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        metric = Metric(f"vllm:{name}", text, "histogram")
        seen = 0
        for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
            seen += count
            metric.add_sample(f"{metric.name}_bucket", {**self._labels, "le": _bound(bound)}, seen)
        metric.add_sample(f"{metric.name}_count", self._labels, seen)
        metric.add_sample(f"{metric.name}_sum", self._labels, histogram.total)
        metric.add_sample(f"{metric.name}_created", self._labels, self._created_s)
        return metric
