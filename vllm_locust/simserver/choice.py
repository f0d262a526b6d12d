"""One choice of an answer: which tokens it has, what kind each is, and what the server counts about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_locust.simserver.completion import Api
from vllm_locust.simserver.engine import EngineRequest
from vllm_locust.simserver.events import (
    Delta,
    WholeChoice,
    chat_logprobs,
    completion_logprobs,
    tool_call_arguments,
    tool_call_begin,
)
from vllm_locust.simserver.server_metrics import NS_PER_S, ServerMetrics
from vllm_locust.simserver.tokens import Output


@dataclass(frozen=True, slots=True)
class ChoiceShape:
    """How the tokens of an answer are split: reasoning first, then the answer or a tool call."""

    api: Api
    reasoning_field: str
    reasoning_tokens: int
    tool_name: str | None
    tool_call_id: str
    top_logprobs: int | None
    return_token_ids: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    delta: Delta
    kind: str
    text_bytes: int
    token_ids: list[int] | None
    logprobs: str


def told_to_nobody(_: Choice) -> None:
    """For a choice without an exchange, or after its exchange's end."""


@dataclass(slots=True, eq=False)
class Choice:
    """Its place in the answer, its tokens, and how many of them were sent."""

    index: int
    prompt: list[str]
    prompt_token_ids: list[int] | None
    request: EngineRequest
    output: Output
    shape: ChoiceShape
    received_mono_ns: int
    metrics: ServerMetrics
    ready: Callable[[Choice], None] = told_to_nobody
    """Told of each token; the exchange sets it."""
    sent: int = 0
    finish_reason: str | None = None
    first_ns: int | None = None
    last_ns: int = 0
    _texts_length: int = field(default=0)

    @property
    def complete(self) -> bool:
        return self.request.generated == self.request.output_tokens

    @property
    def answer_finish_reason(self) -> str:
        return "tool_calls" if self.shape.tool_name is not None else self.output.finish_reason

    def on_token(self, now_ns: int) -> None:
        metrics, request = self.metrics, self.request
        metrics.generation_tokens += 1
        if self.first_ns is None:
            self.first_ns = now_ns
            metrics.time_to_first_token.observe((now_ns - self.received_mono_ns) / NS_PER_S)
            metrics.prompt_tokens += request.prompt_tokens
            metrics.cached_tokens += request.cached_tokens or 0
        else:
            metrics.inter_token_latency.observe((now_ns - self.last_ns) / NS_PER_S)
        self.last_ns = now_ns
        if request.generated == request.output_tokens:
            self.count_finished("stop" if self.output.finish_reason == "stop" else "length")
        self.ready(self)

    def count_finished(self, reason: str) -> None:
        """Called once, when the engine is done with it; a client that went away is not counted, as by vLLM."""
        metrics, request = self.metrics, self.request
        metrics.finished[reason] += 1
        if self.first_ns is None or request.scheduled_ns is None or request.queued_ns is None:
            return
        decode_ns = self.last_ns - self.first_ns
        metrics.request_prompt_tokens.observe(request.prompt_tokens)
        metrics.request_generation_tokens.observe(request.generated)
        metrics.e2e_latency.observe((self.last_ns - self.received_mono_ns) / NS_PER_S)
        metrics.queue_time.observe((request.scheduled_ns - request.queued_ns) / NS_PER_S)
        metrics.inference_time.observe((self.last_ns - request.scheduled_ns) / NS_PER_S)
        metrics.prefill_time.observe((self.first_ns - request.scheduled_ns) / NS_PER_S)
        metrics.decode_time.observe(decode_ns / NS_PER_S)
        metrics.time_per_output_token.observe(decode_ns / max(request.generated - 1, 1) / NS_PER_S)
        metrics.num_preemptions.observe(request.num_preemptions)
        metrics.prefill_kv_computed_tokens.observe(request.prompt_tokens - (request.cached_tokens or 0))

    def next_boundary(self) -> int:
        """Where the chunk that begins with the next token must end: kinds are never mixed in one chunk."""
        answer = self.shape.reasoning_tokens
        if self.sent < answer:
            return answer
        if self.shape.tool_name is not None and self.sent == answer:
            return answer + 1
        return self.request.output_tokens

    def take(self, end: int) -> Chunk:
        """The chunk of all tokens from the last one sent up to ``end``."""
        start, self.sent = self.sent, end
        text = "".join(self.output.texts[start:end])
        ids = self.output.token_ids[start:end] if self.shape.return_token_ids else None
        shape = self.shape
        if start < shape.reasoning_tokens:
            return Chunk(Delta(text, shape.reasoning_field), "reasoning", len(text), ids, self._logprobs(start, end))
        if shape.tool_name is not None:
            if start == shape.reasoning_tokens:
                begin = Delta("", json=tool_call_begin(shape.tool_call_id, shape.tool_name))
                return Chunk(begin, "tool_call", len(shape.tool_name), ids, self._logprobs(start, end))
            arguments = self._arguments(start, end)
            delta = Delta("", json=tool_call_arguments(arguments))
            return Chunk(delta, "tool_call", len(arguments), ids, self._logprobs(start, end))
        kind = "content" if shape.api == "chat" else "text"
        return Chunk(Delta(text), kind, len(text), ids, self._logprobs(start, end))

    def whole(self) -> WholeChoice:
        """What was generated so far, as one JSON choice."""
        shape, texts, end = self.shape, self.output.texts, self.request.generated
        answer = min(shape.reasoning_tokens, end)
        call = None
        if shape.tool_name is not None and end > answer:
            call = (shape.tool_call_id, shape.tool_name, self._arguments(answer + 1, end))
        self.sent = end
        return WholeChoice(
            index=self.index,
            text="".join(texts[answer:end]),
            finish_reason=self.finish_reason or self.answer_finish_reason,
            token_ids=self.output.token_ids[:end] if shape.return_token_ids else None,
            logprobs=self._logprobs(0, end),
            reasoning_field=shape.reasoning_field,
            reasoning="".join(texts[:answer]) if answer else None,
            tool_call=call,
            prompt_token_ids=self.prompt_token_ids,
        )

    def _arguments(self, start: int, end: int) -> str:
        """The tokens after the tool's name spell one JSON object."""
        if start >= end:
            return ""
        begin = '{"text": "' if start == self.shape.reasoning_tokens + 1 else ""
        return begin + "".join(self.output.texts[start:end]) + ('"}' if end == self.request.output_tokens else "")

    def _logprobs(self, start: int, end: int) -> str:
        top = self.shape.top_logprobs
        if top is None:
            return "null"
        pieces = list(zip(self.output.token_ids[start:end], self.output.texts[start:end], strict=True))
        if self.shape.api == "chat":
            return chat_logprobs(pieces, top)
        offset = self._texts_length
        self._texts_length += sum(len(text) for _, text in pieces)
        return completion_logprobs(pieces, top, offset)
