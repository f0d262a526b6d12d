"""How far this host's wall clock is from the Redis server's, and how sure that is.

Several probes are made and the one with the least round trip is believed: offset = server's time − local time at the
middle of the round trip, uncertain by half of it. The server tells its time in whole microseconds, cut off, which
adds half of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_locust import clock
from vllm_locust.errors import StoreError

SERVER_RESOLUTION_NS = 1_000
MAX_OFFSET_NS = 100 * 366 * 86_400_000_000_000
"""A host without a battery is in 1970. Times much further away do not fit into the tables' 64 bits."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Add ``offset_ns`` to a local wall-clock time to have it on the clock of the Redis server ``redis_run_id``."""

    measured_unix_ns: int
    measured_monotonic_ns: int
    offset_ns: int
    uncertainty_ns: int
    redis_run_id: str


def measure_clock_offset(
    server_time_unix_ns: Callable[[], int],
    redis_run_id: str,
    *,
    probes: int = 8,
    unix_ns: Callable[[], int] = clock.unix_ns,
    monotonic_ns: Callable[[], int] = clock.monotonic_ns,
) -> ClockOffset:
    """Probe the server ``probes`` times. The round trip is timed on the monotonic clock, so that a step of the wall
    clock inside a probe shifts only that probe's offset, by at most the step, and never its uncertainty. Raises
    StoreError where the two clocks are a century apart.
    """

    def probe() -> tuple[int, ClockOffset]:
        local_unix_ns, sent_ns = unix_ns(), monotonic_ns()
        server_unix_ns = server_time_unix_ns()
        round_trip_ns = monotonic_ns() - sent_ns
        middle_unix_ns = local_unix_ns + round_trip_ns // 2
        return round_trip_ns, ClockOffset(
            measured_unix_ns=middle_unix_ns,
            measured_monotonic_ns=sent_ns + round_trip_ns // 2,
            offset_ns=server_unix_ns + SERVER_RESOLUTION_NS // 2 - middle_unix_ns,
            uncertainty_ns=round_trip_ns // 2 + SERVER_RESOLUTION_NS // 2,
            redis_run_id=redis_run_id,
        )

    measured = min((probe() for _ in range(probes)), key=lambda measured: measured[0])[1]
    if abs(measured.offset_ns) > MAX_OFFSET_NS:
        years = abs(measured.offset_ns) / (365.25 * 86_400e9)
        raise StoreError(
            f"this host's clock is {years:.0f} years from that of the Redis server, too far to put its times on one "
            "axis; set the clock that is wrong"
        )
    return measured
