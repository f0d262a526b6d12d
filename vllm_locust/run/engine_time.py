"""The time that Locust's engine goes by.

It reads the wall clock to find that its master has been silent for a minute, and to tell a newer spawn order from an
older one. A wall clock that is set in mid-run would end a worker, or have it discard what it is told to spawn.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from locust import runners

from vllm_locust.clock import WallAxis


def steady_engine_time() -> None:
    """From now on the engine's time runs on at the monotonic clock's pace, from what the wall clock shows now."""
    axis = WallAxis()
    engine: Any = runners
    engine.time = SimpleNamespace(time=lambda: axis.unix_ns() / 1e9)
