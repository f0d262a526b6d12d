"""The telemetry streams in Redis, which belong to no run: capped by age, written by collectors, read by recorders.

A publisher needs these rights and no more: ``~vllm_locust:1:telemetry:*`` with ``+xadd +expire +info +time``, and what
the client needs to connect (``+hello +auth +ping +client|setname +select``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from vllm_locust.errors import StoreError
from vllm_locust.store.clock_offset import ClockOffset
from vllm_locust.store.redis_store import RedisServer
from vllm_locust.store.redis_url import RedisOptions
from vllm_locust.telemetry import TelemetryKind

TELEMETRY_PREFIX: Final = "vllm_locust:1:telemetry:"
STREAMS: Final = {
    TelemetryKind.GPU: "gpu",
    TelemetryKind.GPU_PROCESSES: "gpu",
    TelemetryKind.HOST: "host",
    TelemetryKind.SERVER: "server",
}
"""The stream in which a kind travels."""

_KEEP_MS: Final = 3_600_000
_EXPIRE_S: Final = 7_200
"""When nobody publishes any more."""
_ENTRIES_AT_MOST: Final = 57_600
"""Where the server, before 6.2, cannot cap by age: an hour of 16 sources."""
_BATCH, _CLOCK = b"b", b"c"


@dataclass(frozen=True, slots=True)
class TelemetryEntry:
    stream: str
    entry_id: str
    payload: bytes | None
    """None when the entry has no batch in it."""
    clock: bytes | None
    """Its source's newest measured clock offset, as ``parse_clock`` reads it."""


def parse_clock(text: bytes) -> ClockOffset | None:
    """None where it is not usable: it comes off a network."""
    try:
        fields = json.loads(text)
        names = ("measured_unix_ns", "measured_monotonic_ns", "offset_ns", "uncertainty_ns")
        numbers = {name: fields[name] for name in names}
        if not all(type(number) is int and abs(number) < 1 << 63 for number in numbers.values()):
            return None
        return ClockOffset(**numbers, redis_run_id=str(fields["redis_run_id"]))
    except (ValueError, TypeError, KeyError):
        return None


class TelemetryStore(RedisServer):
    def __init__(self, options: RedisOptions) -> None:
        super().__init__(options)
        self._caps_by_age = True

    def server_run_id(self) -> str:
        """Also learns how this server's streams can be capped."""
        info = self._do("tell its run_id", "INFO", "server")
        version = [int(part) for part in str(info["redis_version"]).split(".")[:2]]
        self._caps_by_age = version >= [6, 2]
        return str(info["run_id"])

    def add_telemetry(
        self, batches: Sequence[tuple[TelemetryKind, bytes]], clock: ClockOffset
    ) -> list[StoreError | None]:
        """Send batches in one round trip: for each None, or why the server refused it."""
        newest = json.dumps(asdict(clock))
        server_ms = (clock.measured_unix_ns + clock.offset_ns) // 1_000_000
        cap = ("MINID", "~", server_ms - _KEEP_MS) if self._caps_by_age else ("MAXLEN", "~", _ENTRIES_AT_MOST)
        streams = [TELEMETRY_PREFIX + STREAMS[kind] for kind, _ in batches]
        with self._naming("take telemetry"):
            pipe = self._redis.pipeline(transaction=False)
            for stream, (_, payload) in zip(streams, batches, strict=True):
                pipe.execute_command("XADD", stream, *cap, "*", _BATCH, payload, _CLOCK, newest)
            for stream in sorted(set(streams)):
                pipe.expire(stream, _EXPIRE_S)
            replies = pipe.execute(raise_on_error=False)
        return [
            StoreError(f"Redis at {self._where} could not take telemetry: {reply}")
            if isinstance(reply, Exception)
            else None
            for reply in replies[: len(batches)]
        ]

    def read_telemetry(self, after: Mapping[str, str], *, count: int) -> list[TelemetryEntry]:
        """Entries of each stream after the given ids, oldest first. Does not wait."""
        keys = [TELEMETRY_PREFIX + stream for stream in after]
        reply = self._do("read telemetry", "XREAD", "COUNT", count, "STREAMS", *keys, *after.values())
        return [
            TelemetryEntry(
                key.decode().removeprefix(TELEMETRY_PREFIX),
                entry_id.decode(),
                (fields or {}).get(_BATCH),
                (fields or {}).get(_CLOCK),
            )
            for key, entries in reply or []
            for entry_id, fields in entries
        ]
