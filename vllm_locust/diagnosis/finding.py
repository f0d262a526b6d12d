"""What a rule of the diagnosis finds. Every threshold is here.

A rule looks at one stage beside the whole run. It answers with a finding, with None where nothing speaks for it, or
with the data that it would need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from vllm_locust.diagnosis.figures import RunFigures, StageFigures


class Need(StrEnum):
    """What a rule could not be judged without."""

    SERVER = "the server's own metrics (--metrics-url)"
    SERVER_QUEUE = "the number of requests that wait, which the server does not tell"
    SERVER_KV_CACHE = "KV-cache use or preemptions, which the server does not tell"
    SERVER_PREFIX_CACHE = "prefix-cache queries and hits, which the server does not tell"
    SERVER_TTFT = "the server's own TTFT for about the same requests"
    REPEATED_PROMPTS = "conversations of several turns, or prompts that begin alike"
    GPU = "GPU samples (vllm-locust collect)"
    GPU_UTILIZATION = "utilization, which the GPUs do not tell"
    GPU_ACTIVITY = "SM or tensor activity and memory traffic, which the GPUs do not tell"
    MORE_STAGES = "stages of different load, as the GPUs do not tell their tensor activity"
    TWO_GPUS = "two GPUs or more"
    THROTTLE_REASONS = "throttle reasons, which the GPUs do not tell"
    OK_REQUESTS = "requests that are ok"
    WARMUP = "a warm-up with requests that are ok"
    WORKER_HEALTH = "samples of the workers' condition"
    PROMPT_LENGTHS = "200 streamed requests of known prompt length in a stage"
    STREAMS = "100 gaps of streamed answers in a stage"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """A share or a ratio that is equal to its threshold fires."""

    refused_share: float = 0.01
    """Of the requests; of one that the server takes none is refused."""
    queue_share: float = 0.5
    """Of the mean time to the first token."""
    waiting_mean: float = 1.0
    kv_cache_full: float = 0.95
    kv_cache_roomy: float = 0.80
    preempted_share: float = 0.01
    """Preemptions, of the requests that finished."""
    later_turns: float = 0.20
    shared_prefix: float = 0.20
    prefix_cache_hit_rate: float = 0.05
    dram_activity: float = 0.40
    """Thin matrix products as in decoding keep an H200's memory busy for 55 % of the time, thick ones for 17 %."""
    memory_bandwidth_utilization: float = 0.60
    """NVML's own figure, where there is no DRAM activity: 70 % and 24 % for the same."""
    low_tensor_activity: float = 0.30
    low_sm_activity: float = 0.70
    """Where tensor activity is not told: 58 % and 96 % for the same."""
    tensor_activity: float = 0.50
    utilization: float = 0.95
    more_load: float = 1.25
    flat_tokens: float = 1.05
    gpu_spread: float = 0.20
    gpu_unused: float = 0.01
    throttled: float = 0.01
    power_capped: float = 0.10
    """A GPU under full load is often at its power limit for moments."""
    network_share: float = 0.30
    """Of the mean time to the first token, where it is at least ``network_ns`` as well."""
    network_ns: float = 20e6
    same_requests: float = 0.25
    """By how much the number of requests with a first token may differ between the server's count and ours."""
    min_requests: int = 20
    prompt_requests: int = 200
    prompt_gaps: int = 50
    long_gap_ratio: float = 2.0
    """Of a gap with a long prefill to a quiet one."""
    long_to_short_gap_ratio: float = 1.25
    stretched_share: float = 0.05
    long_ttft_ratio: float = 3.0
    stream_gaps: int = 100
    tokens_per_chunk: float = 4.0
    burst_gap_share: float = 0.02
    """Of the mean gap: a median gap below it means that most chunks come together."""
    whole_answer_share: float = 0.02
    """Of E2E: what lies between the first and the last token of an answer that was held back whole."""
    whole_answer_tokens: float = 10.0


THRESHOLDS: Final = Thresholds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``weight`` from 0 to 1 says how much of the time or the work concerned it explains: findings stand in its
    order. ``figures`` are those that the sentence cites.
    """

    code: str
    weight: float
    sentence: str
    figures: Mapping[str, float | None]
    attempt: str
    """What to try next."""
    confirm: str
    """What would confirm it."""
    stages: tuple[str, ...] = ()
    """Where it was found, the heaviest first; none where it is of the whole run."""

    def as_json(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "title": TITLES[self.code],
            "weight": self.weight,
            "stages": list(self.stages),
            "sentence": self.sentence,
            "figures": dict(self.figures),
            "try": self.attempt,
            "confirm": self.confirm,
        }


Answer = Finding | Need | None
Rule = Callable[[StageFigures, RunFigures, Thresholds], Answer]

TITLES: Final[Mapping[str, str]] = {
    "refusals": "refused requests",
    "kv_cache_pressure": "KV-cache pressure",
    "queueing": "queueing",
    "long_prompts": "long prompts in the way",
    "compute_bound": "compute-bound",
    "memory_bound_decode": "memory-bound decoding",
    "throttling": "throttled GPUs",
    "uneven_gpus": "uneven GPUs",
    "client_bound": "client-bound",
    "network_bound": "network-bound",
    "buffered_stream": "buffered stream",
    "prefix_cache_unused": "prefix cache unused",
    "cold_start": "cold start",
}
"""In the order in which findings of equal weight stand: a cause before what follows from it."""
