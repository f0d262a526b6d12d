"""Each rule of the diagnosis: where it fires, with its exact words, where it does not, and what it needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vllm_locust.diagnosis.diagnose import RULES, diagnose
from vllm_locust.diagnosis.figures import (
    ColdStart,
    GeneratorDoubt,
    GpuFigures,
    PrefillFigures,
    RunFigures,
    ServerFigures,
    StageFigures,
)
from vllm_locust.diagnosis.finding import THRESHOLDS, TITLES, Finding, Need

MS = 1e6
SERVER = ServerFigures(
    running_max=4,
    waiting_mean=0.5,
    waiting_first=0,
    waiting_last=1,
    waiting_grows=False,
    kv_cache_max=0.5,
    preemptions=0,
    finished=200,
    prefix_cache_queries=40_000,
    prefix_cache_hit_rate=0.3,
    ttft_n=200,
    ttft_ns=100 * MS,
    queue_ns=10 * MS,
    network_ns=5 * MS,
)
GPU = GpuFigures(
    name="GPU 0 of h",
    utilization=0.8,
    sm_activity=0.6,
    tensor_activity=0.4,
    dram_activity=0.3,
    throttled={"sw_power_cap": 0.05},
)
PREFILLS = PrefillFigures(
    requests=200,
    long_tokens=2000,
    long_share=0.1,
    ttft_p90_long_ns=150 * MS,
    ttft_p90_rest_ns=100 * MS,
    gaps_long=100,
    gap_p50_long_ns=12 * MS,
    gaps_short=100,
    gap_p50_short_ns=11 * MS,
    gaps_quiet=1000,
    gap_p50_quiet_ns=10 * MS,
    stretched_share=0.04,
)
CLEAN = StageFigures(
    name="10/s",
    load=10,
    ok_requests=200,
    attempted=200,
    output_tokens=100,
    total_tokens_per_s=1000,
    ttft_n=200,
    ttft_ns=105 * MS,
    ttft_p99_ns=300 * MS,
    e2e_ns=1100 * MS,
    gaps=20_000,
    gap_ns=10 * MS,
    gap_p50_ns=9 * MS,
    tokens_per_chunk=1.0,
    overloaded=False,
    server=SERVER,
    gpus=(GPU, replace(GPU, name="GPU 1 of h")),
    prefills=PREFILLS,
)
WARM = ColdStart(requests=10, ttft_ns=120 * MS, window_p50_ns=100 * MS, matters=False)
RUN: dict[str, Any] = {"cold_start": WARM, "worker_samples": 60, "later_turns": 0.5}
SLOW = GeneratorDoubt(code="cpu_saturated", sentence="Worker w used 99 % of a core.", invalid=False)


def stage(**figures: Any) -> StageFigures:
    return replace(CLEAN, **figures)


def server(**figures: Any) -> StageFigures:
    return stage(server=replace(SERVER, **figures))


def gpus(**figures: Any) -> StageFigures:
    return stage(gpus=[replace(gpu, **figures) for gpu in CLEAN.gpus])


def prefills(**figures: Any) -> StageFigures:
    return stage(prefills=replace(PREFILLS, **figures))


def answers(*stages: StageFigures, **run: Any) -> dict[str, Finding | Need | None]:
    found = diagnose(RunFigures(stages=stages, **(RUN | run)))
    told: dict[str, Finding | Need | None] = {finding.code: finding for finding in found.findings}
    told |= dict.fromkeys(found.not_found)
    told |= dict(found.not_judged)
    assert set(told) == set(TITLES)
    assert len(found.findings) + len(found.not_found) + len(found.not_judged) == len(TITLES), "each rule once"
    return told


def finding(code: str, *stages: StageFigures, **run: Any) -> Finding:
    """The only one."""
    told = answers(*stages, **run)
    found = [one for one in told.values() if isinstance(one, Finding)]
    assert [one.code for one in found] == [code]
    return found[0]


def test_every_rule_has_a_title() -> None:
    assert sorted(code for code, _ in RULES) == sorted(TITLES)


def test_a_server_with_time_to_spare() -> None:
    found = diagnose(RunFigures(stages=[CLEAN], **RUN))
    assert found.as_json() == {"findings": [], "not_found": list(TITLES), "not_judged": []}


def test_nothing_is_known() -> None:
    """No rule fires, and none is silent about it."""
    found = diagnose(RunFigures(stages=[StageFigures(name="window")]))
    assert (found.findings, found.not_found) == ((), ("refusals",)), "no request was refused"
    assert dict(found.not_judged) == {
        "kv_cache_pressure": Need.SERVER,
        "queueing": Need.SERVER,
        "long_prompts": Need.PROMPT_LENGTHS,
        "compute_bound": Need.GPU,
        "memory_bound_decode": Need.GPU,
        "throttling": Need.GPU,
        "uneven_gpus": Need.GPU,
        "client_bound": Need.WORKER_HEALTH,
        "network_bound": Need.SERVER,
        "buffered_stream": Need.STREAMS,
        "prefix_cache_unused": Need.SERVER,
        "cold_start": Need.WARMUP,
    }


def test_sources_that_do_not_tell_everything() -> None:
    told = answers(stage(server=ServerFigures(), gpus=[GpuFigures(name="a"), GpuFigures(name="b")]), later_turns=None)
    assert {code: need for code, need in told.items() if isinstance(need, Need)} == {
        "kv_cache_pressure": Need.SERVER_KV_CACHE,
        "queueing": Need.SERVER_QUEUE,
        "prefix_cache_unused": Need.SERVER_PREFIX_CACHE,
        "network_bound": Need.SERVER_TTFT,
        "compute_bound": Need.GPU_UTILIZATION,
        "memory_bound_decode": Need.GPU_ACTIVITY,
        "throttling": Need.THROTTLE_REASONS,
        "uneven_gpus": Need.GPU_UTILIZATION,
    }
    told = answers(stage(gpus=[replace(GPU, tensor_activity=None)]), later_turns=None)
    assert told["uneven_gpus"] is Need.TWO_GPUS
    assert told["compute_bound"] is Need.MORE_STAGES
    assert told["prefix_cache_unused"] is Need.REPEATED_PROMPTS
    assert str(THRESHOLDS.prompt_requests) in Need.PROMPT_LENGTHS
    assert str(THRESHOLDS.stream_gaps) in Need.STREAMS


def test_a_rule_is_judged_where_one_stage_has_its_data() -> None:
    assert answers(stage(server=None), CLEAN)["queueing"] is None
    assert answers(stage(server=None), stage(server=None))["queueing"] is Need.SERVER


def test_queueing() -> None:
    queue: dict[str, Any] = {"waiting_mean": 20.0, "waiting_first": 2.0, "waiting_last": 45.0, "queue_ns": 90 * MS}
    found = finding("queueing", server(**queue, waiting_grows=True))
    assert found.sentence == (
        "requests waited for their turn at the server: its queue grew from 2 to 45 requests while at most 4 ran; the "
        "wait was 90 ms (90 %) of the 100 ms to the first token there; TTFT p99 was 300 ms."
    )
    assert found.weight == pytest.approx(0.9)
    assert found.figures["waiting_last"] == 45
    assert found.attempt.startswith("a higher --max-num-seqs (the KV cache was at most 50 % full), then")
    steady = finding("queueing", server(**queue))
    assert "its queue held 20 requests on average while at most 4 ran;" in steady.sentence
    short = stage(server=replace(SERVER, **{**queue, "waiting_grows": None}), overloaded=True)
    assert "its queue grew from 2 to 45 requests" in finding("queueing", short).sentence
    fuller = finding("queueing", server(**queue, kv_cache_max=0.9))
    assert fuller.attempt.startswith("a higher --max-num-seqs or --max-num-batched-tokens, or more replicas")


def test_queueing_of_which_only_the_number_is_known() -> None:
    alone = ServerFigures(waiting_mean=9, waiting_first=2, waiting_last=18, waiting_grows=True)
    found = answers(stage(server=alone, ttft_p99_ns=None))["queueing"]
    assert isinstance(found, Finding)
    assert found.sentence == "requests waited for their turn at the server: its queue grew from 2 to 18 requests."
    assert found.weight == 0.5


@pytest.mark.parametrize(
    "figures",
    [
        {"waiting_mean": 0.9, "queue_ns": 90 * MS},  # hardly any
        {"waiting_mean": 20.0, "queue_ns": 49 * MS},  # most of the time goes elsewhere, and the queue stays
        {"waiting_mean": 20.0, "queue_ns": None},
    ],
)
def test_no_queueing(figures: dict[str, Any]) -> None:
    assert answers(server(**figures))["queueing"] is None


def test_kv_cache_pressure() -> None:
    found = finding("kv_cache_pressure", server(kv_cache_max=0.99, preemptions=30.4))
    assert found.sentence == (
        "the KV cache was up to 99 % full, running requests were preempted 30 times while 200 finished, each to "
        "compute its tokens anew."
    )
    assert found.weight == pytest.approx(0.152)
    assert "--gpu-memory-utilization" in found.attempt
    assert "a lower --max-num-seqs" in found.attempt


def test_kv_cache_pressure_stands_before_the_queue_that_it_makes() -> None:
    found = diagnose(RunFigures(stages=[server(kv_cache_max=0.96, waiting_mean=7.0, queue_ns=80 * MS)], **RUN)).findings
    assert [one.code for one in found] == ["kv_cache_pressure", "queueing"]
    assert found[0].sentence == "the KV cache was up to 96 % full, 7 requests waited on average."
    assert found[1].attempt.startswith("first what helps against KV-cache pressure")


@pytest.mark.parametrize(
    "figures",
    [
        {"kv_cache_max": 1.0},  # full, and nobody waits for it
        {"waiting_mean": 7.0, "queue_ns": 40 * MS, "kv_cache_max": 0.94},
        {"preemptions": 1.0},  # of 200
    ],
)
def test_no_kv_cache_pressure(figures: dict[str, Any]) -> None:
    assert answers(server(**figures))["kv_cache_pressure"] is None


def test_prefix_cache_unused() -> None:
    found = finding("prefix_cache_unused", server(prefix_cache_hit_rate=0.02))
    assert found.sentence == (
        "50 % of the requests repeat a conversation's earlier turns, and the prefix cache held 2 % of the tokens."
    )
    assert found.attempt.startswith("--enable-prefix-caching")
    assert "replica" not in found.attempt
    off = finding("prefix_cache_unused", server(prefix_cache_hit_rate=None, prefix_cache_queries=0.0), targets=3)
    assert "and the prefix cache was never asked." in off.sentence
    assert off.attempt.endswith("a router that keeps a conversation on one replica: requests went to 3 in turn")


def test_a_prefix_cache_that_is_used_or_has_nothing_to_keep() -> None:
    assert answers(server(prefix_cache_hit_rate=0.06))["prefix_cache_unused"] is None
    assert answers(server(prefix_cache_hit_rate=0.0), later_turns=0.19)["prefix_cache_unused"] is None
    assert answers(server(prefix_cache_hit_rate=None))["prefix_cache_unused"] is Need.SERVER_PREFIX_CACHE
    assert answers(server(prefix_cache_hit_rate=0.0), later_turns=0.0)["prefix_cache_unused"] is Need.REPEATED_PROMPTS


def test_prefix_cache_unused_by_prompts_that_begin_alike() -> None:
    found = finding("prefix_cache_unused", server(prefix_cache_hit_rate=0.02), later_turns=0.0, shared_prefix=0.84)
    assert found.sentence == (
        "84 % of the prompt tokens are a beginning that an earlier prompt had, and the prefix cache held 2 % of the "
        "tokens."
    )
    assert found.weight == pytest.approx(0.42)
    assert found.attempt == "--enable-prefix-caching; if it is on, more room for the KV cache"
    cold = server(prefix_cache_hit_rate=0.02)
    spread = finding("prefix_cache_unused", cold, later_turns=None, shared_prefix=0.84, targets=2)
    assert spread.attempt.endswith(
        "a router that keeps prompts that begin alike on one replica: requests went to 2 in turn"
    )
    both = finding("prefix_cache_unused", cold, shared_prefix=0.84)
    assert both.sentence.startswith(
        "50 % of the requests repeat a conversation's earlier turns, 84 % of the prompt tokens are a beginning that"
    )
    assert (
        answers(server(prefix_cache_hit_rate=0.8), later_turns=None, shared_prefix=0.84)["prefix_cache_unused"] is None
    )
    assert answers(cold, later_turns=None, shared_prefix=0.19)["prefix_cache_unused"] is None
    nothing_alike = answers(cold, later_turns=None, shared_prefix=None)
    assert nothing_alike["prefix_cache_unused"] is Need.REPEATED_PROMPTS
    assert answers(cold, later_turns=0.0, shared_prefix=0.0)["prefix_cache_unused"] is Need.REPEATED_PROMPTS


def test_cold_start() -> None:
    cold = ColdStart(requests=10, ttft_ns=1200 * MS, window_p50_ns=100 * MS, matters=True)
    found = finding("cold_start", CLEAN, cold_start=cold)
    assert found.sentence == (
        "TTFT of the first 10 requests of the warm-up was 1.2 s on average, and 100 ms (p50) in the window."
    )
    assert found.stages == ()
    assert answers(CLEAN, cold_start=WARM)["cold_start"] is None


DECODING: dict[str, Any] = {"utilization": 0.98, "sm_activity": 0.58, "tensor_activity": 0.02, "dram_activity": 0.55}
"""Thin matrix products on an H200; below, thick ones."""
MATMUL: dict[str, Any] = {"utilization": 0.99, "sm_activity": 0.96, "tensor_activity": 0.93, "dram_activity": 0.17}


def test_memory_bound_decode() -> None:
    found = finding("memory_bound_decode", gpus(**DECODING, memory_bandwidth_utilization=0.7))
    assert found.sentence == (
        "the GPUs moved data more than they computed (of the time: tensor cores 2 %, SMs 58 %, memory 55 %), although "
        "some kernel ran for 98 %: each step reads all weights and the KV cache for few tokens."
    )
    assert found.weight == pytest.approx(0.55)


def test_memory_bound_decode_by_nvml_alone() -> None:
    by_nvml = {"dram_activity": None, "tensor_activity": None, "memory_bandwidth_utilization": 0.7}
    found = answers(gpus(**DECODING | by_nvml))["memory_bound_decode"]
    assert isinstance(found, Finding)
    assert "(of the time: SMs 58 %, memory (by NVML) 70 %)" in found.sentence
    assert answers(gpus(**DECODING | by_nvml | {"memory_bandwidth_utilization": 0.24}))["memory_bound_decode"] is None
    unknown = by_nvml | {"sm_activity": None}
    assert answers(gpus(**DECODING | unknown))["memory_bound_decode"] is Need.GPU_ACTIVITY


def test_not_memory_bound() -> None:
    assert answers(gpus(**MATMUL))["memory_bound_decode"] is None
    assert answers(gpus(**DECODING | {"dram_activity": 0.39}))["memory_bound_decode"] is None


def test_a_gpu_that_the_server_does_not_use_hides_nothing() -> None:
    told = answers(stage(gpus=[replace(GPU, **DECODING), GpuFigures(name="GPU 1 of h", utilization=0.0)]))
    assert isinstance(told["memory_bound_decode"], Finding)
    found = told["uneven_gpus"]
    assert isinstance(found, Finding)
    assert found.sentence == "GPU 1 of h ran nothing while the others worked."


def test_compute_bound() -> None:
    found = finding("compute_bound", gpus(**MATMUL))
    assert found.sentence == "the GPUs computed (of the time: tensor cores 93 %, SMs 96 %, memory 17 %)."
    assert found.weight == pytest.approx(0.93)
    assert answers(gpus(**DECODING))["compute_bound"] is None


def test_compute_bound_by_tokens_that_are_flat_over_stages() -> None:
    plain = [GpuFigures(name="GPU 0 of h", utilization=0.99)]
    low, high = stage(gpus=plain), stage(gpus=plain, name="20/s", load=20, total_tokens_per_s=1040)
    found = answers(low, high)["compute_bound"]
    assert isinstance(found, Finding)
    assert found.sentence == (
        "some kernel ran for 99 % of the time (whether it computed, tensor activity would tell), and the load of 20/s "
        "brought 1,040 tokens/s where 10/s had 1,000."
    )
    assert found.stages == ("20/s",)
    assert answers(low, replace(high, total_tokens_per_s=1060))["compute_bound"] is None, "more load brought more"
    assert answers(low, replace(high, gpus=[GpuFigures(name="a", utilization=0.9)]))["compute_bound"] is None
    assert answers(low, replace(high, load=12))["compute_bound"] is Need.MORE_STAGES, "hardly more load"
    waits_for_memory = [GpuFigures(name="a", utilization=0.99, dram_activity=0.6)]
    assert answers(low, replace(high, gpus=waits_for_memory))["compute_bound"] is None


def test_uneven_gpus() -> None:
    found = finding("uneven_gpus", stage(gpus=[GPU, replace(GPU, name="GPU 1 of h", sm_activity=0.3)]))
    assert found.sentence == "GPU 0 of h was busy for 60 % of the time (sm activity) and GPU 1 of h for 30 %."
    assert found.weight == pytest.approx(0.3)
    by_utilization = [GpuFigures(name=name, utilization=busy) for name, busy in (("a", 0.4), ("b", 0.7))]
    told = answers(stage(gpus=by_utilization))["uneven_gpus"]
    assert isinstance(told, Finding)
    assert told.sentence == "b was busy for 70 % of the time (utilization) and a for 40 %."
    assert answers(CLEAN)["uneven_gpus"] is None
    idle = [GpuFigures(name=name, utilization=0.0) for name in "ab"]
    assert answers(stage(gpus=idle))["uneven_gpus"] is None, "no load at all"


def test_throttling() -> None:
    found = finding("throttling", gpus(throttled={"hw_thermal_slowdown": 0.25, "sw_power_cap": 0.05}))
    assert found.sentence == (
        "the clocks of GPU 1 of h (and 1 more) were held down for 25 % of the time: hw thermal slowdown."
    )
    assert found.attempt.startswith("cooling")
    capped = finding("throttling", stage(gpus=[replace(GPU, throttled={"sw_power_cap": 0.4}), GPU]))
    assert capped.sentence == "the clocks of GPU 0 of h were held down for 40 % of the time: sw power cap."
    assert capped.attempt.startswith("the power limit")
    assert answers(gpus(throttled={}))["throttling"] is None


def test_long_prompts_that_other_streams_wait_for() -> None:
    found = finding("long_prompts", prefills(gap_p50_long_ns=40 * MS, stretched_share=0.3))
    assert found.sentence == (
        "while prompts of 2,000 tokens and more (10 % of them) were read, other streams waited 40 ms for their "
        "next token (p50), and 10 ms at other times: 30 % of the time between tokens; the TTFT p90 of such prompts was "
        "150 ms, and 100 ms for the others."
    )
    assert found.weight == pytest.approx(0.3)
    assert "--max-num-batched-tokens" in found.attempt


def test_long_prompts_that_are_late_themselves() -> None:
    found = finding("long_prompts", prefills(ttft_p90_long_ns=900 * MS))
    assert found.sentence == (
        "TTFT p90 of prompts of 2,000 tokens and more (10 % of them) was 900 ms, and 100 ms for the others."
    )
    assert found.weight == 0.2


@pytest.mark.parametrize(
    "figures",
    [
        {},
        {"gap_p50_long_ns": 40 * MS},  # but seldom
        {"stretched_share": 0.3},  # but not by long prompts
        {"gap_p50_long_ns": 40 * MS, "stretched_share": 0.3, "gap_p50_short_ns": 35 * MS},  # by short ones as well
        {"gap_p50_long_ns": 40 * MS, "stretched_share": 0.3, "gaps_long": 49},
        {"gap_p50_long_ns": 40 * MS, "stretched_share": 0.3, "gaps_quiet": 49},
        {"gap_p50_long_ns": None, "gap_p50_quiet_ns": None, "ttft_p90_long_ns": None},
    ],
)
def test_no_long_prompts(figures: dict[str, Any]) -> None:
    assert answers(prefills(**figures))["long_prompts"] is None


def test_long_prompts_of_too_few_requests() -> None:
    assert answers(prefills(requests=199, stretched_share=0.9))["long_prompts"] is Need.PROMPT_LENGTHS


def test_refusals() -> None:
    found = finding("refusals", stage(attempted=1000, refused=250), stage(attempted=1000, refused=10))
    assert found.sentence.startswith("250 of 1,000 requests (25 %) were refused with status 429 or 503: a limit of the")
    assert (found.weight, len(found.stages)) == (0.25, 2)
    assert "--max-queued-requests" in found.attempt
    assert answers(stage(attempted=1000, refused=9))["refusals"] is None
    assert answers(stage(attempted=19, refused=19))["refusals"] is None


def test_a_run_without_an_ok_request_blames_no_generator() -> None:
    failing = replace(CLEAN, ok_requests=0)
    told = diagnose(RunFigures(stages=[failing], worker_samples=10, doubts=[SLOW]))
    assert "client_bound" not in [finding.code for finding in told.findings]
    assert dict(told.not_judged)["client_bound"] is Need.OK_REQUESTS


def test_client_bound() -> None:
    late = GeneratorDoubt(code="schedule_lag", sentence="Requests were late.", invalid=True)
    found = finding("client_bound", CLEAN, doubts=[SLOW, late])
    assert found.sentence == (
        "the generator may have been a limit itself. Worker w used 99 % of a core. Requests were late."
    )
    assert (found.weight, found.stages) == (1.0, ())
    assert finding("client_bound", CLEAN, doubts=[SLOW]).weight == 0.5
    slots = GeneratorDoubt(code="slots_full", sentence="Every slot was busy.", invalid=False, by_full_slots=True)
    dropped = GeneratorDoubt(code="rate_missed", sentence="940 of 1000 were sent.", invalid=False, by_full_slots=True)
    for doubts in ([slots], [dropped], [dropped, slots]):
        only_slots = finding("client_bound", CLEAN, doubts=doubts)
        assert only_slots.attempt == "a higher -u"
        assert (
            only_slots.confirm == "with twice the slots the verdict has nothing to say, and throughput rises or stays"
        )
    both = finding("client_bound", CLEAN, doubts=[SLOW, slots])
    assert both.attempt.startswith("a higher -u; more worker processes")
    assert "twice the slots and workers" in both.confirm
    assert answers(CLEAN)["client_bound"] is None
    assert answers(CLEAN, doubts=[SLOW], worker_samples=0)["client_bound"] is Need.WORKER_HEALTH


FAR = replace(SERVER, network_ns=100 * MS)


def test_network_bound() -> None:
    found = finding("network_bound", stage(server=FAR, ttft_ns=200 * MS))
    assert found.sentence == (
        "of a mean TTFT of 200 ms the server itself knows 100 ms: 100 ms (50 %) lie between it and the clients."
    )
    assert found.weight == pytest.approx(0.5)


def test_not_network_bound() -> None:
    assert answers(stage(server=FAR, ttft_ns=400 * MS))["network_bound"] is None, "a quarter"
    near = replace(SERVER, ttft_ns=20 * MS, network_ns=19 * MS)
    assert answers(stage(server=near, ttft_ns=39 * MS))["network_bound"] is None, "too little to care for"
    assert answers(stage(server=FAR, ttft_ns=200 * MS), doubts=[SLOW])["network_bound"] is None


@pytest.mark.parametrize(
    "figures",
    [
        {"server": replace(FAR, ttft_n=260)},
        {"overloaded": True},
        {"ttft_n": 19, "server": replace(FAR, ttft_n=19)},
        {"server": replace(FAR, network_ns=None)},
    ],
)
def test_network_of_other_requests(figures: dict[str, Any]) -> None:
    """In an overload the server's first tokens in a stage are of requests that came before it."""
    told = answers(stage(**{"server": FAR, "ttft_ns": 200 * MS} | figures))
    assert told["network_bound"] is Need.SERVER_TTFT


def test_a_stream_in_bursts() -> None:
    found = finding("buffered_stream", stage(gap_p50_ns=0.05 * MS))
    assert found.sentence == (
        "chunks came in bursts: half of the gaps are at most 50 µs, and their mean is 10 ms: users see text in jerks, "
        "and TTFT, ITL and TPOT are of what holds it back."
    )
    assert "proxy_buffering off" in found.attempt


def test_an_answer_that_is_held_back_whole() -> None:
    held = stage(server=FAR, ttft_ns=1000 * MS, e2e_ns=1001 * MS, gap_ns=0.01 * MS, gap_p50_ns=0.0)
    found = finding("buffered_stream", held)
    assert found.sentence == (
        "answers came whole: the first token after 1 s of 1.001 s (means), though they have 100 tokens: users see text "
        "in jerks, and TTFT, ITL and TPOT are of what holds it back."
    )
    assert found.weight == 1
    assert answers(replace(held, output_tokens=9.0, gap_p50_ns=9000.0))["buffered_stream"] is None


def test_many_tokens_in_a_chunk() -> None:
    found = finding("buffered_stream", stage(tokens_per_chunk=8.0))
    assert found.sentence == (
        "each chunk brought 8 tokens (mean): users see text in jerks, and TTFT, ITL and TPOT are of what holds it back."
    )
    assert found.attempt.startswith("--stream-interval 1")
    assert answers(stage(tokens_per_chunk=3.9))["buffered_stream"] is None


def test_a_stream_that_was_read_late_says_nothing_of_the_server() -> None:
    assert answers(stage(gap_p50_ns=0.0), doubts=[SLOW])["buffered_stream"] is None
    assert answers(stage(gaps=99))["buffered_stream"] is Need.STREAMS


def test_the_heaviest_finding_comes_first_and_names_its_stages() -> None:
    light = replace(server(waiting_mean=5.0, queue_ns=60 * MS), name="20/s")
    heavy = replace(server(waiting_mean=50.0, queue_ns=95 * MS, preemptions=20.0), name="30/s")
    found = diagnose(RunFigures(stages=[CLEAN, light, heavy], **RUN)).findings
    assert [(one.code, one.stages) for one in found] == [
        ("queueing", ("30/s", "20/s")),
        ("kv_cache_pressure", ("30/s",)),
    ]
    assert [one.weight for one in found] == [pytest.approx(0.95), pytest.approx(0.1)]
    assert found[0].as_json()["title"] == "queueing"
