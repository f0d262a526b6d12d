"""One worker process's part in one run: sends what its users ask for, keeps the books, and drains at the end."""

from __future__ import annotations

import itertools
import logging
import socket
import ssl
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gevent
from gevent.event import Event

from vllm_locust import clock
from vllm_locust.aggregate import RunAggregate
from vllm_locust.clock import WallAxis
from vllm_locust.completion import CompletionReader
from vllm_locust.config import RunConfig
from vllm_locust.load.health import HealthSampler
from vllm_locust.load.kernel import KernelTransport
from vllm_locust.load.openai_transport import OpenAITransport
from vllm_locust.load.sse_transport import SseTransport
from vllm_locust.load.transport import Call, CutShort, Exchange, Transport, tls_context
from vllm_locust.outcome import Outcome
from vllm_locust.protocol import build_body, request_path
from vllm_locust.record import FlushReport, RecordSink, RequestRecord
from vllm_locust.slo import judge_request, parse_slos
from vllm_locust.timing import e2e_ns, ttft_ns
from vllm_locust.workload.prompt import Prompt, Session
from vllm_locust.workload.tokens import answer_counter
from vllm_locust.workload.workload import Workload

logger = logging.getLogger(__name__)

_TRANSPORTS: dict[str, Callable[[ssl.SSLContext, str | None], Transport]] = {
    "kernel": KernelTransport,
    "sse": SseTransport,
    "openai": OpenAITransport,
}
FLUSH_TIMEOUT_NS = 30_000_000_000
CUT_TIMEOUT_NS = 5_000_000_000


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the master tells a worker about its part. ``share`` of ``shares``, in the order that ``prompt_seed`` gives:
    which prompts are its own.
    """

    run_id: str
    worker_id: str
    share: int
    shares: int
    prompt_seed: int
    model: str
    token_detail: bool


class LoadWorker:
    """Lives from the master's prepare message until the worker has confirmed its flush."""

    def __init__(
        self,
        config: RunConfig,
        assignment: Assignment,
        workload: Workload,
        sink: RecordSink,
        api_key: str | None,
        axis: WallAxis,
    ) -> None:
        self.config = config
        self.assignment = assignment
        self.workload = workload
        self.aggregate = RunAggregate()
        self._slos = parse_slos(config.slos)
        self.draining = Event()
        self._sink = sink
        self.axis = axis
        self._host = socket.gethostname()
        self._prefix = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._users = itertools.count()
        self._authorization = (("Authorization", f"Bearer {api_key}"),) if api_key else ()
        self._targets = itertools.cycle(config.targets)
        self._calls: set[gevent.Greenlet] = set()
        self._count_answer = answer_counter(config.tokenizer)
        self._prompts: Iterator[Prompt] | None = None
        self._sessions: Iterator[Session] | None = None
        self.transport: Transport = _TRANSPORTS[config.transport](tls_context(config.tls), config.proxy)
        self._health = HealthSampler(
            assignment.worker_id,
            self.transport.receive_lag,
            lambda: self.aggregate.in_flight,
            lambda: sink.spooled_batches,
            sink.put_health,
            axis,
        )

    def next_user_id(self) -> int:
        return next(self._users)

    def next_prompt(self) -> Prompt | None:
        """The next prompt of this worker's share, whichever of its users asks; None when a finite workload is used
        up.
        """
        if self._prompts is None:
            self._prompts = self.workload.prompts(**self._share())
        return next(self._prompts, None)

    def next_session(self) -> Session | None:
        if self._sessions is None:
            self._sessions = self.workload.sessions(**self._share())
        return next(self._sessions, None)

    def _share(self) -> dict[str, int]:
        return {"seed": self.assignment.prompt_seed, "share": self.assignment.share, "shares": self.assignment.shares}

    def perform(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        user_id: int,
        task: str,
        max_tokens: int | None,
        extra: Mapping[str, Any],
        prompt: Prompt | None = None,
        conversation_id: str | None = None,
        turn: int | None = None,
    ) -> tuple[RequestRecord, Exchange]:
        """Send one completion request, wait for its end, and put it on record."""
        config = self.config
        limit = config.max_tokens if config.max_tokens is not None else max_tokens
        payload = build_body(
            config.api,
            model=self.assignment.model,
            messages=messages,
            max_tokens=limit,
            stream=config.stream,
            token_detail=self.assignment.token_detail,
            force_length=config.force_length,
            extra={**config.extra_body, **extra},
        )
        request_id = f"{self._prefix}-{next(self._numbers):08d}"
        call = Call(
            target=next(self._targets),
            path=request_path(config.api),
            payload=payload,
            headers=(("X-Request-Id", request_id), *self._authorization),
            streamed=config.stream,
            timeouts=config.timeouts,
        )
        exchange = self._exchange(call)
        killed = self._count_output(exchange.completion) or exchange.killed
        if config.force_length and exchange.outcome is Outcome.OK:
            exchange.outcome = exchange.completion.outcome(limit)
        record = self._record(call, exchange, request_id)
        record.user_id, record.task, record.max_tokens = user_id, task, limit
        record.conversation_id, record.turn = conversation_id, turn
        if prompt is not None:
            record.prompt_id, record.prompt_tokens_planned = prompt.prompt_id, prompt.prompt_tokens
        self._sink.put_request(record)
        self.aggregate.observe(record, self._judge(record))
        self.transport.read_arrived()
        if killed is not None:
            raise killed
        return record, exchange

    def _judge(self, record: RequestRecord) -> bool | None:
        if not self._slos:
            return None
        return judge_request(self._slos, record.outcome is Outcome.OK, record.slo_values_ns())

    def cut(self, greenlet: gevent.Greenlet, cut: CutShort) -> bool:
        """End the call that this greenlet waits for, if it does."""
        if greenlet not in self._calls:
            return False
        greenlet.kill(cut, block=False)
        return True

    def _exchange(self, call: Call) -> Exchange:
        """The call's exchange, whatever happens: a killed user's request is put on record too, and so is a fault of
        ours.
        """
        greenlet = gevent.getcurrent()
        started_ns = clock.monotonic_ns()
        self.aggregate.request_sent()
        self._calls.add(greenlet)
        try:
            exchange = self.transport.perform(call)
        except gevent.GreenletExit as killed:
            exchange = Exchange(CompletionReader(streamed=call.streamed))
            exchange.fail(Outcome.ABANDONED, "its user was killed").killed = killed
        except Exception as error:
            logger.exception("A request could not be performed")
            exchange = Exchange(CompletionReader(streamed=call.streamed))
            exchange.fail(Outcome.CLIENT_ERROR, f"{type(error).__name__}: {error}"[:500])
        finally:
            self._calls.discard(greenlet)
        exchange.started_ns = started_ns
        return exchange

    def _count_output(self, completion: CompletionReader) -> gevent.GreenletExit | None:
        """Count the output by ``--tokenizer`` where the server gave no usage; a kill that came meanwhile."""
        if self._count_answer is None or completion.completion_tokens is not None:
            return None
        if completion.choices > 1 and completion.reasoning:
            # Only the first choice's reasoning is known here: chunks are nearer to the truth than a count without.
            return None
        calls = (f"{call.name}{call.arguments}" for call in completion.tool_calls)
        texts = [text for text in (*completion.texts, completion.reasoning, *calls) if text]
        if not texts:
            return None
        try:
            completion.tokenizer_tokens = gevent.get_hub().threadpool.apply(self._count_answer, (texts,))
        except gevent.GreenletExit as killed:
            return killed
        return None

    def _record(self, call: Call, exchange: Exchange, request_id: str) -> RequestRecord:
        completion = exchange.completion
        # What was never sent belongs to the time at which it would have been.
        sent_ns = exchange.started_ns if exchange.sent_ns is None else exchange.sent_ns
        chunk_ns = [at - sent_ns for at in completion.chunk_ns]
        coalesced = sum(1 for width in completion.chunk_width_ns if width)
        streamed = call.streamed and not completion.has_body
        answer_ns, done_ns = completion.first_answer_ns, completion.done_ns
        return RequestRecord(
            request_id=request_id,
            response_id=completion.response_id,
            worker_id=self.assignment.worker_id,
            host=self._host,
            user_id=0,
            target=call.target.url,
            task="",
            transport=self.transport.name,
            streamed=streamed,
            sent_unix_ns=sent_ns + self.axis.offset_ns,
            outcome=exchange.outcome,
            connect_ns=exchange.connect_ns,
            headers_ns=None if exchange.headers_ns is None else exchange.headers_ns - sent_ns,
            ttft_ns=ttft_ns(sent_ns, completion.chunk_ns),
            ttft_answer_ns=None if answer_ns is None else answer_ns - sent_ns,
            e2e_ns=e2e_ns(sent_ns, completion.chunk_ns, done_ns) if exchange.outcome is Outcome.OK else None,
            done_ns=None if done_ns is None else done_ns - sent_ns,
            ended_ns=clock.monotonic_ns() - sent_ns,
            receive_lag_max_ns=exchange.receive_lag_max_ns,
            chunk_ns=chunk_ns,
            chunk_tokens=completion.known_chunk_tokens,
            chunk_width_ns=completion.chunk_width_ns if coalesced else None,
            prompt_tokens=completion.prompt_tokens,
            cached_prompt_tokens=completion.cached_tokens,
            output_tokens=completion.output_tokens,
            reasoning_tokens=completion.reasoning_tokens,
            token_source=completion.token_source,
            stamp_source=exchange.stamp_source,
            coalesced=coalesced,
            finish_reason=completion.finish_reason,
            http_status=exchange.http_status,
            error=exchange.error,
        )

    def drain(self) -> FlushReport:
        """Start no further request, let the running ones end within the drain time, cut the rest, ship everything."""
        self.draining.set()
        deadline_ns = clock.monotonic_ns() + self.config.drain_timeout_ns
        while self.aggregate.in_flight and clock.monotonic_ns() < deadline_ns:
            gevent.sleep(0.02)
        cut = CutShort(Outcome.CENSORED, "still running when the drain ended (--drain-timeout)")
        for greenlet in list(self._calls):
            self.cut(greenlet, cut)
        deadline_ns = clock.monotonic_ns() + CUT_TIMEOUT_NS
        while self.aggregate.in_flight and clock.monotonic_ns() < deadline_ns:
            gevent.sleep(0.01)
        self._health.close()
        report = self._sink.flush(clock.monotonic_ns() + FLUSH_TIMEOUT_NS)
        self.transport.close()
        return report
