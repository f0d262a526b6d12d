"""What a request leaves behind, from its exchange."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_locust import clock
from vllm_locust.clock import WallAxis
from vllm_locust.config import Target
from vllm_locust.load.dispatcher import DueArrival
from vllm_locust.load.transport import Exchange
from vllm_locust.outcome import Outcome
from vllm_locust.record import RequestRecord
from vllm_locust.timing import e2e_ns, ttft_ns


@dataclass(frozen=True, slots=True)
class Origin:
    """What all records of a worker have in common."""

    worker_id: str
    host: str
    transport: str
    axis: WallAxis

    def record(
        self, request_id: str, target: Target, streamed: bool, exchange: Exchange, due: DueArrival | None
    ) -> RequestRecord:
        """The record of a request that has ended just now; who asked for what is for the caller to add."""
        completion = exchange.completion
        # What was never sent belongs to the time at which it would have been.
        sent_ns = exchange.started_ns if exchange.sent_ns is None else exchange.sent_ns
        coalesced = sum(1 for width in completion.chunk_width_ns if width)
        answer_ns, done_ns = completion.first_answer_ns, completion.done_ns
        record = RequestRecord(
            request_id=request_id,
            response_id=completion.response_id,
            worker_id=self.worker_id,
            host=self.host,
            user_id=None,
            target=target.url,
            task="",
            transport=self.transport,
            streamed=streamed and not completion.has_body,
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
            chunk_ns=[at - sent_ns for at in completion.chunk_ns],
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
            attempts=exchange.attempts,
            retry_wait_ns=exchange.retry_wait_ns,
        )
        if due is not None:
            record.arrival, record.scheduled_unix_ns = due.number, due.scheduled_unix_ns
            record.slot_wait_ns = due.slot_wait_ns
            if record.attempts:
                record.schedule_lag_ns = sent_ns - due.scheduled_monotonic_ns
        return record
