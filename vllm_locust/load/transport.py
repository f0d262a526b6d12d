"""What every transport does: send one completion request, read its answer, say when each piece arrived.

The three transports differ in who reads the socket and whose clock stamps the bytes. What they hand back does not.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import gevent

from vllm_locust.completion.reader import CompletionReader
from vllm_locust.config import Target, Timeouts
from vllm_locust.outcome import Outcome

IDLE_LIMIT_NS = 4_000_000_000
"""Kept-alive connections are not reused after this long: uvicorn, and so vLLM, closes them after 5 s."""
WATCH_INTERVAL_S = 0.05
"""How often running calls are held against their timeouts and their users' patience: one look per process instead of a
timer per read. So both are exceeded by up to this much.
"""
ERROR_BODY_BYTES = 65536
MAX_EVENT_BYTES = 64 * 1024 * 1024
"""No event and no JSON body is larger: what goes on for longer is no answer, and must not fill the memory."""
TOO_LONG = f"an event or a body of more than {MAX_EVENT_BYTES >> 20} MiB"
"""How much of an error's body is kept to find the server's words in it."""

OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOMEM, errno.ENOBUFS})
"""Connect errors that are this machine's limits, not the server's answer."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request to send. ``headers`` hold X-Request-Id and, where there is a key, Authorization."""

    target: Target
    path: str
    """Path with its leading slash, e.g. ``/v1/chat/completions``; the target's own prefix comes before it."""
    payload: Mapping[str, Any]
    headers: tuple[tuple[str, str], ...]
    streamed: bool
    timeouts: Timeouts
    first_sent_ns: int | None = None
    """When an earlier attempt of the same request was sent: the limits but the one on connecting count from there."""
    patience_ns: int | None = None
    """The user gives up when no token has come for so long after ``patience_from_ns``, or else after ``sent``."""
    patience_from_ns: int | None = None
    """When the request was due, on the monotonic axis; None in a closed loop."""


@dataclass(slots=True)
class Exchange:
    """What happened to one call. Times are absolute monotonic ns; ``connect_ns`` is a duration."""

    completion: CompletionReader
    outcome: Outcome = Outcome.CLIENT_ERROR
    connect_ns: int | None = None
    """Time to connect, TLS included; None where a kept-alive connection was used."""
    sent_ns: int | None = None
    """First byte of the request handed to the kernel; None when it never was."""
    headers_ns: int | None = None
    http_status: int | None = None
    retry_after: str | None = None
    error: str | None = None
    stamp_source: str = "user"
    receive_lag_max_ns: int | None = None
    started_ns: int = 0
    """When the call was made, connection and all."""
    attempts: int = 1
    """How often the request was sent, or tried to be; 0 where its user gave up before that."""
    retry_wait_ns: int = 0
    """Time between the attempts."""
    killed: gevent.GreenletExit | None = None
    """The kill that ended the call, to be raised again once it is on record."""

    def fail(self, outcome: Outcome, error: str) -> Exchange:
        self.outcome = outcome
        self.error = error
        return self


class CutShort(gevent.GreenletExit):  # type: ignore[misc]  # gevent has no types
    """Thrown into a greenlet that waits in ``Transport.perform`` to end its call with a given outcome.

    Not an Exception, so that no library between the two swallows it. One that comes when the call is over already ends
    its greenlet without a word, as a kill does.
    """

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(outcome, reason)
        self.outcome = outcome
        self.reason = reason


@dataclass(slots=True)
class ReceiveLag:
    """Receive lags (user-space read − kernel stamp) since the last look; none of reads without a kernel stamp."""

    lags_ns: list[int] = field(default_factory=list)

    def take(self) -> list[int]:
        taken, self.lags_ns = self.lags_ns, []
        return taken


class Transport(Protocol):
    """One per worker process, shared by its users."""

    name: str
    receive_lag: ReceiveLag

    def perform(self, call: Call) -> Exchange:
        """Send the call and wait, in the calling greenlet, for its end. Never raises for what a server or a network
        does; ``CutShort`` thrown into the greenlet ends the call with its outcome and what has arrived so far is
        kept.
        """
        ...

    def read_arrived(self) -> None:
        """Read what has arrived, if this transport can do so at any time. Called between two pieces of work that take
        long, so that no stream waits for all of them.
        """
        ...

    def close(self) -> None: ...


def exceeded_limit(
    call: Call, now_ns: int, *, sent_ns: int, silent_ns: int, has_token: bool
) -> tuple[Outcome, str] | None:
    """What a call's time is up for, if anything: its timeouts, or its user's patience. ``silent_ns`` is the time since
    the last byte.

    Before the first token only patience and the first-token timeout count: a server sends headers at once and is then
    silent for as long as the request is queued.
    """
    timeouts = call.timeouts
    waited_ns = now_ns - _counted_from_ns(call, sent_ns)
    if timeouts.total_ns is not None and waited_ns > timeouts.total_ns:
        return Outcome.TIMEOUT_TOTAL, f"no end within {timeouts.total_ns / 1e9:g} s (--timeout-total)"
    if has_token:
        if timeouts.idle_ns is not None and silent_ns > timeouts.idle_ns:
            return Outcome.TIMEOUT_IDLE, f"no byte for {timeouts.idle_ns / 1e9:g} s (--timeout-idle)"
        return None
    patient_until_ns = _patient_until_ns(call, sent_ns)
    if patient_until_ns is not None and now_ns > patient_until_ns:
        return Outcome.ABANDONED, patience_lost(call)
    if timeouts.first_token_ns is not None and waited_ns > timeouts.first_token_ns:
        limit_s = timeouts.first_token_ns / 1e9
        return Outcome.TIMEOUT_FIRST_TOKEN, f"no token within {limit_s:g} s (--timeout-first-token)"
    return None


def tokenless_until_ns(call: Call, sent_ns: int) -> int | None:
    """When the first of the limits is reached that end a call which has no token; None where there is none."""
    since_ns = _counted_from_ns(call, sent_ns)
    timeouts = call.timeouts
    ends_ns = [since_ns + limit_ns for limit_ns in (timeouts.total_ns, timeouts.first_token_ns) if limit_ns is not None]
    patient_until_ns = _patient_until_ns(call, sent_ns)
    return min(ends_ns if patient_until_ns is None else [*ends_ns, patient_until_ns], default=None)


def total_until_ns(call: Call, sent_ns: int) -> int | None:
    total_ns = call.timeouts.total_ns
    return None if total_ns is None else _counted_from_ns(call, sent_ns) + total_ns


def patience_over(call: Call, now_ns: int) -> bool:
    """Whether the user of a call that is about to be sent has given up already, since it was due long ago."""
    patient_until_ns = _patient_until_ns(call, now_ns)
    return patient_until_ns is not None and now_ns > patient_until_ns


def patience_lost(call: Call) -> str:
    """The same for all, so that a report can count them: how long this one waited its record says."""
    moment = "it was sent" if call.patience_from_ns is None else "it was due"
    return f"its user gave up: no token in time after {moment} (--patience)"


def _counted_from_ns(call: Call, sent_ns: int) -> int:
    return sent_ns if call.first_sent_ns is None else call.first_sent_ns


def _patient_until_ns(call: Call, sent_ns: int) -> int | None:
    if call.patience_ns is None:
        return None
    from_ns = _counted_from_ns(call, sent_ns) if call.patience_from_ns is None else call.patience_from_ns
    return from_ns + call.patience_ns


def connect_failure(error: OSError) -> Outcome:
    """``client_error`` for our own limits, ``connect_error`` for everything else."""
    return Outcome.CLIENT_ERROR if error.errno in OWN_LIMITS else Outcome.CONNECT_ERROR
