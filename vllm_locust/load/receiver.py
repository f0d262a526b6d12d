"""Reads every socket of a worker process from one epoll set and notes when the kernel received the bytes.

The kernel stamps arriving data itself (SO_TIMESTAMPNS), so a time does not depend on when this process gets the CPU.
What happens here between a socket's readiness and the next ``recvmsg`` is kept to the minimum; parsing happens later,
a bounded slice in each turn of the event loop. Two things the kernel cannot tell, and which are therefore recorded
with each read:

* Unread segments of a socket are merged and the newest stamp wins. ``floor_ns`` is the last moment at which the
  socket was known to be empty: every byte of the read arrived between it and the stamp.
* Stamps are CLOCK_REALTIME. They are put on the monotonic axis with the distance of the two clocks sampled in the
  same poll round. If that distance moved by more than a clock's own drift explains, somebody set the wall clock: the
  read's own time stands in this round and the read is not ``stamped``.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from typing import Any, TypeAlias

import gevent
from gevent import monkey

from vllm_locust import clock
from vllm_locust.load.transport import ReceiveLag

SO_TIMESTAMPNS = 35
READ_BYTES = 65536
STREAM_READ_BYTES = (479, 976)
"""Room for one chunk of a stream of tokens, as Python's own allocator and then as malloc's fast bins can give it: to
ask for 64 KiB where 300 bytes come makes malloc tidy up at every read, which was a sixth of all CPU. A stream whose
chunks fill the one gets the next, and in the end the whole.
"""
PATIENT_READS = 32
PATIENT_BYTES = 4096
"""A patient socket's small reads wait for each other, up to so many, and are parsed in one go: that halves their
cost.
"""
SLICE_READS = 64
"""Reads parsed per turn of the event loop: about half a millisecond."""
HELD_BYTES_LIMIT = 32 * 1024 * 1024
"""Unparsed bytes above which parsing goes before reading, so that TCP's flow control slows the server down."""
SLEPT_NS = 100_000
"""A wait that lasted longer than this, not counting the wait for a core, was a sleep."""
WAKE_UP_NS = 50_000
"""From the bytes' arrival to the process being runnable: interrupt, soft interrupt, wake-up."""
PACED_READS_PER_S = 15_000
PACE_S = 0.001
RATE_INTERVAL_NS = 50_000_000
"""Above this rate the sockets are read once a millisecond instead of whenever one has data. The kernel's stamps do not
change, and a turn of the loop, which costs more than a read, then serves tens of sockets.
"""
STEP_NS = 100_000
DRIFT_DIVISOR = 1000

raw_socket = monkey.get_original("socket", "socket")
_epoll_set = monkey.get_original("select", "epoll")
_READABLE = 0x2001
"""EPOLLIN | EPOLLRDHUP: gevent takes ``select.epoll`` and its names away."""
_timespec = struct.Struct("qq")
_data_of = itemgetter(0)


Read: TypeAlias = tuple[bytes, int, int, bool, int]
"""Data (empty at the end of the stream), stamp, floor, whether the stamp is the kernel's, lag; all times in ns.

A plain tuple: a named one costs three times as much to make, 50,000 times a second.
"""


class Inbox:
    """One socket's unread-by-the-parser bytes. ``consume`` is called with them in order, never from inside a read."""

    __slots__ = (
        "consume",
        "drained_ns",
        "error",
        "patient",
        "queued",
        "read_bytes",
        "reads",
        "recvmsg",
        "sock",
        "stamp_ns",
        "stamps",
        "undrained_ns",
    )

    def __init__(self, sock: Any, stamps: bool, consume: Callable[[list[Read]], None]) -> None:
        self.sock = sock
        self.stamps = stamps
        """Whether the kernel stamps what this socket receives."""
        self.recvmsg = sock.recvmsg
        self.consume = consume
        self.reads: list[Read] = []
        self.queued = False
        self.patient = False
        """Nothing hangs on parsing at once: in the middle of a stream of tokens. The end of a body is parsed at once.
        """
        self.read_bytes = READ_BYTES
        self.stamp_ns = 0
        """Of the last read."""
        self.drained_ns = 0
        self.undrained_ns = 0
        """The floor of a read that did not empty the socket holds for the next one; 0 where there was none such."""
        self.error: OSError | None = None


def _more_room(read_bytes: int) -> int:
    return next((size for size in STREAM_READ_BYTES if size > read_bytes), READ_BYTES)


def enable_stamps(sock: Any) -> bool:
    """Ask the kernel to stamp what this socket receives. False where it cannot."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    except OSError:
        return False
    return True


class Receiver:
    """The epoll set, inside gevent's loop. One per process."""

    def __init__(self) -> None:
        self.receive_lag = ReceiveLag()
        self._epoll = _epoll_set()
        self._inboxes: dict[int, Inbox] = {}
        self._unparsed: deque[Inbox] = deque()
        self._held_bytes = 0
        self._previous_poll_ns = clock.monotonic_ns()
        self._distance_ns = clock.unix_minus_monotonic_ns()
        # The kernel switches stamping on with the first socket that wants it, a moment later: keep one open from the
        # start.
        self._stamping = raw_socket(socket.AF_INET, socket.SOCK_DGRAM)
        enable_stamps(self._stamping)
        loop = gevent.get_hub().loop
        self._readable = loop.io(self._epoll.fileno(), 1)
        self._readable.start(self._on_readable)
        self._pace = loop.timer(PACE_S, PACE_S)
        self._busy = False
        self._reads = 0
        self._rate_from_ns = self._previous_poll_ns
        self._user_stamped = 0
        self._each_turn = loop.prepare()
        self._each_turn.start(self._parse_slice)
        self._keep_turning = loop.idle()
        # Last before the loop waits and first after it: between the two lies nothing but the wait.
        self._before_wait = loop.prepare(priority=loop.MINPRI)
        self._before_wait.start(self._note_wait)
        self._after_wait = loop.check(priority=loop.MAXPRI)
        self._after_wait.start(self._note_wake)
        self._waits_from_ns = self._woke_ns = self._empty_ns = self._previous_poll_ns
        self._polled = True
        self._schedstat = _open_schedstat()
        self._run_delay_ns = self._read_run_delay_ns()

    def watch(self, inbox: Inbox) -> None:
        inbox.drained_ns = clock.monotonic_ns()
        self._inboxes[inbox.sock.fileno()] = inbox
        self._user_stamped += not inbox.stamps
        self._epoll.register(inbox.sock.fileno(), _READABLE)

    def forget(self, inbox: Inbox) -> None:
        """Stop reading. What has been read already is still parsed."""
        fd = inbox.sock.fileno()
        if self._inboxes.pop(fd, None) is not None:
            self._epoll.unregister(fd)
            self._user_stamped -= not inbox.stamps

    def poll(self) -> None:
        """Read every socket that has data. Never blocks; may be called at any time to keep the receive lag short."""
        if self._held_bytes > HELD_BYTES_LIMIT:
            self._parse(SLICE_READS * 4)
        self._polled = True
        polled_ns = clock.monotonic_ns()
        ready = self._epoll.poll(0, len(self._inboxes) + 1)
        distance_ns = clock.unix_minus_monotonic_ns()
        allowed_ns = STEP_NS + (polled_ns - self._previous_poll_ns) // DRIFT_DIVISOR
        steady = abs(distance_ns - self._distance_ns) <= allowed_ns
        self._read_all(ready, distance_ns, steady)
        self._previous_poll_ns = self._empty_ns = polled_ns
        self._distance_ns = distance_ns
        self._reads += len(ready)
        if polled_ns - self._rate_from_ns > RATE_INTERVAL_NS:
            rate = self._reads * 1_000_000_000 // (polled_ns - self._rate_from_ns)
            self._busy = rate > PACED_READS_PER_S and not self._user_stamped
            self._reads, self._rate_from_ns = 0, polled_ns

    def _on_readable(self) -> None:
        self.poll()
        if self._busy:
            self._readable.stop()
            self._pace.start(self._on_pace)

    def _on_pace(self) -> None:
        self.poll()
        if not self._busy:
            self._pace.stop()
            self._readable.start(self._on_readable)

    def _read_all(self, ready: list[tuple[int, int]], distance_ns: int, steady: bool) -> None:
        """The hot path: one loop without a call of our own for each read in the middle of a stream."""
        inboxes, empty_ns, lags_ns, unpack = self._inboxes, self._empty_ns, self.receive_lag.lags_ns, _timespec.unpack
        monotonic_ns, bend_stamp = clock.monotonic_ns, clock.bend_stamp
        roomy = self._held_bytes < HELD_BYTES_LIMIT // 2
        held_bytes = 0
        for fd, _ in ready:
            inbox = inboxes.get(fd)
            if inbox is None:
                continue
            try:
                data, ancillary, _, _ = inbox.recvmsg(inbox.read_bytes, 64)
            except BlockingIOError:
                continue
            except OSError as error:
                inbox.error = error
                data, ancillary = b"", ()
            now_ns = monotonic_ns()
            floor_ns = inbox.undrained_ns or (empty_ns if empty_ns > inbox.drained_ns else inbox.drained_ns)
            if ancillary and steady:
                seconds, nanoseconds = unpack(ancillary[0][2])
                stamp_unix_ns = seconds * 1_000_000_000 + nanoseconds
                if bend_stamp is not None:
                    stamp_unix_ns = bend_stamp(stamp_unix_ns)
                lag_ns = now_ns + distance_ns - stamp_unix_ns
                if lag_ns < 0:
                    lag_ns = 0
                lags_ns.append(lag_ns)
                stamp_ns = now_ns - lag_ns
                # The distance of the clocks is known to some tens of nanoseconds, and bytes of one socket are in order.
                if stamp_ns < inbox.stamp_ns:
                    stamp_ns = inbox.stamp_ns
                read = (data, stamp_ns, floor_ns, True, lag_ns)
            else:
                stamp_ns = now_ns
                read = (data, now_ns, floor_ns, False, 0)
            inbox.stamp_ns = stamp_ns
            held_bytes += len(data)
            reads = inbox.reads
            reads.append(read)
            if len(data) < inbox.read_bytes:
                inbox.drained_ns = now_ns
                inbox.undrained_ns = 0
            else:
                inbox.undrained_ns = floor_ns
                inbox.read_bytes = _more_room(inbox.read_bytes)
            if not (
                inbox.patient
                and roomy
                and len(reads) < PATIENT_READS
                and data[-4:] != b"\r\n\r\n"
                and 0 < len(data) < PATIENT_BYTES
            ):
                if not data:
                    self.forget(inbox)
                self.parse_soon(inbox)
        self._held_bytes += held_bytes

    def _note_wait(self) -> None:
        self._waits_from_ns = clock.monotonic_ns()

    def _note_wake(self) -> None:
        now_ns = clock.monotonic_ns()
        if not self._polled:
            # The loop's last look at its descriptors found nothing to read.
            self._empty_ns = max(self._empty_ns, self._woke_ns)
        self._polled = False
        self._woke_ns = now_ns
        waited_ns = now_ns - self._waits_from_ns
        if waited_ns > SLEPT_NS and self._schedstat is not None:
            run_delay_ns = self._read_run_delay_ns()
            delay_ns, self._run_delay_ns = run_delay_ns - self._run_delay_ns, run_delay_ns
            if waited_ns - delay_ns > SLEPT_NS:
                self._empty_ns = max(self._empty_ns, now_ns - delay_ns - WAKE_UP_NS)

    def _read_run_delay_ns(self) -> int:
        """How long this thread has waited for a core since it began."""
        return 0 if self._schedstat is None else int(os.pread(self._schedstat, 64, 0).split()[1])

    def parse_soon(self, inbox: Inbox) -> None:
        """Have what is unparsed of this socket parsed in the next turns of the loop."""
        if inbox.queued:
            return
        inbox.queued = True
        self._unparsed.append(inbox)
        if len(self._unparsed) == 1:
            self._keep_turning.start(_nothing)

    def parse_now(self, inbox: Inbox) -> None:
        reads, inbox.reads = inbox.reads, []
        self._hand_over(inbox, reads)

    def _hand_over(self, inbox: Inbox, reads: list[Read]) -> None:
        self._held_bytes -= sum(map(len, map(_data_of, reads)))
        inbox.consume(reads)

    def _parse_slice(self) -> None:
        if self._unparsed:
            self._parse(SLICE_READS)

    def _parse(self, budget: int) -> None:
        while budget > 0 and self._unparsed:
            inbox = self._unparsed.popleft()
            reads = inbox.reads
            if len(reads) > budget:
                inbox.reads = reads[budget:]
                reads = reads[:budget]
                self._unparsed.append(inbox)
            else:
                inbox.reads = []
                inbox.queued = False
            budget -= len(reads)
            self._hand_over(inbox, reads)
        if not self._unparsed:
            self._keep_turning.stop()

    def close(self) -> None:
        for watcher in (
            self._readable,
            self._pace,
            self._each_turn,
            self._keep_turning,
            self._before_wait,
            self._after_wait,
        ):
            watcher.stop()
            watcher.close()
        self._epoll.close()
        if self._schedstat is not None:
            os.close(self._schedstat)
        self._stamping.close()


def _open_schedstat() -> int | None:
    """None where this kernel does not tell how long a thread waited for a core: the floor is then not tightened by
    it.
    """
    try:
        return os.open("/proc/self/schedstat", os.O_RDONLY)
    except OSError:
        return None


def _nothing() -> None:
    """The idle watcher's callback: while it is active the loop does not sleep between two slices."""
