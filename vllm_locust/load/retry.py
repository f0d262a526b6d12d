"""``--retries``: a request that was turned away is sent again, as a user or a client library would.

Only what cannot have begun to answer is tried again: an attempt that was never connected, or one of the statuses with
which servers and gateways turn requests away. However many attempts there are, they are one request: it was sent when
its first attempt was.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from email.utils import mktime_tz, parsedate_tz

import gevent
from gevent.event import Event

from vllm_locust import clock
from vllm_locust.completion.reader import CompletionReader
from vllm_locust.load.transport import (
    Call,
    CutShort,
    Exchange,
    exceeded_limit,
    patience_lost,
    patience_over,
    tokenless_until_ns,
)
from vllm_locust.outcome import Outcome
from vllm_locust.protocol import bounded

RETRIED_STATUSES = frozenset({429, 502, 503, 504})
BACKOFF_BASE_NS = 500_000_000
BACKOFF_CAP_NS = 8_000_000_000
"""As in the OpenAI SDK."""


class Retries:
    """Sends each call up to ``1 + limit`` times. ``attempt`` sends it once and never raises."""

    def __init__(self, attempt: Callable[[Call], Exchange], *, limit: int, seed: str, draining: Event) -> None:
        self._attempt = attempt
        self._limit = limit
        self._random = random.Random(seed)
        self._draining = draining

    def perform(self, call: Call) -> Exchange:
        """The last attempt's exchange, with the first one's start, the count of them all, and the last status that
        the server gave to any.
        """
        started_ns = clock.monotonic_ns()
        if patience_over(call, started_ns):
            return _never_sent(call, started_ns)
        first = exchange = self._attempt(call)
        sent_ns = started_ns if first.sent_ns is None else first.sent_ns
        retry_wait_ns = 0
        http_status = first.http_status
        for retry in range(self._limit):
            if not _may_retry(exchange):
                break
            began_ns = clock.monotonic_ns()
            again = self._wait(call, exchange, sent_ns, retry)
            retry_wait_ns += clock.monotonic_ns() - began_ns
            if not again:
                break
            exchange = self._attempt(replace(call, first_sent_ns=sent_ns))
            exchange.attempts = retry + 2
            http_status = exchange.http_status = exchange.http_status or http_status
        exchange.started_ns, exchange.retry_wait_ns = started_ns, retry_wait_ns
        if exchange is not first:
            exchange.sent_ns, exchange.connect_ns = sent_ns, first.connect_ns
        return exchange

    def _wait(self, call: Call, exchange: Exchange, sent_ns: int, retry: int) -> bool:
        """Wait until the next attempt. False where something else came first; ``exchange`` then says what."""
        wait_ns = retry_after_ns(exchange.retry_after, clock.unix_ns()) or 0
        if wait_ns < BACKOFF_BASE_NS:
            # A server that names no time, or none worth the name, must not be asked again without a pause.
            wait_ns = max(wait_ns, backoff_ns(retry, self._random))
        again_ns = clock.monotonic_ns() + wait_ns
        until_ns = tokenless_until_ns(call, sent_ns)
        in_time = until_ns is None or again_ns <= until_ns
        wake_ns = again_ns if until_ns is None or in_time else until_ns + 1
        try:
            ending = self._sleep_until(wake_ns)
        except CutShort as cut:
            exchange.fail(cut.outcome, cut.reason)
            return False
        except gevent.GreenletExit as killed:
            exchange.fail(Outcome.ABANDONED, "its user was killed").killed = killed
            return False
        if ending:
            exchange.error = bounded(f"not tried again, since the run was ending: {exchange.error}")
            return False
        verdict = None if in_time else exceeded_limit(call, wake_ns, sent_ns=sent_ns, silent_ns=0, has_token=False)
        if verdict is not None:
            outcome, reason = verdict
            exchange.fail(outcome, bounded(f"{reason}, waiting to try again after: {exchange.error}"))
        return verdict is None

    def _sleep_until(self, wake_ns: int) -> bool:
        """Whether the drain began before or meanwhile."""
        while not self._draining.is_set():
            left_ns = wake_ns - clock.monotonic_ns()
            if left_ns <= 0:
                return False
            self._draining.wait(left_ns / 1e9)
        return True


def _never_sent(call: Call, given_up_ns: int) -> Exchange:
    """Its user gave up while it waited for a free slot."""
    exchange = Exchange(CompletionReader(streamed=call.streamed), started_ns=given_up_ns, attempts=0)
    return exchange.fail(Outcome.ABANDONED, patience_lost(call))


def _may_retry(exchange: Exchange) -> bool:
    turned_away = exchange.outcome is Outcome.HTTP_ERROR and exchange.http_status in RETRIED_STATUSES
    return turned_away or exchange.outcome is Outcome.CONNECT_ERROR


def backoff_ns(retry: int, draw: random.Random) -> int:
    """Exponential back-off with full jitter: uniform up to a bound that doubles with each retry.

    M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015: of the jitters compared there the one
    with which competing clients do the least work.
    """
    return draw.randrange(min(BACKOFF_CAP_NS, BACKOFF_BASE_NS << min(retry, 32)) + 1)


def retry_after_ns(header: str | None, now_unix_ns: int) -> int | None:
    """What ``Retry-After`` asks for, a number of seconds or a date (RFC 9110, 10.2.3); None where it says neither.

    The RFC's seconds are whole ones, but servers send fractions, and the OpenAI SDK reads them.
    """
    text = (header or "").strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        return round(float(text) * 1e9)
    try:
        date = parsedate_tz(text)
        at_unix_ns = None if date is None else mktime_tz(date) * 1_000_000_000
    except (ValueError, OverflowError):
        return None
    return None if at_unix_ns is None else max(0, at_unix_ns - now_unix_ns)
