"""One worker process's part in one run: sends what its users ask for, keeps the books, and drains at the end."""

from __future__ import annotations

import itertools
import logging
import socket
import ssl
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gevent
from gevent.event import Event

from vllm_locust import clock
from vllm_locust.aggregate import HEALTH, RunAggregate, StageAggregates
from vllm_locust.arrival import Schedule
from vllm_locust.clock import WallAxis
from vllm_locust.completion.reader import CompletionReader
from vllm_locust.config import RunConfig
from vllm_locust.core_time import CoreTime
from vllm_locust.load.dispatcher import Dispatcher, DueArrival
from vllm_locust.load.health import HealthSampler, run_delay_ns
from vllm_locust.load.kernel import KernelTransport
from vllm_locust.load.openai_transport import OpenAITransport
from vllm_locust.load.patience import Patience
from vllm_locust.load.proxy import proxy_for
from vllm_locust.load.request_record import Origin
from vllm_locust.load.retry import Retries
from vllm_locust.load.sse_transport import SseTransport
from vllm_locust.load.transport import Call, CutShort, Exchange, Transport
from vllm_locust.outcome import Outcome
from vllm_locust.protocol import build_body, request_path, without_key
from vllm_locust.record import ArrivalRecord, FlushReport, HealthSample, RecordSink, RequestRecord
from vllm_locust.slo import judge_request, parse_slos
from vllm_locust.tls import tls_context
from vllm_locust.workload.prompt import Prompt, Session
from vllm_locust.workload.tokens import answer_counter
from vllm_locust.workload.workload import Workload

logger = logging.getLogger(__name__)

_TRANSPORTS: dict[str, Callable[[ssl.SSLContext, str | None], Transport]] = {
    "kernel": KernelTransport,
    "sse": SseTransport,
    "openai": OpenAITransport,
}
_FROM_OUTSIDE = ("error", "finish_reason", "response_id")
"""Texts of a record that a server has worded: it may repeat the API key in them."""
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
    first_arrival: int = 0
    """Open loop: the arrivals of the share before this one are not this worker's."""


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
        schedule: Schedule | None = None,
        *,
        clock_shift_ns: int = 0,
    ) -> None:
        """``clock_shift_ns``: from ``axis`` to the common clock."""
        self.config = config
        self.assignment = assignment
        self.workload = workload
        self.aggregate = RunAggregate()
        self._stages = StageAggregates()
        self._slos = parse_slos(config.slos)
        self.draining = Event()
        self._sink = sink
        self.axis = axis
        self._clock_shift_ns = clock_shift_ns
        self._began_ns = clock.monotonic_ns()
        self._prefix = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._users = itertools.count()
        self._api_key = api_key
        self._authorization = (("Authorization", f"Bearer {api_key}"),) if api_key else ()
        self._targets = deque(config.targets)
        """In turn: the first is the next request's."""
        self._calls: set[gevent.Greenlet] = set()
        self._count_answer = answer_counter(config.tokenizer)
        self._prompts: Iterator[Prompt] | None = None
        self._sessions: Iterator[Session] | None = None
        for target in config.targets:
            # Raises where this machine's proxy variables cannot be used.
            proxy_for(config.proxy, target)
        self.transport: Transport = _TRANSPORTS[config.transport](tls_context(config.tls), config.proxy)
        # From here on nothing fails: it holds a timer, and the sampler below a greenlet.
        self.dispatcher = None if schedule is None else self._dispatcher(schedule)
        """None in a closed loop."""
        self._origin = Origin(assignment.worker_id, socket.gethostname(), self.transport.name, axis)
        self._patience = Patience(config.patience_ns, seed=config.seed, worker_id=assignment.worker_id)
        self._retries = Retries(
            self._attempt,
            limit=config.retries,
            seed=f"{config.seed}:retries:{assignment.worker_id}",
            draining=self.draining,
        )
        self._health = HealthSampler(
            assignment.worker_id,
            self.transport.receive_lag,
            lambda: self.aggregate.in_flight,
            lambda: None if self.dispatcher is None else self.dispatcher.take_schedule_lag_max_ns(),
            lambda: sink.spooled_batches,
            self._put_health,
            axis,
        )
        self._last_health: HealthSample | None = None

    def _dispatcher(self, schedule: Schedule) -> Dispatcher:
        return Dispatcher(
            schedule,
            share=self.assignment.share,
            shares=self.assignment.shares,
            first_arrival=self.assignment.first_arrival,
            when_full=self.config.when_full,
            put_dropped=self._put_dropped,
        )

    def open_stage(self, stage: int, start_unix_ns: int, end_unix_ns: int) -> None:
        """From now on keep this stage's requests in an aggregate of its own too. Said again: its times have changed.
        They are on the common clock.
        """
        self._stages.open(stage, start_unix_ns, end_unix_ns)

    def snapshot(self, sequence: int) -> dict[str, Any]:
        """What this worker has seen so far, for the master's live views."""
        self.aggregate.waiting_arrivals = 0 if self.dispatcher is None else self.dispatcher.waiting
        core_time = CoreTime(clock.monotonic_ns() - self._began_ns, clock.process_cpu_ns(), run_delay_ns())
        health = None if self._last_health is None else {name: getattr(self._last_health, name) for name in HEALTH}
        stages = self._stages.aggregates
        return self.aggregate.to_message(self.assignment.worker_id, sequence, stages, core_time, health)

    def _put_health(self, sample: HealthSample) -> None:
        self._last_health = sample
        self._sink.put_health(sample)

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

    def prompt_of(self, due: DueArrival) -> Prompt | None:
        """The prompt of an arrival, whoever sends it and whenever; None where a finite workload ends before it."""
        return self.workload.prompt(due.number, seed=self.assignment.prompt_seed)

    def session_of(self, due: DueArrival) -> Session | None:
        return self.workload.session(due.number, seed=self.assignment.prompt_seed)

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
        due: DueArrival | None = None,
    ) -> tuple[RequestRecord, Exchange]:
        """Send one completion request, for an arrival where ``due`` says so, wait for its end, and put it on record."""
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
        request_id = self._next_request_id()
        call = Call(
            target=self._targets[0],
            path=request_path(config.api),
            payload=payload,
            headers=(("X-Request-Id", request_id), *self._authorization),
            streamed=config.stream,
            timeouts=config.timeouts,
            patience_ns=self._patience.draw_ns(user_id, None if due is None else due.number),
            patience_from_ns=None if due is None else due.scheduled_monotonic_ns,
        )
        self._targets.rotate(-1)
        now_unix_ns = self.axis.unix_ns() + self._clock_shift_ns
        stage = self._stages.at(now_unix_ns if due is None else due.scheduled_unix_ns)
        if stage is not None:
            stage.request_sent()
        exchange = self._exchange(call)
        killed = self._count_output(exchange.completion) or exchange.killed
        if config.force_length and exchange.outcome is Outcome.OK:
            exchange.outcome = exchange.completion.outcome(limit)
        record = self._origin.record(request_id, call.target, call.streamed, exchange, due)
        record.user_id, record.task, record.max_tokens = user_id, task, limit
        record.conversation_id, record.turn = conversation_id, turn
        if prompt is not None:
            record.prompt_id, record.prompt_tokens_planned = prompt.prompt_id, prompt.prompt_tokens
        self._put(record, stage)
        self.transport.read_arrived()
        if killed is not None:
            raise killed
        return record, exchange

    def _put(self, record: RequestRecord, stage: RunAggregate | None) -> None:
        """Put a request on record and into the aggregates; ``stage`` is the one that knows of it since it was sent."""
        for name in _FROM_OUTSIDE:
            text = getattr(record, name)
            if text is not None:
                setattr(record, name, without_key(text, self._api_key))
        self._sink.put_request(record)
        good = self._judge(record)
        self.aggregate.observe(record, good)
        if stage is None:
            scheduled_ns = record.scheduled_unix_ns
            sent_ns = record.sent_unix_ns + self._clock_shift_ns
            stage = self._stages.at(sent_ns if scheduled_ns is None else scheduled_ns)
            if stage is None:
                return
            stage.request_sent()
        stage.observe(record, good)

    def put_unsent(self, due: DueArrival, outcome: Outcome, error: str, user_id: int | None = None) -> None:
        """Put an arrival on record for which nothing will be sent. One that was sent, or given back, is left alone."""
        if self.dispatcher is not None and self.dispatcher.settle(due):
            self._put_never_sent(due, outcome, error, user_id)

    def _put_never_sent(self, due: DueArrival, outcome: Outcome, error: str, user_id: int | None) -> None:
        streamed = self.config.stream
        exchange = Exchange(CompletionReader(streamed=streamed), started_ns=clock.monotonic_ns(), attempts=0)
        exchange.fail(outcome, error)
        self.aggregate.request_sent()
        record = self._origin.record(self._next_request_id(), self._targets[0], streamed, exchange, due)
        record.user_id = user_id
        self._put(record, None)

    def _put_dropped(self, due: DueArrival) -> None:
        self.aggregate.dropped_arrivals += 1
        stage = self._stages.at(due.scheduled_unix_ns)
        if stage is not None:
            stage.dropped_arrivals += 1
        self._sink.put_arrival(
            ArrivalRecord(due.number, self.assignment.worker_id, due.scheduled_unix_ns, status="dropped")
        )

    def _next_request_id(self) -> str:
        self._sink.announce_request()
        return f"{self._prefix}-{next(self._numbers):08d}"

    def _judge(self, record: RequestRecord) -> bool | None:
        if not self._slos:
            return None
        return judge_request(self._slos, record.outcome is Outcome.OK, record.slo_values_ns())

    def is_busy(self, greenlet: gevent.Greenlet) -> bool:
        """Whether this user's greenlet waits for the end of a request."""
        return greenlet in self._calls

    def cut(self, greenlet: gevent.Greenlet, cut: CutShort) -> bool:
        """End the call that this greenlet waits for, if it does."""
        if greenlet not in self._calls:
            return False
        greenlet.kill(cut, block=False)
        return True

    def _exchange(self, call: Call) -> Exchange:
        """The request's exchange, whatever happens and however many attempts it takes."""
        greenlet = gevent.getcurrent()
        self.aggregate.request_sent()
        self._calls.add(greenlet)
        try:
            return self._retries.perform(call)
        finally:
            self._calls.discard(greenlet)

    def _attempt(self, call: Call) -> Exchange:
        """One attempt: a killed user's is put on record too, and so is a fault of ours."""
        try:
            return self.transport.perform(call)
        except gevent.GreenletExit as killed:
            exchange = Exchange(CompletionReader(streamed=call.streamed))
            exchange.fail(Outcome.ABANDONED, "its user was killed").killed = killed
        except Exception as error:
            logger.exception("A request could not be performed")
            exchange = Exchange(CompletionReader(streamed=call.streamed))
            exchange.fail(Outcome.CLIENT_ERROR, f"{type(error).__name__}: {error}"[:500])
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

    def drain(self) -> FlushReport:
        """Start no further request, let the running ones end within the drain time, cut the rest, ship everything.

        Arrivals that were due before and wait for a slot are still sent within the drain time.
        """
        self._end(self.config.drain_timeout_ns)
        report = self._sink.flush(clock.monotonic_ns() + FLUSH_TIMEOUT_NS)
        self.transport.close()
        return report

    def abandon(self) -> None:
        """End at once and ship nothing: the run is no more."""
        self._end(0)
        self.transport.close()

    def _end(self, drain_timeout_ns: int) -> None:
        self.draining.set()
        if self.dispatcher is not None:
            self.dispatcher.stop()
        deadline_ns = clock.monotonic_ns() + drain_timeout_ns
        while self._unfinished() and clock.monotonic_ns() < deadline_ns:
            gevent.sleep(0.02)
        self._abandon_waiting()
        cut = CutShort(Outcome.CENSORED, "still running when the drain ended (--drain-timeout)")
        for greenlet in list(self._calls):
            self.cut(greenlet, cut)
        deadline_ns = clock.monotonic_ns() + CUT_TIMEOUT_NS
        while self.aggregate.in_flight and clock.monotonic_ns() < deadline_ns:
            gevent.sleep(0.01)
        self._health.close()
        if self.dispatcher is not None:
            self.dispatcher.close()

    def _unfinished(self) -> int:
        return self.aggregate.in_flight + (0 if self.dispatcher is None else self.dispatcher.unsent)

    def _abandon_waiting(self) -> None:
        for due in () if self.dispatcher is None else self.dispatcher.abandon():
            words = "not sent: no slot was free for it before the drain ended (-u, --drain-timeout)"
            self._put_never_sent(due, Outcome.CENSORED, words, user_id=None)
