"""Whether this kernel stamps what a socket receives, and how long after the stamp the bytes are read: really measured,
over a TCP connection on the loopback interface.
"""

from __future__ import annotations

import socket
import struct
from statistics import median_low

from vllm_locust import clock
from vllm_locust.checkup.host import StampFacts
from vllm_locust.load.receiver import SO_TIMESTAMPNS, enable_stamps

READS = 200
_PAUSE_S = 0.001
_TIMEOUT_S = 5.0
_timespec = struct.Struct("qq")


def measure_stamps(reads: int = READS) -> StampFacts:
    """Raises OSError where there is no loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname(), _TIMEOUT_S)
        with sender, listener.accept()[0] as receiver:
            receiver.settimeout(_TIMEOUT_S)
            enable_stamps(receiver)
            # The kernel begins to stamp a moment after it was asked to.
            for _ in range(3):
                _read_one(sender, receiver)
            lags_ns = [lag_ns for _ in range(reads) if (lag_ns := _read_one(sender, receiver)) is not None]
    return StampFacts(
        reads=reads,
        stamped=len(lags_ns),
        lag_median_ns=median_low(lags_ns) if lags_ns else None,
        lag_max_ns=max(lags_ns, default=None),
    )


def _read_one(sender: socket.socket, receiver: socket.socket) -> int | None:
    """The read's lag behind its stamp; None where there is no stamp between the sending and the read."""
    clock.sleep(_PAUSE_S)
    sent_unix_ns = clock.unix_ns()
    sender.sendall(b"x")
    _, ancillary, _, _ = receiver.recvmsg(16, 128)
    read_unix_ns = clock.unix_ns()
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS:
            seconds, nanoseconds = _timespec.unpack(data[: _timespec.size])
            stamp_ns = seconds * 1_000_000_000 + nanoseconds
            if clock.bend_stamp is not None:
                stamp_ns = clock.bend_stamp(stamp_ns)
            return read_unix_ns - stamp_ns if sent_unix_ns <= stamp_ns <= read_unix_ns else None
    return None
