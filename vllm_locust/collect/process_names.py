"""What a process that holds GPU memory is called. Only its name: a command line may hold secrets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from vllm_locust import clock

_KEPT_NS: Final = 10_000_000_000
_CHARS: Final = 120


class ProcessNames:
    """vLLM's processes give themselves a title (``VLLM::EngineCore``), which is in place of their first argument. A
    process of another container is known to NVML alone, by its file.
    """

    def __init__(
        self, nvml: Any, proc: Path = Path("/proc"), *, monotonic_ns: Callable[[], int] = clock.monotonic_ns
    ) -> None:
        self._nvml = nvml
        self._proc = proc
        self._monotonic_ns = monotonic_ns
        self._names: dict[int, str | None] = {}
        self._since_ns = monotonic_ns()

    def name(self, pid: int) -> str | None:
        if self._monotonic_ns() - self._since_ns > _KEPT_NS:
            # A process may give itself another title, and its number is given again when it has ended.
            self._names.clear()
            self._since_ns = self._monotonic_ns()
        if pid not in self._names:
            self._names[pid] = self._from_proc(pid) or self._from_nvml(pid)
        return self._names[pid]

    def _from_proc(self, pid: int) -> str | None:
        try:
            first = (self._proc / str(pid) / "cmdline").read_bytes().split(b"\0")[0]
        except OSError:
            return None
        return _program(first)

    def _from_nvml(self, pid: int) -> str | None:
        try:
            name = self._nvml.nvmlSystemGetProcessName(pid)
        except self._nvml.NVMLError:
            return None
        return _program(name if isinstance(name, bytes) else str(name).encode())


def _program(argument: bytes) -> str | None:
    """Without directories, and without what a title says after its first word."""
    words = argument.decode("utf-8", "replace").split()
    return words[0].rsplit("/", 1)[-1][:_CHARS] or None if words else None
