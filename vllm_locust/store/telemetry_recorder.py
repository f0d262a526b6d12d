"""The recorder's telemetry: what it must not cost the records, and how long it is waited for at the end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from vllm_locust import clock
from vllm_locust.errors import StoreError
from vllm_locust.store.telemetry_intake import SECOND_NS, TelemetryIntake
from vllm_locust.store.telemetry_store import TelemetryStore

_LAST_ROWS_NS: Final = 4 * SECOND_NS
"""A row is published within about two seconds."""
_LOOK_AGAIN_S: Final = 0.1
_ACTIVE_NS: Final = 5 * SECOND_NS


class TelemetryRecorder:
    """No failure here stops the recording of requests: it is said once, and tried again."""

    def __init__(self, directory: Path, store: TelemetryStore) -> None:
        self._store = store
        self._intake = TelemetryIntake(directory, store)
        self._finish_ns: int | None = None
        self._finish_unix_ns = 0
        self._error: str | None = None

    def restart(self, from_unix_ns: int) -> None:
        self._intake.restart(from_unix_ns)

    def turn(self, *, finishing: bool) -> bool:
        """While finishing, whether all that was sampled until then is on disk, or was waited for in vain."""
        try:
            if finishing and self._finish_ns is None:
                self._finish_unix_ns = self._store.server_time_unix_ns()
                self._finish_ns = clock.monotonic_ns()
            self._intake.turn(finishing=finishing)
            if finishing:
                self._intake.write()
        except (StoreError, OSError) as exc:
            if str(exc) != self._error:
                print(f"recorder: telemetry: {exc}", file=sys.stderr, flush=True)
            self._error = str(exc)
            return True
        self._error = None
        if self._finish_ns is None:
            return True
        waited_ns = clock.monotonic_ns() - self._finish_ns
        complete = self._intake.is_complete_until(self._finish_unix_ns, self._finish_ns - _ACTIVE_NS)
        if complete or waited_ns > _LAST_ROWS_NS:
            return True
        clock.sleep(_LOOK_AGAIN_S)
        return False

    def close(self) -> None:
        self._store.close()
