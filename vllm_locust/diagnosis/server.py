"""Rules of the diagnosis: what the server's own metrics and its first requests tell."""

from __future__ import annotations

from typing import Final

from vllm_locust.diagnosis.figures import RunFigures, ServerFigures, StageFigures
from vllm_locust.diagnosis.finding import Answer, Finding, Need, Rule, Thresholds
from vllm_locust.duration import seconds
from vllm_locust.verdict.reason import number_text, percent_text, time_text


def _kv_cache_pressure(stage: StageFigures, _: RunFigures, limits: Thresholds) -> Answer:
    server = stage.server
    if server is None:
        return Need.SERVER
    if server.kv_cache_max is None and server.preemptions is None:
        return Need.SERVER_KV_CACHE
    preempted = 0.0
    if server.preemptions:
        preempted = server.preemptions / max(server.finished or 0.0, server.preemptions)
    full_and_waited_for = _is_full(server, limits) and (server.waiting_mean or 0.0) >= limits.waiting_mean
    if preempted < limits.preempted_share and not full_and_waited_for:
        return None
    parts = []
    if server.kv_cache_max is not None:
        parts.append(f"the KV cache was up to {percent_text(server.kv_cache_max)} full")
    if full_and_waited_for and server.waiting_mean is not None:
        parts.append(f"{number_text(server.waiting_mean, 3)} requests waited on average")
    if server.preemptions:
        while_finished = f" while {server.finished:,.0f} finished" if server.finished else ""
        parts.append(
            f"running requests were preempted {server.preemptions:,.0f} times{while_finished}, each to compute its "
            "tokens anew"
        )
    waited = (server.queue_share or 0.0) if full_and_waited_for else 0.0
    return Finding(
        code="kv_cache_pressure",
        weight=max(preempted, waited),
        sentence=f"{', '.join(parts)}.",
        figures={
            "kv_cache_max": server.kv_cache_max,
            "preemptions": server.preemptions,
            "requests_finished": server.finished,
            "waiting_mean": server.waiting_mean,
        },
        attempt=(
            "more room for it: a higher --gpu-memory-utilization, --kv-cache-dtype fp8, or more GPUs "
            "(--tensor-parallel-size); where requests are preempted, a lower --max-num-seqs"
        ),
        confirm="at the same load no request is preempted and the cache has room, and TTFT and TPOT p99 fall",
    )


def _queueing(stage: StageFigures, _: RunFigures, limits: Thresholds) -> Answer:
    server = stage.server
    if server is None:
        return Need.SERVER
    if server.waiting_mean is None:
        return Need.SERVER_QUEUE
    share = server.queue_share
    long = share is not None and share >= limits.queue_share
    grows = server.waiting_grows or (server.waiting_grows is None and bool(stage.overloaded))
    if server.waiting_mean < limits.waiting_mean or not (long or grows):
        return None
    queue = f"held {number_text(server.waiting_mean, 3)} requests on average"
    if grows and server.waiting_first is not None and server.waiting_last is not None:
        queue = f"grew from {number_text(server.waiting_first, 3)} to {number_text(server.waiting_last, 3)} requests"
    sentence = f"requests waited for their turn at the server: its queue {queue}"
    if server.running_max is not None:
        sentence += f" while at most {number_text(server.running_max, 4)} ran"
    if share is not None and server.queue_ns is not None and server.ttft_ns is not None:
        sentence += (
            f"; the wait was {time_text(server.queue_ns)} ({percent_text(share)}) of the {time_text(server.ttft_ns)} "
            "to the first token there"
        )
    if stage.ttft_p99_ns is not None:
        sentence += f"; TTFT p99 was {time_text(stage.ttft_p99_ns)}"
    return Finding(
        code="queueing",
        weight=limits.queue_share if share is None else share,
        sentence=f"{sentence}.",
        figures={
            "waiting_first": server.waiting_first,
            "waiting_last": server.waiting_last,
            "waiting_mean": server.waiting_mean,
            "running_max": server.running_max,
            "queue_share": share,
            "ttft_p99_s": seconds(stage.ttft_p99_ns),
        },
        attempt=_against_the_queue(server, limits),
        confirm="at the same load the queue stays near 0 and TTFT falls by about the wait, while TPOT grows by less",
    )


def _against_the_queue(server: ServerFigures, limits: Thresholds) -> str:
    more = "more replicas (--data-parallel-size) or GPUs (--tensor-parallel-size)"
    if _is_full(server, limits):
        return f"first what helps against KV-cache pressure: they wait for its blocks; or {more}"
    if server.kv_cache_max is not None and server.kv_cache_max < limits.kv_cache_roomy:
        return (
            f"a higher --max-num-seqs (the KV cache was at most {percent_text(server.kv_cache_max)} full), then a "
            f"higher --max-num-batched-tokens, then {more}"
        )
    return f"a higher --max-num-seqs or --max-num-batched-tokens, or {more}"


def _is_full(server: ServerFigures, limits: Thresholds) -> bool:
    return server.kv_cache_max is not None and server.kv_cache_max >= limits.kv_cache_full


def _prefix_cache_unused(stage: StageFigures, run: RunFigures, limits: Thresholds) -> Answer:
    server = stage.server
    if server is None:
        return Need.SERVER
    hit_rate = 0.0 if server.prefix_cache_queries == 0 else server.prefix_cache_hit_rate
    if hit_rate is None:
        return Need.SERVER_PREFIX_CACHE
    turns, alike = run.later_turns or 0.0, run.shared_prefix or 0.0
    if not turns and not alike:
        return Need.REPEATED_PROMPTS
    by_turns, by_prefix = turns >= limits.later_turns, alike >= limits.shared_prefix
    if not (by_turns or by_prefix) or hit_rate > limits.prefix_cache_hit_rate:
        return None
    held = "was never asked" if not server.prefix_cache_queries else f"held {percent_text(hit_rate)} of the tokens"
    repeats = [f"{percent_text(turns)} of the requests repeat a conversation's earlier turns"] * by_turns
    repeats += [f"{percent_text(alike)} of the prompt tokens are a beginning that an earlier prompt had"] * by_prefix
    return Finding(
        code="prefix_cache_unused",
        weight=0.5 * max(turns, alike),
        sentence=f"{', '.join(repeats)}, and the prefix cache {held}.",
        figures={"later_turns": run.later_turns, "shared_prefix": run.shared_prefix, "prefix_cache_hit_rate": hit_rate},
        attempt=_prefix_cache_attempt(run.targets, by_turns=by_turns),
        confirm="prefix-cache hits rise towards the share of repeated tokens, and prefill time and TTFT fall",
    )


def _prefix_cache_attempt(targets: int, *, by_turns: bool) -> str:
    outlives = ", so that a turn outlives its think time" if by_turns else ""
    attempt = f"--enable-prefix-caching; if it is on, more room for the KV cache{outlives}"
    if targets > 1:
        what = "keeps a conversation" if by_turns else "keeps prompts that begin alike"
        attempt = f"{attempt}; and a router that {what} on one replica: requests went to {targets} in turn"
    return attempt


def _cold_start(_: StageFigures, run: RunFigures, __: Thresholds) -> Answer:
    cold = run.cold_start
    if cold is None:
        return Need.WARMUP
    if not cold.matters:
        return None
    return Finding(
        code="cold_start",
        weight=0.1,
        sentence=(
            f"TTFT of the first {cold.requests} requests of the warm-up was {time_text(cold.ttft_ns)} on average, and "
            f"{time_text(cold.window_p50_ns)} (p50) in the window."
        ),
        figures={"ttft_s": cold.ttft_ns / 1e9, "window_p50_s": cold.window_p50_ns / 1e9},
        attempt=(
            "some requests to a new replica before it takes traffic, and vLLM's compile cache (VLLM_CACHE_ROOT) on a "
            "disk that outlives it"
        ),
        confirm="a second run against the same server has no cold start",
    )


SERVER_RULES: Final[tuple[tuple[str, Rule], ...]] = (
    ("kv_cache_pressure", _kv_cache_pressure),
    ("queueing", _queueing),
    ("prefix_cache_unused", _prefix_cache_unused),
    ("cold_start", _cold_start),
)
