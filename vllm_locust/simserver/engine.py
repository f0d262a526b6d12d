"""Continuous batching as a pure discrete simulation: vLLM's scheduler (first come first served) with a cost model.

Time is given, never read, so that the same engine runs behind a socket and in an offline search:

    engine = Engine(EngineConfig())
    engine.add(EngineRequest("a", prompt_tokens=220, output_tokens=180), now_ns=0)
    now_ns = 0
    while engine.has_work:
        step = engine.step(now_ns)
        now_ns += step.duration_ns        # step.outputs leave the engine at this moment

A driver in real time calls ``schedule`` at the beginning of a step and ``complete`` at its end, so that gauges read in
between are those of a running step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_locust.errors import UsageError
from vllm_locust.simserver.kv_cache import BlockPool


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits under vLLM's names, and the cost of a step.

    The defaults follow an 8B model on one H200: 8.6 ms per output token at 64 running requests of ShareGPT's lengths.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    num_gpu_blocks: int = 52_000
    block_size: int = 16
    enable_prefix_caching: bool = True
    max_model_len: int = 32_768
    step_base_ns: int = 5_000_000
    prefill_ns_per_token: int = 25_000
    decode_ns_per_seq: int = 30_000
    kv_ns_per_token: int = 25
    """Reading the KV cache: per token of context of each decoding request."""

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)} must be at least 1"
            for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_model_len")
            if getattr(self, name) < 1
        ]
        if not problems and -(-self.max_model_len // self.block_size) > self.num_gpu_blocks - 1:
            problems.append(
                f"the KV cache of {self.num_gpu_blocks - 1} usable blocks of {self.block_size} tokens cannot hold one"
                f" request of max_model_len={self.max_model_len}; lower max_model_len or raise num_gpu_blocks_override"
            )
        if problems:
            raise UsageError(*problems)


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One sequence to generate. ``block_keys`` names the content of each full block of prompt and output, in order;
    equal keys mean equal content from the first token on. Without keys nothing of it is cached."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    block_keys: Sequence[int] = ()
    generated: int = 0
    computed: int = 0
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; None until first scheduled."""
    num_preemptions: int = 0
    queued_ns: int | None = None
    scheduled_ns: int | None = None
    blocks: list[int] = field(default_factory=list)
    ended: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step does. Outputs and ends happen ``duration_ns`` after its start."""

    start_ns: int
    duration_ns: int
    scheduled: tuple[tuple[EngineRequest, int], ...]
    """Each request in the batch with the tokens computed for it."""
    prefill_tokens: int
    decode_seqs: int
    outputs: tuple[tuple[EngineRequest, int], ...]
    """Each request that yields tokens, with how many."""
    finished: tuple[EngineRequest, ...]
    preempted: tuple[EngineRequest, ...]


class Engine:
    """Requests wait in one queue, run in one batch, and share one KV cache."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_gpu_blocks)
        self.waiting: deque[EngineRequest] = deque()
        self.running: list[EngineRequest] = []
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: EngineRequest, now_ns: int) -> None:
        total = request.prompt_tokens + request.output_tokens
        if request.prompt_tokens < 1 or request.output_tokens < 1 or total > self.config.max_model_len:
            raise ValueError(
                f"request {request.request_id}: {request.prompt_tokens} prompt and {request.output_tokens} output"
                f" tokens do not fit into max_model_len={self.config.max_model_len}"
            )
        request.queued_ns = now_ns
        self.waiting.append(request)

    def abort(self, request: EngineRequest) -> None:
        """Take a request out, also in mid-step; one that has ended is left alone."""
        if request.ended:
            return
        (self.running if request in self.running else self.waiting).remove(request)
        self._end(request)

    def step(self, now_ns: int) -> StepResult:
        result = self.schedule(now_ns)
        self.complete(result)
        return result

    def schedule(self, now_ns: int) -> StepResult:
        """Fill the batch: running requests first, then, if nobody had to be preempted, waiting ones."""
        batch: list[tuple[EngineRequest, int]] = []
        budget, preempted = self._schedule_running(batch)
        if not preempted:
            self._schedule_waiting(batch, budget, now_ns)
        outputs = tuple((r, 1) for r, n in batch if r.computed + n == r.prompt_tokens + r.generated)
        decoding = [r for r, n in batch if r.generated and n == 1 and r.computed + 1 == r.prompt_tokens + r.generated]
        prefill_tokens = sum(n for _, n in batch) - len(decoding)
        config = self.config
        duration_ns = (
            config.step_base_ns
            + prefill_tokens * config.prefill_ns_per_token
            + len(decoding) * config.decode_ns_per_seq
            + sum(r.computed for r in decoding) * config.kv_ns_per_token
        )
        return StepResult(
            start_ns=now_ns,
            duration_ns=duration_ns,
            scheduled=tuple(batch),
            prefill_tokens=prefill_tokens,
            decode_seqs=len(decoding),
            outputs=outputs,
            finished=tuple(r for r, _ in outputs if r.generated + 1 == r.output_tokens),
            preempted=tuple(preempted),
        )

    def complete(self, result: StepResult) -> None:
        """The end of a step: requests aborted during it are skipped, finished ones leave."""
        for request, tokens in result.scheduled:
            if not request.ended:
                request.computed += tokens
        for request, tokens in result.outputs:
            if not request.ended:
                request.generated += tokens
        gone = [r for r in result.finished if not r.ended]
        for request in gone:
            self._end(request)
        if gone:
            self.running = [r for r in self.running if not r.ended]

    def _end(self, request: EngineRequest) -> None:
        request.ended = True
        self.pool.release(request.blocks)
        request.blocks = []

    def _schedule_running(self, batch: list[tuple[EngineRequest, int]]) -> tuple[int, list[EngineRequest]]:
        budget = self.config.max_num_batched_tokens
        preempted: list[EngineRequest] = []
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            tokens = min(request.prompt_tokens + request.generated - request.computed, budget)
            while not self._grow(request, tokens):
                victim = self.running.pop()
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    return budget, preempted
            batch.append((request, tokens))
            budget -= tokens
            index += 1
        return budget, preempted

    def _schedule_waiting(self, batch: list[tuple[EngineRequest, int]], budget: int, now_ns: int) -> None:
        while self.waiting and budget and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            total = request.prompt_tokens + request.generated
            size = self.config.block_size
            # The last token is always computed: its logits are needed.
            hits = self.pool.match(request.block_keys, (total - 1) // size) if self.config.enable_prefix_caching else []
            tokens = min(total - len(hits) * size, budget)
            needed = -(-(len(hits) * size + tokens) // size) - len(hits)
            if needed + self.pool.unused(hits) > self.pool.free:
                return
            self.pool.take(hits)
            request.blocks = list(hits)
            request.computed = len(hits) * size
            self._grow(request, tokens)
            if request.cached_tokens is None:
                request.cached_tokens = request.computed
                self.prefix_queries += request.prompt_tokens if self.config.enable_prefix_caching else 0
                self.prefix_hits += request.computed
            if request.scheduled_ns is None:
                request.scheduled_ns = now_ns
            self.running.append(self.waiting.popleft())
            batch.append((request, tokens))
            budget -= tokens

    def _grow(self, request: EngineRequest, tokens: int) -> bool:
        """Blocks for the next ``tokens``; full ones are findable at once, as in vLLM, also within the same step."""
        size = self.config.block_size
        end = request.computed + tokens
        needed = -(-end // size) - len(request.blocks)
        if needed > self.pool.free:
            return False
        if needed > 0:
            request.blocks += self.pool.allocate(needed)
        if self.config.enable_prefix_caching:
            for index in range(request.computed // size, min(end // size, len(request.block_keys))):
                self.pool.remember(request.blocks[index], request.block_keys[index])
        return True

    def _preempt(self, request: EngineRequest) -> None:
        """By recomputation: all its blocks go, its tokens stay, and it waits at the head of the queue."""
        self.pool.release(request.blocks)
        request.blocks = []
        request.computed = 0
        request.num_preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)
