"""The load of the host itself, from ``/proc``: whether the GPU's host, and not the GPU, is what is busy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from vllm_locust import clock
from vllm_locust.collect.gpu_fields import KIB, Rate
from vllm_locust.telemetry import Row

_INNER_INTERFACES: Final = ("lo", "veth", "docker", "br-", "cni", "cali", "flannel", "virbr", "vxlan", "tunl", "dummy")
"""What goes through them goes through another interface as well, or never leaves the host."""


class HostLoad:
    def __init__(self, proc: Path = Path("/proc"), *, monotonic_ns: Callable[[], int] = clock.monotonic_ns) -> None:
        self._proc = proc
        self._monotonic_ns = monotonic_ns
        self._cpu: tuple[int, int] | None = None
        self._network = {"network_tx_bytes_per_s": Rate(), "network_rx_bytes_per_s": Rate()}
        self.read()

    def read(self) -> Row:
        """Since the last time. What this kernel does not tell is left out."""
        row: dict[str, object] = {"cpu_fraction": self._cpu_fraction()}
        loads = self._words("loadavg")
        if loads:
            row["load_1m"] = float(loads[0])
        memory = self._memory()
        if {"MemTotal", "MemAvailable"} <= set(memory):
            row["memory_total_bytes"] = memory["MemTotal"]
            row["memory_used_bytes"] = memory["MemTotal"] - memory["MemAvailable"]
        return row | self._traffic()

    def _text(self, name: str) -> str:
        try:
            return (self._proc / name).read_text(encoding="ascii", errors="replace")
        except OSError:
            return ""

    def _words(self, name: str) -> list[str]:
        return self._text(name).split()

    def _cpu_fraction(self) -> float | None:
        first = self._text("stat").partition("\n")[0].split()
        if len(first) < 6 or first[0] != "cpu":
            return None
        # user nice system idle iowait irq softirq steal; what a guest uses is in user already.
        ticks = [int(word) for word in first[1:9]]
        now = (sum(ticks) - ticks[3] - ticks[4], sum(ticks))
        before, self._cpu = self._cpu, now
        if before is None or now[1] <= before[1]:
            return None
        return max(0.0, min(1.0, (now[0] - before[0]) / (now[1] - before[1])))

    def _memory(self) -> dict[str, int]:
        found = {}
        for line in self._text("meminfo").splitlines():
            words = line.split()
            if len(words) == 3 and words[2] == "kB" and words[1].isdigit():
                found[words[0].rstrip(":")] = int(words[1]) * KIB
        return found

    def _traffic(self) -> dict[str, object]:
        counts = [0, 0]
        lines = self._text("net/dev").splitlines()[2:]
        for line in lines:
            name, _, rest = line.partition(":")
            words = rest.split()
            if len(words) >= 9 and not name.strip().startswith(_INNER_INTERFACES):
                counts[0] += int(words[8])
                counts[1] += int(words[0])
        if not lines:
            return {}
        now_ns = self._monotonic_ns()
        rates = zip(self._network.items(), counts, strict=True)
        return {name: rate.of(count, now_ns) for (name, rate), count in rates}
