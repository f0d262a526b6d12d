"""What one request leaves behind, and where records go. The columns of ``requests.parquet`` are these fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from vllm_locust.outcome import Outcome
from vllm_locust.timing import tpot_ns


@dataclass(slots=True)
class RequestRecord:
    """One request. Times ending in ``_unix_ns`` are wall clock, other ``_ns`` are durations after ``sent``; unknown
    is None.

    ``phase``, ``stage`` and ``good`` are not here: the merge gives them, since only it knows the window on the common
    clock.
    """

    request_id: str
    worker_id: str
    host: str
    user_id: int | None
    """None where no user ever had it."""
    target: str
    task: str
    transport: str
    streamed: bool
    sent_unix_ns: int
    outcome: Outcome
    response_id: str | None = None
    conversation_id: str | None = None
    turn: int | None = None
    prompt_id: str | None = None
    arrival: int | None = None
    """Its number in the schedule of an open loop."""
    scheduled_unix_ns: int | None = None
    """On the common clock already, where the other wall-clock times are on this worker's."""
    connect_ns: int | None = None
    headers_ns: int | None = None
    ttft_ns: int | None = None
    ttft_answer_ns: int | None = None
    e2e_ns: int | None = None
    done_ns: int | None = None
    ended_ns: int | None = None
    """When we had no more to do with it, whatever its outcome: how long it was in flight."""
    schedule_lag_ns: int | None = None
    slot_wait_ns: int | None = None
    """From ``scheduled`` until a slot was free for it, or it was given up: what of the schedule lag is not the
    generator's own.
    """
    receive_lag_max_ns: int | None = None
    chunk_ns: list[int] = field(default_factory=list)
    """Arrival of each token-bearing chunk after ``sent``."""
    chunk_tokens: list[int] | None = None
    """Tokens in each of those chunks; None where only the total is known."""
    chunk_width_ns: list[int] | None = None
    """Width of the interval before ``chunk_ns`` in which a chunk without a stamp of its own arrived (0: it has its
    own); None when ``coalesced`` is 0.
    """
    prompt_tokens: int | None = None
    cached_prompt_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    max_tokens: int | None = None
    token_source: str | None = None
    """``usage``, ``tokenizer`` or ``chunks``."""
    prompt_tokens_planned: int | None = None
    """What the workload meant the prompt to be: compared with the server's count, and with the source distribution."""
    stamp_source: str = "user"
    """``kernel`` or ``user``."""
    coalesced: int = 0
    """Token-bearing chunks that had no stamp of their own."""
    finish_reason: str | None = None
    http_status: int | None = None
    error: str | None = None
    """The server's words, or ours, bounded to 500 characters."""
    attempts: int = 1
    """0: it was never sent, since no slot was free for it before the drain ended; ``sent`` is when it was given up."""
    retry_wait_ns: int = 0

    def slo_values_ns(self) -> dict[str, float | None]:
        """What a per-request SLO may look at; None where this request has no such value."""
        from_schedule = (
            None if self.ttft_ns is None or self.schedule_lag_ns is None else self.ttft_ns + self.schedule_lag_ns
        )
        after_first = sum(self.chunk_tokens[1:]) if self.chunk_tokens else 0
        return {
            "ttft": self.ttft_ns,
            "ttft_from_schedule": from_schedule,
            "ttft_answer": self.ttft_answer_ns,
            "tpot": tpot_ns(self.chunk_ns, self.output_tokens),
            "e2e": self.e2e_ns,
            "done": self.done_ns,
            "itl": (self.chunk_ns[-1] - self.chunk_ns[0]) / after_first if after_first > 0 else None,
        }


@dataclass(frozen=True, slots=True)
class ArrivalRecord:
    """An arrival of the schedule that became no request: a row of ``arrivals.parquet``."""

    number: int
    worker_id: str
    scheduled_unix_ns: int
    """On the common clock."""
    status: str
    """``dropped``: it was due while every slot was busy."""


@dataclass(slots=True)
class HealthSample:
    """One second of a worker's own condition: a row of ``workers.parquet``. Fractions 0-1, ``_max``/``_p99`` over the
    second.
    """

    time_unix_ns: int
    host: str
    worker_id: str
    in_flight: int
    cpu_fraction: float
    run_delay_ns: int | None
    """Time this process waited for a core, over the second (/proc/self/schedstat)."""
    loop_lag_ns: int
    receive_lag_p99_ns: int | None
    receive_lag_max_ns: int | None
    schedule_lag_max_ns: int | None
    """By how much an arrival was late when a user got it, or is while it waits for one. When its request was sent is on
    the request's own record.
    """
    gc_pause_ns: int
    open_fds: int | None
    rss_bytes: int | None
    spooled_batches: int


class RecordSink(Protocol):
    """How the load generator reaches a store. ``put_*`` never block on the network and never raise for it."""

    def announce_request(self) -> None:
        """One more request begins, whose record will follow, unless this process is lost before."""
        ...

    def put_request(self, record: RequestRecord) -> None: ...

    def put_arrival(self, record: ArrivalRecord) -> None: ...

    def put_health(self, sample: HealthSample) -> None: ...

    @property
    def spooled_batches(self) -> int: ...

    def flush(self, deadline_ns: int) -> FlushReport:
        """Ship everything and wait until it is durable, or until the monotonic deadline."""
        ...


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What a worker can vouch for at the end: batches numbered 1…``last_seq``, of which 1…``durable_seq`` are on
    disk.
    """

    worker_id: str
    last_seq: int
    durable_seq: int
    requests: int
    spool_path: str | None
    """Where the batches that are not durable lie; None when there are none."""
    unstorable_values: int = 0
    """Values from a server that no column could hold, and that were changed or are null."""
