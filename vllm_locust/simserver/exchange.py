"""The life of one completion request: admission, tokens as they come, the faults asked for, the end, and its truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from vllm_locust.outcome import Outcome
from vllm_locust.simserver.answer_options import AnswerOptions
from vllm_locust.simserver.choice import Choice, told_to_nobody
from vllm_locust.simserver.completion import BUSY, ApiError, CompletionRequest
from vllm_locust.simserver.deadline_timer import DeadlineTimer
from vllm_locust.simserver.event_writer import EventWriter
from vllm_locust.simserver.events import DONE, KEEP_ALIVE, Delta, Events, Usage, error_event
from vllm_locust.simserver.faults import AFTER_CHUNKS, ALWAYS, Fault
from vllm_locust.simserver.http1 import Connection, End, HttpRequest
from vllm_locust.simserver.pacing import Pacer
from vllm_locust.simserver.response import Response
from vllm_locust.simserver.truth import Truth

HTML = b"<html><head><title>Welcome</title></head><body>It works.</body></html>"
CLIENT_CLOSED = "client_closed"
ENGINE_ERROR = ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "EngineCore encountered an issue.", "InternalServerError")


@dataclass(slots=True, eq=False)
class Exchange:
    """``on_end`` is called once, after the last byte or the loss of the client, when ``truth`` is complete."""

    http: HttpRequest
    connection: Connection
    completion: CompletionRequest
    choices: list[Choice]
    events: Events
    options: AnswerOptions
    pacer: Pacer
    timer: DeadlineTimer
    fault: Fault | None
    truth: Truth
    on_end: Callable[[Exchange], None]
    _response: Response = field(init=False)
    _writer: EventWriter = field(init=False)
    _streaming: bool = field(init=False)
    _begun: bool = False
    _held: bool = False
    _ended: bool = False
    _chunks: int = 0
    _unsent: int = field(init=False)
    """Choices that have not been sent to their end."""

    def __post_init__(self) -> None:
        self._unsent = len(self.choices)
        self._response = Response(self.http, self.connection, self.truth, framed=not self._has("close_framing"))
        self._streaming = self.completion.stream and not self._has("json")
        self._writer = EventWriter(self.connection, self._response, self.truth, self.fault)
        self.connection.on_lost = self._lost
        self.connection.on_complete = self._complete
        for choice in self.choices:
            choice.ready = self._ready
        if self._has("json"):
            self.truth.fault_happened = self.completion.stream
        elif self.fault is not None and self.fault.name in ALWAYS:
            self.truth.fault_happened = self._streaming or self.fault.name in ("no_usage", "close_framing")

    def start(self) -> None:
        for choice in self.choices:
            self.pacer.submit(choice)
        if self.fault is not None and self.fault.name == "slow_headers":
            self._hold(self.fault.seconds())
        elif self._streaming:
            self._send_headers()

    def reject(self, *, in_stream: bool) -> None:
        """The queue is full: for streams vLLM has mostly sent its headers by then."""
        self._ended = True
        if not in_stream or not self._streaming:
            self._response.send(BUSY.status, BUSY.body(), Outcome.HTTP_ERROR)
            return
        self._send_headers()
        self._writer.event(error_event(BUSY))
        self._finish_stream(Outcome.ERROR_EVENT)

    def refuse(self, error: ApiError) -> None:
        """Scripted: a status other than 200."""
        self._ended = True
        self._mark()
        retry_after = None if self.fault is None else self.fault.parameters.get("retry_after")
        extra = [] if retry_after is None else [("retry-after", f"{float(retry_after):g}")]
        self._response.send(error.status, error.body(), Outcome.HTTP_ERROR, extra=extra)

    def send_page(self) -> None:
        """Scripted: a 200 that is no completion."""
        self._ended = True
        self._mark()
        self._response.send(HTTPStatus.OK, HTML, Outcome.BAD_RESPONSE, content_type="text/html; charset=utf-8")

    def shutdown(self) -> None:
        """The server ends: so does the answer, cleanly, with finish reason "abort"."""
        if self._ended:
            return
        self.http.keep_alive = False
        self._held = False
        if self._streaming:
            self._send_headers()
            for choice in self.choices:
                if choice.sent < choice.request.generated and not self._ended:
                    self._send(choice)
        if not self._ended:
            self._abort()

    # tokens

    def _ready(self, choice: Choice) -> None:
        if self._ended or self._held:
            return
        if not self._streaming:
            if all(one.complete for one in self.choices):
                self._answer_whole()
            return
        generated = choice.request.generated
        due = generated - choice.sent >= self.options.stream_interval
        if due or choice.sent == 0 or generated >= choice.next_boundary():
            self._send(choice)

    def _send(self, choice: Choice) -> None:
        """Everything that this choice has ready, in as few chunks as its kinds allow."""
        self._begin()
        while choice.sent < choice.request.generated and not (self._ended or self._held or self._interrupted()):
            self._send_chunk(choice, min(choice.next_boundary(), choice.request.generated))
        if not self._unsent and not self._ended:
            self._send_end()

    def _send_chunk(self, choice: Choice, end: int) -> None:
        start = choice.sent
        chunk = choice.take(end)
        finished = end == choice.request.output_tokens
        if finished:
            choice.finish_reason = choice.answer_finish_reason
            self._unsent -= 1
        last = finished and not self._unsent and not self._sends_usage()
        event = self.events.chunk(
            choice.index,
            chunk.delta,
            token_ids=chunk.token_ids,
            finish_reason=choice.finish_reason,
            logprobs=chunk.logprobs,
            usage=self._continuous(choice),
            last=last,
            prompt_token_ids=choice.prompt_token_ids if start == 0 else None,
        )
        self._writer.token_chunk(event, choice.index, end - start, chunk)
        self._chunks += 1

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        if self.completion.api == "chat" and not self._has("empty_body"):
            for choice in self.choices:
                self._writer.event(self.events.role(choice.index, choice.prompt_token_ids, self._continuous(choice)))

    def _send_end(self) -> None:
        self._ended = True
        if self._sends_usage():
            self._writer.event(self.events.usage(self._usage()))
        done = not self._has("no_done")
        if done:
            self._writer.done(DONE)
        if self._has("double_done"):
            self._writer.event(DONE)
        short = self.truth.output_tokens < self.completion.min_tokens * len(self.choices)
        self._end_body(Outcome.SHORT if short else Outcome.OK)

    # faults

    def _has(self, name: str) -> bool:
        return self.fault is not None and self.fault.name == name

    def _mark(self) -> None:
        self.truth.fault_happened = True

    def _interrupted(self) -> bool:
        """Whether a fault takes the place of the next chunk."""
        fault = self.fault
        if fault is None or self.truth.fault_happened:
            return False
        if fault.name in ("empty", "empty_body", "role_only"):
            self._mark()
            self._end_without_tokens(fault.name)
            return True
        if fault.name not in AFTER_CHUNKS or self._chunks < fault.integer("after"):
            return False
        self._mark()
        match fault.name:
            case "stall":
                self._hold(fault.seconds())
            case "error_event":
                self._stop_engine()
                self._writer.event(error_event(ENGINE_ERROR))
                self._finish_stream(Outcome.ERROR_EVENT)
            case "truncated":
                self._stop_engine()
                self._end_body(Outcome.TRUNCATED)
            case "abort":
                self._abort()
            case _:
                self._break(End.RESET if fault.name == "reset" else End.CLOSE)
        return True

    def _end_without_tokens(self, name: str) -> None:
        self._stop_engine()
        if name != "empty":
            self._end_body(Outcome.TRUNCATED)
            return
        for choice in self.choices:
            choice.finish_reason = "stop"
            self._finish_chunk(choice)
        if self._sends_usage():
            self._writer.event(self.events.usage(self._usage()))
        self._finish_stream(Outcome.EMPTY)

    def _hold(self, seconds: float | None) -> None:
        self._held = True
        if seconds is not None:
            self.timer.call_in(seconds, self._release)

    def _release(self) -> None:
        if self._ended or not self._held:
            return
        self._held = False
        self._mark()
        if not self._streaming:
            if all(choice.complete for choice in self.choices):
                self._answer_whole()
            return
        self._send_headers()
        for choice in self.choices:
            if choice.sent < choice.request.generated and not self._ended:
                self._send(choice)

    def _break(self, how: End) -> None:
        self._stop_engine()
        self._writer.flush()
        self._response.break_off(how, Outcome.DISCONNECTED)

    def _abort(self) -> None:
        self._stop_engine()
        for choice in self.choices:
            choice.finish_reason = choice.finish_reason or "abort"
        if not self._streaming:
            self._send_json(Outcome.ERROR_EVENT)
            return
        self._send_headers()
        self._begin()
        for choice in self.choices:
            if choice.finish_reason == "abort":
                self._finish_chunk(choice)
        if self._sends_usage():
            self._writer.event(self.events.usage(self._usage()))
        self._finish_stream(Outcome.ERROR_EVENT)

    def _finish_chunk(self, choice: Choice) -> None:
        """A chunk with a finish reason and no token."""
        event = self.events.chunk(
            choice.index,
            Delta(""),
            token_ids=[] if choice.shape.return_token_ids else None,
            finish_reason=choice.finish_reason,
            usage=self._continuous(choice),
            last=not self._sends_usage() and choice is self.choices[-1],
        )
        self._writer.event(event)

    def _stop_engine(self) -> None:
        self._ended = True
        for choice in self.choices:
            self.pacer.cancel(choice)

    # usage

    def _sends_usage(self) -> bool:
        return self.completion.include_usage and not self._has("no_usage")

    def _continuous(self, choice: Choice) -> Usage | None:
        if not self.completion.continuous_usage or self._has("no_usage"):
            return None
        return Usage(len(choice.prompt), choice.sent)

    def _usage(self) -> Usage:
        first = self.choices[0].request
        cached = first.cached_tokens or 0
        size = self.options.block_size
        created = first.prompt_tokens // size * size - cached if self.options.prefix_caching else 0
        reasoning = sum(min(choice.shape.reasoning_tokens, choice.sent) for choice in self.choices)
        return Usage(
            prompt_tokens=sum(len(prompt) for prompt in self.completion.prompts),
            completion_tokens=sum(choice.sent for choice in self.choices),
            cached_tokens=cached if self.options.prompt_tokens_details else None,
            created_cache_tokens=max(created, 0),
            reasoning_tokens=reasoning if reasoning else None,
        )

    # answers

    def _send_headers(self) -> None:
        if not self._response.begun:
            self._response.begin_stream()
            self._schedule_keep_alive()

    def _schedule_keep_alive(self) -> None:
        interval_s = self.options.sse_keep_alive_interval_s
        if interval_s is not None:
            self.timer.call_in(interval_s, self._keep_alive)

    def _keep_alive(self) -> None:
        if not (self._begun or self._ended):
            self._writer.comment(KEEP_ALIVE)
            self._schedule_keep_alive()

    def _finish_stream(self, outcome: Outcome) -> None:
        self._writer.done(DONE)
        self._end_body(outcome)

    def _end_body(self, outcome: Outcome) -> None:
        self._ended = True
        self._writer.flush()
        self._response.end_stream(outcome)

    def _answer_whole(self) -> None:
        if self._interrupted_whole():
            return
        self._ended = True
        short = any(choice.request.output_tokens < self.completion.min_tokens for choice in self.choices)
        self._send_json(Outcome.SHORT if short else Outcome.OK)

    def _interrupted_whole(self) -> bool:
        fault = self.fault
        if fault is None or self.truth.fault_happened:
            return False
        match fault.name:
            case "stall":
                self._mark()
                self._hold(fault.seconds())
            case "error_event":
                self.refuse(ENGINE_ERROR)
            case "abort":
                self._mark()
                self._abort()
            case "empty" | "empty_body" | "role_only":
                self._mark()
                for choice in self.choices:
                    choice.request.generated = 0
                    choice.finish_reason = "stop"
                self._ended = True
                self._send_json(Outcome.EMPTY)
            case "truncated" | "disconnect" | "reset":
                self._mark()
                self._send_json(Outcome.DISCONNECTED, End.RESET if fault.name == "reset" else End.CLOSE)
            case _:
                return False
        return True

    def _send_json(self, outcome: Outcome, broken: End | None = None) -> None:
        """The whole answer, or, for a connection that breaks, its first half."""
        chat = self.completion.api == "chat"
        wholes = [choice.whole() for choice in self.choices]
        usage = None if self._has("no_usage") else self._usage()
        self.truth.output_tokens = sum(choice.sent for choice in self.choices)
        self.truth.reasoning_tokens = sum(min(c.shape.reasoning_tokens, c.sent) for c in self.choices)
        for choice, whole in zip(self.choices, wholes, strict=True):
            choice.finish_reason = whole.finish_reason
        body = self.events.whole(
            [whole.chat() if chat else whole.completion() for whole in wholes], usage, self.choices[0].prompt_token_ids
        )
        self._ended = True
        self._response.send(HTTPStatus.OK, body, outcome, broken=broken)

    # the end

    def _lost(self) -> None:
        self._stop_engine()
        self.truth.outcome = CLIENT_CLOSED
        self._complete()

    def _complete(self) -> None:
        truth = self.truth
        truth.finish_reasons = [choice.finish_reason for choice in self.choices]
        truth.num_preemptions = sum(choice.request.num_preemptions for choice in self.choices)
        truth.cached_tokens = self.choices[0].request.cached_tokens
        self._response.settle()
        # Without this circle each exchange is gone at once. Thousands left to the garbage collector stop all streams.
        for choice in self.choices:
            choice.ready = told_to_nobody
        self.on_end(self)
