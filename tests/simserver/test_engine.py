"""The scheduler in scenarios small enough to be worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_locust.errors import UsageError
from vllm_locust.simserver.engine import Engine, EngineConfig, EngineRequest, StepResult

MS = 1_000_000


def config(**changes: int | bool) -> EngineConfig:
    values: dict[str, int | bool] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 100,
        "num_gpu_blocks": 101,
        "block_size": 10,
        "enable_prefix_caching": False,
        "max_model_len": 400,
        "step_base_ns": 10 * MS,
        "prefill_ns_per_token": 1 * MS,
        "decode_ns_per_seq": 2 * MS,
        "kv_ns_per_token": 0,
    }
    return EngineConfig(**{**values, **changes})  # type: ignore[arg-type]


def run(engine: Engine, now_ns: int = 0) -> list[StepResult]:
    steps: list[StepResult] = []
    while engine.has_work:
        steps.append(engine.step(now_ns))
        now_ns += steps[-1].duration_ns
        assert len(steps) < 10_000
    return steps


def names(requests: tuple[EngineRequest, ...]) -> list[str]:
    return [request.request_id for request in requests]


def test_one_request_costs_one_prefill_step_and_one_step_per_further_token() -> None:
    engine = Engine(config())
    engine.add(EngineRequest("a", prompt_tokens=30, output_tokens=3), 5)
    steps = run(engine, 5)
    assert [step.duration_ns for step in steps] == [40 * MS, 12 * MS, 12 * MS]
    assert [step.start_ns for step in steps] == [5, 5 + 40 * MS, 5 + 52 * MS]
    assert [len(step.outputs) for step in steps] == [1, 1, 1]
    assert [names(step.finished) for step in steps] == [[], [], ["a"]]
    assert engine.pool.usage == 0


def test_context_costs_time_while_decoding() -> None:
    engine = Engine(config(kv_ns_per_token=1000))
    engine.add(EngineRequest("a", 30, 3), 0)
    assert [step.duration_ns for step in run(engine)] == [40 * MS, 12 * MS + 30_000, 12 * MS + 31_000]


def test_no_more_than_max_num_seqs_run_and_the_rest_wait_in_order() -> None:
    engine = Engine(config(max_num_seqs=2))
    for name, length in (("a", 2), ("b", 3), ("c", 1), ("d", 1)):
        engine.add(EngineRequest(name, 10, length), 0)
    first = engine.step(0)
    assert [request.request_id for request, _ in first.scheduled] == ["a", "b"]
    assert len(engine.waiting) == 2
    second = engine.step(first.duration_ns)
    assert names(second.finished) == ["a"]
    third = engine.schedule(0)
    assert [(request.request_id, tokens) for request, tokens in third.scheduled] == [("b", 1), ("c", 10)]
    assert (third.prefill_tokens, third.decode_seqs) == (10, 1)
    assert third.duration_ns == 10 * MS + 10 * MS + 2 * MS
    engine.complete(third)
    assert names(third.finished) == ["b", "c"]


def test_a_long_prompt_is_prefilled_in_chunks_beside_decoding_requests() -> None:
    engine = Engine(config())
    engine.add(EngineRequest("short", 10, 5), 0)
    engine.step(0)
    engine.add(EngineRequest("long", 250, 1), 0)
    steps = run(engine)
    assert [[(r.request_id, n) for r, n in step.scheduled] for step in steps] == [
        [("short", 1), ("long", 99)],
        [("short", 1), ("long", 99)],
        [("short", 1), ("long", 52)],
        [("short", 1)],
    ]
    assert [names(step.finished) for step in steps] == [[], [], ["long"], ["short"]]


def test_the_token_budget_is_shared_by_prompts() -> None:
    engine = Engine(config())
    for name in ("a", "b"):
        engine.add(EngineRequest(name, 80, 1), 0)
    steps = run(engine)
    assert [[(r.request_id, n) for r, n in step.scheduled] for step in steps] == [
        [("a", 80), ("b", 20)],
        [("b", 60)],
    ]


def test_a_full_cache_preempts_the_last_request_which_is_computed_again() -> None:
    # 6 usable blocks; two requests of 20 tokens take 4, and each needs a new block at its 21st and 31st token
    engine = Engine(config(num_gpu_blocks=7, max_model_len=60))
    engine.add(EngineRequest("a", 20, 25), 0)
    engine.add(EngineRequest("b", 20, 25), 0)
    steps = run(engine)
    preempting = [index for index, step in enumerate(steps) if step.preempted]
    # step 0 prefills both; steps 1 to 10 compute tokens 21 to 30; step 11 needs the 7th and 8th block
    assert preempting == [11]
    assert names(steps[11].preempted) == ["b"]
    assert [(r.request_id, n) for r, n in steps[11].scheduled] == [("a", 1)]
    assert engine.preemptions == 1
    # "a" takes its 25 tokens in steps 0 to 24; "b" has 11 of its own and computes all 31 when there is room again
    assert names(steps[24].finished) == ["a"]
    again = next(step for step in steps[12:] if any(r.request_id == "b" for r, _ in step.scheduled))
    assert steps.index(again) == 25
    assert [(r.request_id, n) for r, n in again.scheduled] == [("b", 31)]
    assert sum(n for step in steps for r, n in step.outputs if r.request_id == "b") == 25


def test_an_admitted_prefix_is_found_by_the_next_request() -> None:
    engine = Engine(config(enable_prefix_caching=True))
    keys = [1, 2, 3]
    first = EngineRequest("a", 35, 2, keys)
    engine.add(first, 0)
    assert run(engine)[0].prefill_tokens == 35
    second = EngineRequest("b", 35, 2, [1, 2, 9])
    engine.add(second, 0)
    assert run(engine)[0].prefill_tokens == 15
    assert (first.cached_tokens, second.cached_tokens) == (0, 20)
    assert (engine.prefix_queries, engine.prefix_hits) == (70, 20)


def test_the_last_prompt_token_is_always_computed() -> None:
    engine = Engine(config(enable_prefix_caching=True))
    for name in ("a", "b"):
        engine.add(EngineRequest(name, 30, 1, [1, 2, 3]), 0)
        last = run(engine)[0]
    assert last.prefill_tokens == 10


def test_generated_tokens_are_a_prefix_of_the_next_turn() -> None:
    engine = Engine(config(enable_prefix_caching=True))
    engine.add(EngineRequest("a", 10, 21, [1, 2, 3]), 0)
    run(engine)
    following = EngineRequest("b", 45, 1, [1, 2, 3, 4])
    engine.add(following, 0)
    run(engine)
    assert following.cached_tokens == 30


def test_the_least_recently_used_prefix_is_evicted() -> None:
    engine = Engine(config(enable_prefix_caching=True, num_gpu_blocks=7, max_model_len=60))
    for name, keys in (("a", [1, 2]), ("b", [3, 4]), ("a again", [1, 2])):
        engine.add(EngineRequest(name, 20, 1, keys), 0)
        run(engine)
    engine.add(EngineRequest("c", 40, 1, [5, 6, 7, 8]), 0)
    run(engine)
    kept = EngineRequest("a kept", 20, 1, [1, 2])
    engine.add(kept, 0)
    run(engine)
    assert kept.cached_tokens == 10
    lost = EngineRequest("b lost", 20, 1, [3, 4])
    engine.add(lost, 0)
    run(engine)
    assert lost.cached_tokens == 0


def test_resetting_the_prefix_cache_forgets_only_when_idle() -> None:
    engine = Engine(config(enable_prefix_caching=True))
    engine.add(EngineRequest("a", 20, 2, [1, 2]), 0)
    engine.step(0)
    assert not engine.pool.forget_all()
    run(engine)
    assert engine.pool.forget_all()
    fresh = EngineRequest("b", 20, 1, [1, 2])
    engine.add(fresh, 0)
    run(engine)
    assert fresh.cached_tokens == 0


def test_an_abort_in_mid_step_yields_nothing_and_frees_its_blocks() -> None:
    engine = Engine(config())
    gone, stays = EngineRequest("gone", 20, 9), EngineRequest("stays", 20, 1)
    engine.add(gone, 0)
    engine.add(stays, 0)
    step = engine.schedule(0)
    engine.abort(gone)
    engine.complete(step)
    assert (gone.generated, stays.generated) == (0, 1)
    assert not engine.has_work
    assert engine.pool.usage == 0
    engine.abort(gone)


def test_what_cannot_work_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="max_model_len=400"):
        config(num_gpu_blocks=40)
    with pytest.raises(UsageError) as caught:
        config(max_num_seqs=0, block_size=0)
    assert len(caught.value.problems) == 2
    with pytest.raises(ValueError, match="max_model_len=400"):
        Engine(config()).add(EngineRequest("a", 390, 11), 0)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(1, 64),
    st.booleans(),
)
def test_every_request_gets_exactly_its_tokens(
    requests: list[tuple[int, int, int]], seqs: int, budget: int, caching: bool
) -> None:
    limits = config(
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        num_gpu_blocks=12,
        max_model_len=100,
        enable_prefix_caching=caching,
    )
    engine = Engine(limits)
    made = [
        EngineRequest(str(i), prompt, length, [group * 100 + block for block in range((prompt + length) // 10)])
        for i, (prompt, length, group) in enumerate(requests)
    ]
    for request in made:
        engine.add(request, 0)
    steps = run(engine)
    for step in steps:
        assert len(step.scheduled) <= seqs
        assert sum(tokens for _, tokens in step.scheduled) <= budget
    assert [request.generated for request in made] == [length for _, length, _ in requests]
    assert engine.pool.usage == 0
    assert engine.pool.free == 11
