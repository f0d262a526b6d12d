"""The telemetry streams as they grow, for live views. The recorder reads the same entries; nothing is taken away."""

from __future__ import annotations

from typing import Any, Final

from vllm_locust.store.redis_url import RedisOptions
from vllm_locust.store.schema import BatchRefused
from vllm_locust.store.telemetry_schema import decode_telemetry
from vllm_locust.store.telemetry_store import TelemetryStore
from vllm_locust.telemetry import TelemetryKind

_STREAMS: Final = ("gpu", "server")
_BEFORE_MS: Final = 3_000
_COUNT: Final = 500


class LiveTelemetry:
    """``read`` is to be called about once a second."""

    def __init__(self, options: RedisOptions) -> None:
        self._store = TelemetryStore(options)
        self._after: dict[str, str] | None = None
        self.refused = 0
        """Entries that could not be read, or are of another version."""

    def read(self) -> list[tuple[TelemetryKind, list[dict[str, Any]]]]:
        """What has come since the last call, oldest first; at the first, of the seconds before. Raises StoreError."""
        if self._after is None:
            begin_ms = self._store.server_time_unix_ns() // 1_000_000 - _BEFORE_MS
            self._after = dict.fromkeys(_STREAMS, f"{begin_ms}-0")
        found = []
        for entry in self._store.read_telemetry(self._after, count=_COUNT):
            self._after[entry.stream] = entry.entry_id
            try:
                batch = decode_telemetry(entry.payload or b"")
            except BatchRefused:
                self.refused += 1
                continue
            found.append((batch.header.kind, batch.rows.to_pylist()))
        return found

    def close(self) -> None:
        self._store.close()
