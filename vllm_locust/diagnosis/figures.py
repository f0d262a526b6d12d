"""What is known of a run's stages beside each other: on this the diagnosis of the server rests.

None: not known, and no rule fires on it. Times in nanoseconds, shares from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFigures:
    """What the servers told of themselves in a stage."""

    running_max: float | None = None
    waiting_mean: float | None = None
    waiting_first: float | None = None
    waiting_last: float | None = None
    waiting_grows: bool | None = None
    kv_cache_max: float | None = None
    preemptions: float | None = None
    finished: float | None = None
    prefix_cache_queries: float | None = None
    """Tokens that were looked for in it: 0 where it is off."""
    prefix_cache_hit_rate: float | None = None
    ttft_n: float | None = None
    ttft_ns: float | None = None
    queue_ns: float | None = None
    network_ns: float | None = None
    """What the clients' mean time to the first token holds beyond the server's."""

    @property
    def queue_share(self) -> float | None:
        """Of the mean time to the first token."""
        return None if self.queue_ns is None or not self.ttft_ns else min(self.queue_ns / self.ttft_ns, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFigures:
    """Means over a stage. ``utilization`` only says that some kernel ran."""

    name: str
    utilization: float | None = None
    sm_activity: float | None = None
    tensor_activity: float | None = None
    dram_activity: float | None = None
    memory_bandwidth_utilization: float | None = None
    throttled: Mapping[str, float] | None = None
    """By reason, the share of the time in which it held the clocks down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFigures:
    """What prompts, the longest tenth of them above all, did to each other and to streams that were on their way.

    A gap of a stream is quiet when no other request's first token came within it: no prefill ended in it.
    """

    requests: int
    """With a known prompt length and a time to the first token."""
    long_tokens: float | None = None
    """From here on a prompt is one of the longest tenth, or of fewer where many are equally long."""
    long_share: float | None = None
    """Of the prompts, those that are."""
    ttft_p90_long_ns: float | None = None
    ttft_p90_rest_ns: float | None = None
    gaps_long: int = 0
    """In which a long prompt's prefill ended."""
    gap_p50_long_ns: float | None = None
    gaps_short: int = 0
    """In which only prompts of a quarter of that length or less got their first token."""
    gap_p50_short_ns: float | None = None
    gaps_quiet: int = 0
    gap_p50_quiet_ns: float | None = None
    stretched_share: float | None = None
    """Of all the time between chunks: what gaps with a prefill took beyond a quiet gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    name: str
    load: float | None = None
    """Requests/s offered, or users."""
    ok_requests: int = 0
    attempted: int = 0
    refused: int = 0
    """With the answer 429 or 503."""
    output_tokens: float | None = None
    """Of one request, mean."""
    total_tokens_per_s: float | None = None
    ttft_n: int = 0
    ttft_ns: float | None = None
    ttft_p99_ns: float | None = None
    e2e_ns: float | None = None
    gaps: int = 0
    gap_ns: float | None = None
    gap_p50_ns: float | None = None
    tokens_per_chunk: float | None = None
    overloaded: bool | None = None
    server: ServerFigures | None = None
    gpus: Sequence[GpuFigures] = ()
    prefills: PrefillFigures = PrefillFigures(requests=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStart:
    requests: int
    ttft_ns: float
    """Mean of the warm-up's first requests."""
    window_p50_ns: float
    matters: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorDoubt:
    """A reason of the verdict that speaks of the generator."""

    code: str
    sentence: str
    invalid: bool
    by_full_slots: bool = False
    """Its cause is that every slot was busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    stages: Sequence[StageFigures]
    cold_start: ColdStart | None = None
    """None: no warm-up, or no window to hold it against."""
    worker_samples: int = 0
    """Of the generator's own condition."""
    doubts: Sequence[GeneratorDoubt] = ()
    later_turns: float | None = None
    """Of the window's requests, those whose prompt repeats an earlier one of the run: a later turn."""
    shared_prefix: float | None = None
    """Of the window's prompt tokens, those of a beginning that an earlier prompt had; None where the workload does not
    make prompts that begin alike."""
    targets: int = 1
    """Replicas that requests went to."""
