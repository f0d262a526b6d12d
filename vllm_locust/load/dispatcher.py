"""Hands the arrivals of one share of the schedule to the users, each when it is due."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Literal, NamedTuple

import gevent
from gevent.hub import Waiter

from vllm_locust import clock
from vllm_locust.arrival import Piece, Schedule
from vllm_locust.timerfd import TimerFd

_HANDED_PER_WAKE = 32
"""After that many the loop reads its sockets before it goes on with a burst."""


class DueArrival(NamedTuple):
    """An arrival whose time has come. Plain and small: of those that wait for a slot there may be any number."""

    number: int
    scheduled_monotonic_ns: int
    """On this process's monotonic axis."""
    scheduled_unix_ns: int
    """T0 + offset exactly, on the common clock."""
    slot_wait_ns: int = 0
    """How long after ``scheduled`` a slot was free for it, or it was given up. Known once it is out of the queue."""

    def waited(self) -> DueArrival:
        """The same, out of the queue now."""
        return self._replace(slot_wait_ns=max(0, clock.monotonic_ns() - self.scheduled_monotonic_ns))


class Dispatcher:
    """Lives in gevent's loop, behind one timer; it has no greenlet of its own and never spins.

    A due arrival goes to the user that has been idle longest, which sends it before the next one is looked at. Where
    none is idle it waits in a queue, or is dropped, as ``when_full`` says. Nothing here ever moves the schedule.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        share: int,
        shares: int,
        first_arrival: int = 0,
        when_full: Literal["queue", "drop"],
        put_dropped: Callable[[DueArrival], None],
    ) -> None:
        self._schedule = schedule
        self._arrivals = schedule.share(share, shares, first_arrival)
        self._drops = when_full == "drop"
        self._put_dropped = put_dropped
        self._next: DueArrival | None = None
        self._t0: tuple[int, int] | None = None
        self._stopped = False
        self._queue: deque[DueArrival] = deque()
        self._idle: OrderedDict[Waiter, None] = OrderedDict()
        self._handed: dict[int, DueArrival] = {}
        self._lag_max_ns: int | None = None
        self._timer = TimerFd()
        self._loop = gevent.get_hub().loop
        self._watcher = self._loop.io(self._timer.fd, 1, priority=self._loop.MAXPRI)
        self._watcher.start(self._on_timer)

    def begin(self, t0_monotonic_ns: int, t0_unix_ns: int) -> None:
        """Set T0, on this process's monotonic axis and on the common clock. What is due already is handed out at
        once.
        """
        self._t0 = (t0_monotonic_ns, t0_unix_ns)
        self._go_on()

    def extend(self, piece: Piece) -> None:
        """Lengthen the plan at its end."""
        self._schedule.extend(piece)
        self._go_on()

    def stop(self) -> None:
        """Nothing further is due from now on. What waits for a slot still does, idle users are sent home."""
        now_ns = clock.monotonic_ns()
        while self._next is not None and self._next.scheduled_monotonic_ns <= now_ns:
            due, self._next = self._next, self._following()
            self._line_up(due)
        self._stopped = True
        self._next = None
        self._timer.arm(None)
        self._loop.run_callback(self._send_home)

    def close(self) -> None:
        self._watcher.stop()
        self._watcher.close()
        self._timer.close()

    @property
    def waiting(self) -> int:
        """Arrivals that are due and have no slot yet."""
        return len(self._queue)

    @property
    def unsent(self) -> int:
        """Those, and the ones that a user has taken but not yet sent."""
        return len(self._queue) + len(self._handed)

    def take_schedule_lag_max_ns(self) -> int | None:
        """How late the latest arrival was handed to a user since this was last asked, or is while it still waits."""
        lag_ns, self._lag_max_ns = self._lag_max_ns, None
        if not self._queue:
            return lag_ns
        return max(lag_ns or 0, clock.monotonic_ns() - self._queue[0].scheduled_monotonic_ns)

    def take(self) -> DueArrival | None:
        """Wait, in the calling user's greenlet, for an arrival to send; None once there will be no more.

        The user must ``settle`` it, when it begins to send or puts it on record otherwise, or ``give_back`` it. A user
        may be killed while it waits here.
        """
        if not self._queue and not self._stopped:
            waiter = Waiter()
            self._idle[waiter] = None
            try:
                due: DueArrival | None = waiter.get()
            finally:
                self._idle.pop(waiter, None)
        else:
            due = self._queue.popleft().waited() if self._queue else None
            if due is not None:
                self._note_handed(due)
        return due

    def settle(self, due: DueArrival) -> bool:
        """The arrival is being sent, or is on record. False where ``abandon`` has given it up before."""
        return self._handed.pop(due.number, None) is not None

    def give_back(self, due: DueArrival) -> None:
        """Its user ends before it could send: the next user that is free gets it."""
        if self.settle(due):
            self._queue.appendleft(due)
            self._loop.run_callback(self._serve_queue)

    def abandon(self) -> list[DueArrival]:
        """The drain is over: what was never sent, in order. It is not sent any more."""
        never_sent = sorted([*(due.waited() for due in self._queue), *self._handed.values()])
        self._queue.clear()
        self._handed.clear()
        return never_sent

    def _go_on(self) -> None:
        if self._next is None and not self._stopped:
            self._next = self._following()
            self._arm()

    def _following(self) -> DueArrival | None:
        """The next arrival of this share, due or not; None before T0 is known, and at the end of the plan."""
        if self._t0 is None:
            return None
        arrival = next(self._arrivals, None)
        if arrival is None:
            return None
        number, offset_ns = arrival
        return DueArrival(number, self._t0[0] + offset_ns, self._t0[1] + offset_ns)

    def _arm(self) -> None:
        self._timer.arm(None if self._next is None else self._next.scheduled_monotonic_ns)

    def _on_timer(self) -> None:
        try:
            for _ in range(_HANDED_PER_WAKE):
                due = self._next
                if due is None or due.scheduled_monotonic_ns > clock.monotonic_ns():
                    break
                self._next = self._following()
                if self._idle:
                    self._hand_over(due)
                else:
                    self._line_up(due)
        finally:
            self._arm()

    def _line_up(self, due: DueArrival) -> None:
        if self._drops and len(self._queue) >= len(self._idle):
            self._put_dropped(due)
        else:
            self._queue.append(due)

    def _hand_over(self, due: DueArrival) -> None:
        """Let the user that has been idle longest run, until it waits for its answer. Only in the hub."""
        waiter, _ = self._idle.popitem(last=False)
        self._note_handed(due)
        waiter.switch(due)

    def _note_handed(self, due: DueArrival) -> None:
        self._handed[due.number] = due
        self._lag_max_ns = max(self._lag_max_ns or 0, clock.monotonic_ns() - due.scheduled_monotonic_ns)

    def _serve_queue(self) -> None:
        while self._queue and self._idle:
            self._hand_over(self._queue.popleft())

    def _send_home(self) -> None:
        self._serve_queue()
        while self._idle:
            waiter, _ = self._idle.popitem(last=False)
            waiter.switch(None)
