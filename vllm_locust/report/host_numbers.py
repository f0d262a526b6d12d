"""What the hosts did in each stage on which a collector ran: the list ``hosts`` of a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from vllm_locust.report.columns import Columns, Floats, Ints, Source, read_batches
from vllm_locust.report.run_facts import Interval

_COLUMNS: Final = (
    *("cpu_fraction", "load_1m", "memory_used_bytes", "memory_total_bytes"),
    *("network_tx_bytes_per_s", "network_rx_bytes_per_s", "collector_cpu_fraction", "missed_ticks"),
)


class HostMetrics:
    """All hosts that were sampled, once a second. ``roles`` says of a host what else is known to have been on it."""

    def __init__(self, source: Source, roles: Mapping[str, Sequence[str]]) -> None:
        self._series = _read(source)
        self._roles = roles

    def numbers(self, interval: Interval | None) -> list[dict[str, Any]] | None:
        """Of one stage, by name; None where no host was sampled in it. A sample speaks of the second before it."""
        if interval is None:
            return None
        hosts = []
        for host, (times, columns) in self._series.items():
            inside = (times > interval.start_unix_ns) & (times <= interval.end_unix_ns)
            if inside.any():
                known = {name: (values[inside])[~np.isnan(values[inside])] for name, values in columns.items()}
                hosts.append(self._host_json(host, int(inside.sum()), known))
        return hosts or None

    def _host_json(self, host: str, samples: int, known: Mapping[str, Floats]) -> dict[str, Any]:
        used, total, load = (known[name] for name in ("memory_used_bytes", "memory_total_bytes", "load_1m"))
        return {
            "host": host,
            "roles": list(self._roles.get(host, ())),
            "samples": samples,
            "cpu_fraction": _mean_and_max(known["cpu_fraction"]),
            "load_1m_max": float(load.max()) if len(load) else None,
            "memory_used_max_bytes": int(used.max()) if len(used) else None,
            "memory_total_bytes": int(total[-1]) if len(total) else None,
            **{
                f"network_{way}_bytes_per_s": _mean_and_max(known[f"network_{way}_bytes_per_s"]) for way in ("tx", "rx")
            },
            "collector_cpu_fraction": _mean_and_max(known["collector_cpu_fraction"]),
            "missed_ticks": int(known["missed_ticks"].sum()),
        }


def _mean_and_max(values: Floats) -> dict[str, float] | None:
    return {"mean": float(values.mean()), "max": float(values.max())} if len(values) else None


def _read(source: Source) -> dict[str, tuple[Ints, dict[str, Floats]]]:
    parts: dict[str, list[tuple[Ints, dict[str, Floats]]]] = {}
    for batch in read_batches(source):
        columns = Columns(batch)
        times = columns.ints("time_unix_ns")
        values = {name: columns.floats(name) for name in _COLUMNS}
        owners = np.array([str(host) for host in columns.texts("host")])
        for host in np.unique(owners).tolist():
            mine = owners == host
            parts.setdefault(host, []).append((times[mine], {name: one[mine] for name, one in values.items()}))
    found: dict[str, tuple[Ints, dict[str, Floats]]] = {}
    for host in sorted(parts):
        times = np.concatenate([part[0] for part in parts[host]])
        order = np.argsort(times, kind="stable")
        joined = {name: np.concatenate([part[1][name] for part in parts[host]])[order] for name in _COLUMNS}
        found[host] = (times[order], joined)
    return found
