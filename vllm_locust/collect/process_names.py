"""What a process that holds GPU memory is called. Only its name: a command line may hold secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

_KEPT_AT_MOST: Final = 1024
_CHARS: Final = 120


class ProcessNames:
    """vLLM's processes give themselves a title (``VLLM::EngineCore``), which is in place of their first argument. A
    process of another container is known to NVML alone, by its file.
    """

    def __init__(self, nvml: Any, proc: Path = Path("/proc")) -> None:
        self._nvml = nvml
        self._proc = proc
        self._names: dict[int, str | None] = {}

    def name(self, pid: int) -> str | None:
        if pid not in self._names:
            if len(self._names) >= _KEPT_AT_MOST:
                self._names.clear()
            self._names[pid] = self._from_proc(pid) or self._from_nvml(pid)
        return self._names[pid]

    def keep(self, pids: set[int]) -> None:
        """Forget all others: a number is given again."""
        self._names = {pid: name for pid, name in self._names.items() if pid in pids}

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
