"""What decides when a token is ready: the simulated engine in real time, or a fixed script per stream."""

from __future__ import annotations

from typing import Protocol

from vllm_locust import clock
from vllm_locust.simserver.deadline_timer import DeadlineTimer
from vllm_locust.simserver.engine import Engine, EngineRequest, StepResult
from vllm_locust.simserver.server_metrics import Gauges, ServerMetrics


class Sequence(Protocol):
    """One choice of one request, as the pacer sees it."""

    request: EngineRequest
    received_mono_ns: int

    def on_token(self, now_ns: int) -> None:
        """The next token is ready. ``request.generated`` counts it already."""


class Pacer(Protocol):
    def submit(self, sequence: Sequence) -> None: ...
    def cancel(self, sequence: Sequence) -> None: ...
    def gauges(self) -> Gauges: ...
    def reset_prefix_cache(self) -> bool: ...


class EnginePacer:
    """Steps follow one another at the times that the engine gives, so that a run equals the offline simulation of the
    same arrivals. Only when the process is late by more than a whole step does the next one begin late.

    ``frontend_ns`` passes between the request's last byte and its entry into the engine's queue.
    """

    def __init__(self, engine: Engine, timer: DeadlineTimer, metrics: ServerMetrics, frontend_ns: int) -> None:
        self._engine = engine
        self._timer = timer
        self._metrics = metrics
        self._frontend_ns = frontend_ns
        self._sequences: dict[EngineRequest, Sequence] = {}
        self._stepping = False

    def submit(self, sequence: Sequence) -> None:
        self._sequences[sequence.request] = sequence
        if self._frontend_ns:
            self._timer.call_at(sequence.received_mono_ns + self._frontend_ns, lambda: self._enter(sequence))
        else:
            self._enter(sequence)

    def cancel(self, sequence: Sequence) -> None:
        if self._sequences.pop(sequence.request, None) is not None and sequence.request.queued_ns is not None:
            self._engine.abort(sequence.request)

    def gauges(self) -> Gauges:
        engine = self._engine
        return Gauges(
            running=len(engine.running),
            waiting=len(engine.waiting),
            kv_cache_usage=engine.pool.usage,
            preemptions=engine.preemptions,
            prefix_queries=engine.prefix_queries,
            prefix_hits=engine.prefix_hits,
        )

    def reset_prefix_cache(self) -> bool:
        return self._engine.pool.forget_all()

    def _enter(self, sequence: Sequence) -> None:
        if sequence.request not in self._sequences:
            return
        now_ns = clock.monotonic_ns()
        self._engine.add(sequence.request, now_ns)
        if not self._stepping:
            self._begin(now_ns)

    def _begin(self, start_ns: int) -> None:
        result = self._engine.schedule(start_ns)
        self._stepping = True
        self._timer.call_at(start_ns + result.duration_ns, lambda: self._end(result))

    def _end(self, result: StepResult) -> None:
        now_ns = clock.monotonic_ns()
        outputs = [request for request, _ in result.outputs if not request.ended]
        self._engine.complete(result)
        if outputs:
            # As vLLM counts it: a prompt whole, in the step that gives its first token.
            prompts = sum(request.prompt_tokens for request in outputs if request.generated == 1)
            self._metrics.iteration_tokens.observe(prompts + len(outputs))
        self._stepping = False
        planned_ns = result.start_ns + result.duration_ns
        if self._engine.has_work:
            self._begin(planned_ns if now_ns - planned_ns < result.duration_ns else now_ns)
        for request in outputs:
            sequence = self._sequences.get(request)
            if sequence is None:
                continue
            if request.ended:
                del self._sequences[request]
            sequence.on_token(now_ns)


class FixedPacer:
    """The first token ``first_token_ns`` after the request was read, one more every ``token_interval_ns``: absolute
    deadlines for each stream alone, without batching, queue or cache."""

    def __init__(
        self, timer: DeadlineTimer, metrics: ServerMetrics, first_token_ns: int, token_interval_ns: int
    ) -> None:
        self._timer = timer
        self._metrics = metrics
        self._first_token_ns = first_token_ns
        self._token_interval_ns = token_interval_ns
        self._running: set[Sequence] = set()

    def submit(self, sequence: Sequence) -> None:
        request = sequence.request
        request.queued_ns = request.scheduled_ns = sequence.received_mono_ns
        request.cached_tokens = 0
        self._running.add(sequence)
        first_ns = sequence.received_mono_ns + self._first_token_ns
        self._call_at(first_ns, sequence, first_ns)

    def cancel(self, sequence: Sequence) -> None:
        self._running.discard(sequence)

    def gauges(self) -> Gauges:
        return Gauges(running=len(self._running))

    def reset_prefix_cache(self) -> bool:
        return True

    def _tick(self, sequence: Sequence, first_ns: int) -> None:
        """The next token of a sequence whose first was due at ``first_ns``."""
        if sequence not in self._running:
            return
        request = sequence.request
        request.generated += 1
        self._metrics.iteration_tokens.observe(1 + (request.prompt_tokens if request.generated == 1 else 0))
        if request.generated < request.output_tokens:
            self._call_at(first_ns + request.generated * self._token_interval_ns, sequence, first_ns)
        else:
            request.ended = True
            self._running.discard(sequence)
        sequence.on_token(clock.monotonic_ns())

    def _call_at(self, at_ns: int, sequence: Sequence, first_ns: int) -> None:
        self._timer.call_at(at_ns, lambda: self._tick(sequence, first_ns))
