"""Rules of the diagnosis: what the clients' own times tell of prompts, streams, the generator and the network."""

from __future__ import annotations

from typing import Final

from vllm_locust.diagnosis.figures import PrefillFigures, RunFigures, StageFigures
from vllm_locust.diagnosis.finding import Answer, Finding, Need, Rule, Thresholds
from vllm_locust.duration import seconds
from vllm_locust.verdict.reason import number_text, percent_text, time_text


def _long_prompts(stage: StageFigures, _: RunFigures, limits: Thresholds) -> Answer:
    """Streams that wait while a long prompt is read, or long prompts that make the tail of TTFT."""
    prefills = stage.prefills
    if prefills.requests < limits.prompt_requests or prefills.long_tokens is None or prefills.long_share is None:
        return Need.PROMPT_LENGTHS
    buffered = _bursts(stage, limits)
    stretched = None if buffered else _stretched(prefills, limits)
    late = _long_ttft_ratio(prefills)
    if stretched is None and (late is None or late < limits.long_ttft_ratio):
        return None
    long = f"prompts of {prefills.long_tokens:,.0f} tokens and more ({percent_text(prefills.long_share)} of them)"
    parts = []
    if stretched is not None:
        share, usual_ns = stretched
        parts.append(
            f"while {long} were read, other streams waited {time_text(prefills.gap_p50_long_ns or 0.0)} for their next "
            f"token (p50), and {time_text(usual_ns)} at other times: {percent_text(share)} of the time between tokens"
        )
    if prefills.ttft_p90_long_ns is not None and prefills.ttft_p90_rest_ns is not None:
        whose = "the TTFT p90 of such prompts" if parts else f"TTFT p90 of {long}"
        parts.append(
            f"{whose} was {time_text(prefills.ttft_p90_long_ns)}, and {time_text(prefills.ttft_p90_rest_ns)} for "
            "the others"
        )
    return Finding(
        code="long_prompts",
        weight=0.2 if stretched is None else max(0.2, stretched[0]),
        sentence=f"{'; '.join(parts)}.",
        figures={
            "long_tokens": prefills.long_tokens,
            "long_share": prefills.long_share,
            "gap_p50_long_s": seconds(prefills.gap_p50_long_ns),
            "gap_p50_quiet_s": seconds(prefills.gap_p50_quiet_ns),
            "gap_p50_short_s": seconds(prefills.gap_p50_short_ns),
            "stretched_share": prefills.stretched_share,
            "ttft_p90_long_s": seconds(prefills.ttft_p90_long_ns),
            "ttft_p90_rest_s": seconds(prefills.ttft_p90_rest_ns),
        },
        attempt=(
            "a lower --max-num-batched-tokens (2048) or --long-prefill-token-threshold, so that a prefill is cut into "
            "shorter steps; --enable-prefix-caching where prompts share their beginning; prefill on servers of its own"
        ),
        confirm="ITL p99 falls, at the price of a longer TTFT of long prompts",
    )


def _stretched(prefills: PrefillFigures, limits: Thresholds) -> tuple[float, float] | None:
    """The share of the time between tokens, and what is usual. Longer gaps are likelier to hold a first token by
    chance: so they must be longer than those with a short prompt's too, of which the same is true.
    """
    long_ns, quiet_ns, short_ns = (getattr(prefills, f"gap_p50_{kind}_ns") for kind in ("long", "quiet", "short"))
    share = prefills.stretched_share
    if share is None or quiet_ns is None or long_ns is None or share < limits.stretched_share:
        return None
    if min(prefills.gaps_long, prefills.gaps_quiet) < limits.prompt_gaps or long_ns < limits.long_gap_ratio * quiet_ns:
        return None
    if prefills.gaps_short >= limits.prompt_gaps and long_ns < limits.long_to_short_gap_ratio * (short_ns or 0.0):
        return None
    return share, quiet_ns


def _long_ttft_ratio(prefills: PrefillFigures) -> float | None:
    long_ns, rest_ns = prefills.ttft_p90_long_ns, prefills.ttft_p90_rest_ns
    return None if long_ns is None or not rest_ns else long_ns / rest_ns


def _refusals(stage: StageFigures, _: RunFigures, limits: Thresholds) -> Answer:
    if stage.attempted < limits.min_requests:
        return None
    share = stage.refused / stage.attempted
    if share < limits.refused_share:
        return None
    return Finding(
        code="refusals",
        weight=min(share, 1.0),
        sentence=(
            f"{stage.refused:,} of {stage.attempted:,} requests ({percent_text(share)}) were refused with status 429 "
            "or 503: a limit of the server, or of what lies before it, was reached; the latencies are of those let in."
        ),
        figures={"refused": float(stage.refused), "refused_share": share},
        attempt=(
            "a larger bound where there is one (SGLang --max-queued-requests, TGI --max-concurrent-requests, Ray Serve "
            "max_queued_requests, the rate and connection limits of a gateway; vLLM itself queues); more replicas; or "
            "less load"
        ),
        confirm="none is refused at the same load, and TTFT shows the wait instead",
    )


def _client_bound(_: StageFigures, run: RunFigures, __: Thresholds) -> Answer:
    if not run.worker_samples:
        return Need.WORKER_HEALTH
    if not any(stage.ok_requests for stage in run.stages):
        return Need.OK_REQUESTS
    if not run.doubts:
        return None
    invalid = any(doubt.invalid for doubt in run.doubts)
    slots = any(doubt.by_full_slots for doubt in run.doubts)
    workers = any(not doubt.by_full_slots for doubt in run.doubts)
    tries = ["a higher -u"] * slots
    tries += ["more worker processes (--processes) or machines, and nothing else on them"] * workers
    twice = " and ".join(["slots"] * slots + ["workers"] * workers)
    return Finding(
        code="client_bound",
        weight=1.0 if invalid else 0.5,
        sentence=f"the generator may have been a limit itself. {' '.join(doubt.sentence for doubt in run.doubts)}",
        figures={"reasons": float(len(run.doubts))},
        attempt="; ".join(tries),
        confirm=f"with twice the {twice} the verdict has nothing to say, and throughput rises or stays",
    )


def _network_bound(stage: StageFigures, run: RunFigures, limits: Thresholds) -> Answer:
    server = stage.server
    if server is None:
        return Need.SERVER
    if server.network_ns is None or not stage.ttft_ns or not _same_requests(stage, limits):
        return Need.SERVER_TTFT
    share = server.network_ns / stage.ttft_ns
    if share < limits.network_share or server.network_ns < limits.network_ns or run.doubts:
        return None
    if _held_back(stage, limits):
        return None
    return Finding(
        code="network_bound",
        weight=min(share, 1.0),
        sentence=(
            f"of a mean TTFT of {time_text(stage.ttft_ns)} the server itself knows {time_text(server.ttft_ns or 0.0)}: "
            f"{time_text(server.network_ns)} ({percent_text(share)}) lie between it and the clients."
        ),
        figures={"network_s": server.network_ns / 1e9, "network_share": share, "ttft_s": stage.ttft_ns / 1e9},
        attempt=(
            "the load from a machine next to the server and past proxies and gateways; more API processes "
            "(--api-server-count) where the server's own front end is busy"
        ),
        confirm="from next to the server the difference goes",
    )


def _same_requests(stage: StageFigures, limits: Thresholds) -> bool:
    """The server counts first tokens that were made in the stage: in an overload those of other requests."""
    server = stage.server
    if server is None or server.ttft_n is None or min(stage.ttft_n, server.ttft_n) < limits.min_requests:
        return False
    return abs(server.ttft_n - stage.ttft_n) <= limits.same_requests * stage.ttft_n and not stage.overloaded


def _bursts(stage: StageFigures, limits: Thresholds) -> bool:
    if stage.gaps < limits.stream_gaps or stage.gap_p50_ns is None or not stage.gap_ns:
        return False
    return stage.gap_p50_ns < limits.burst_gap_share * stage.gap_ns


def _held_back(stage: StageFigures, limits: Thresholds) -> bool:
    """Answers that came in one go, though they have many tokens."""
    if stage.ok_requests < limits.min_requests or stage.ttft_ns is None or not stage.e2e_ns:
        return False
    long = (stage.output_tokens or 0.0) >= limits.whole_answer_tokens
    return long and stage.e2e_ns - stage.ttft_ns < limits.whole_answer_share * stage.e2e_ns


def _buffered_stream(stage: StageFigures, run: RunFigures, limits: Thresholds) -> Answer:
    """A generator that reads too late sees chunks together as well: then nothing is said of the stream."""
    if stage.gaps < limits.stream_gaps and not _held_back(stage, limits):
        return Need.STREAMS
    figures: dict[str, float | None] = {
        "tokens_per_chunk": stage.tokens_per_chunk,
        "gap_p50_s": seconds(stage.gap_p50_ns),
        "gap_mean_s": seconds(stage.gap_ns),
    }
    if _held_back(stage, limits) and not run.doubts:
        how = (
            f"answers came whole: the first token after {time_text(stage.ttft_ns or 0.0)} of "
            f"{time_text(stage.e2e_ns or 0.0)} (means), though they have {number_text(stage.output_tokens or 0.0, 3)} "
            "tokens"
        )
        return _buffered(1.0, how, figures)
    if _bursts(stage, limits) and not run.doubts:
        how = (
            f"chunks came in bursts: half of the gaps are at most {time_text(stage.gap_p50_ns or 0.0)}, and their mean "
            f"is {time_text(stage.gap_ns or 0.0)}"
        )
        return _buffered(0.8, how, figures)
    if stage.tokens_per_chunk is None or stage.tokens_per_chunk < limits.tokens_per_chunk:
        return None
    return _buffered(0.3, f"each chunk brought {number_text(stage.tokens_per_chunk, 3)} tokens (mean)", figures)


def _buffered(weight: float, how: str, figures: dict[str, float | None]) -> Finding:
    return Finding(
        code="buffered_stream",
        weight=weight,
        sentence=f"{how}: users see text in jerks, and TTFT, ITL and TPOT are of what holds it back.",
        figures=figures,
        attempt=(
            "--stream-interval 1, and no buffering in what lies between (nginx: proxy_buffering off; gateways: no "
            "compression of text/event-stream)"
        ),
        confirm="against the server itself (curl -N) tokens come one by one",
    )


STREAM_RULES: Final[tuple[tuple[str, Rule], ...]] = (
    ("refusals", _refusals),
    ("long_prompts", _long_prompts),
    ("client_bound", _client_bound),
    ("network_bound", _network_bound),
    ("buffered_stream", _buffered_stream),
)
