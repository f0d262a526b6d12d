"""What the hosts did on which a collector ran, stage beside stage: some rows for each host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_locust.report import figures

Json = Mapping[str, Any]
Rows = tuple[tuple[str, Callable[[Json], str]], ...]


def has_hosts(stages: Sequence[Json]) -> bool:
    return any(stage["hosts"] for stage in stages)


def host_rows(stages: Sequence[Json]) -> Rows:
    """Label and value: the host's name and what else was on it, and its figures below."""
    roles = {host["host"]: host["roles"] for stage in stages for host in stage["hosts"] or ()}
    rows: list[tuple[str, Callable[[Json], str]]] = []
    for name, also in sorted(roles.items()):
        rows.append((f"{name} ({', '.join(also)})" if also else name, lambda _: ""))
        for label, show in _FIGURES:
            rows.append((f"  {label}", _of(name, show)))
    return tuple(rows)


def _of(name: str, show: Callable[[Json], str]) -> Callable[[Json], str]:
    def shown(stage: Json) -> str:
        mine = next((host for host in stage["hosts"] or () if host["host"] == name), None)
        return figures.UNKNOWN if mine is None else show(mine)

    return shown


def _share(block: Json | None, which: str) -> str:
    return figures.UNKNOWN if block is None else figures.share(block[which])


def _memory(host: Json) -> str:
    used, total = host["memory_used_max_bytes"], host["memory_total_bytes"]
    return figures.UNKNOWN if used is None or not total else figures.share(used / total)


def _traffic(block: Json | None) -> str:
    return figures.UNKNOWN if block is None else f"{figures.rate(block['mean'] / 1e6)} MB/s"


_FIGURES: Rows = (
    ("CPU, mean", lambda host: _share(host["cpu_fraction"], "mean")),
    ("CPU, most in a second", lambda host: _share(host["cpu_fraction"], "max")),
    ("memory, most", _memory),
    ("network out", lambda host: _traffic(host["network_tx_bytes_per_s"])),
    ("network in", lambda host: _traffic(host["network_rx_bytes_per_s"])),
    ("collector, of a core", lambda host: _share(host["collector_cpu_fraction"], "mean")),
)
