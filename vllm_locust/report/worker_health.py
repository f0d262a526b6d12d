"""The generator's own condition in the window, from ``workers.parquet``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np

from vllm_locust.report.blocks import seconds
from vllm_locust.report.columns import Columns, Floats, Source, read_batches
from vllm_locust.report.run_facts import Interval
from vllm_locust.statistics import percentile

_P95: Final = Fraction(19, 20)
_P99: Final = Fraction(99, 100)
_SECOND_NS: Final = 1_000_000_000
_AT: Final = "after_window_start_ns"
_COLUMNS: Final = (
    "in_flight",
    "cpu_fraction",
    "run_delay_ns",
    "loop_lag_ns",
    "receive_lag_p99_ns",
    "receive_lag_max_ns",
    "gc_pause_ns",
    "open_fds",
    "rss_bytes",
    "spooled_batches",
)


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """``workers`` as in ``summary.json``; the rest is the worst of all workers, None where nothing was sampled."""

    workers: list[dict[str, Any]]
    samples: int | None
    """Of all workers in the window; None where none were asked for."""
    cpu_fraction_p95: float | None
    cpu_worker: str | None
    run_delay_share: float | None
    loop_lag_p99_ns: float | None
    receive_lag_p99_ns: float | None
    """The 95th percentile over seconds of each second's p99: one bad second does not speak for the run."""
    gc_pause_max_ns: int | None

    def as_json(self) -> dict[str, Any]:
        return {"workers": self.workers}


def read_worker_health(
    source: Source | None, window: Interval | None, schedule_lags_max_ns: Mapping[str, float]
) -> WorkerHealth:
    """``schedule_lags_max_ns``: of each worker's requests of the window, which may have been sent after it."""
    series = {} if source is None else _read(source, window)
    rows = [
        _summarize(worker_id, host, columns) | {"schedule_lag_max_s": seconds(schedule_lags_max_ns.get(worker_id))}
        for (worker_id, host), columns in sorted(series.items())
    ]
    by_cpu = max(rows, key=lambda row: row["cpu_fraction_p95"], default=None)
    pauses = [int(np.nanmax(columns["gc_pause_ns"])) for columns in series.values()]
    return WorkerHealth(
        workers=rows,
        samples=None if source is None else sum(row["samples"] for row in rows),
        cpu_fraction_p95=None if by_cpu is None else by_cpu["cpu_fraction_p95"],
        cpu_worker=None if by_cpu is None else by_cpu["worker_id"],
        run_delay_share=max(
            (row["run_delay_share"] for row in rows if row["run_delay_share"] is not None), default=None
        ),
        loop_lag_p99_ns=_worst(series, "loop_lag_ns", _P99),
        receive_lag_p99_ns=_worst(series, "receive_lag_p99_ns", _P95),
        gc_pause_max_ns=max(pauses, default=None),
    )


_Series = dict[tuple[str, str], dict[str, Floats]]


def _read(source: Source, window: Interval | None) -> _Series:
    parts: dict[tuple[str, str], dict[str, list[Floats]]] = {}
    for batch in read_batches(source):
        columns = Columns(batch)
        times = columns.ints("time_unix_ns")
        inside = np.ones(len(times), dtype=np.bool_)
        if window is not None:
            # A sample speaks of the second before it.
            inside = (times > window.start_unix_ns) & (times <= window.end_unix_ns + _SECOND_NS)
        owners = np.array([f"{w}\0{h}" for w, h in zip(columns.texts("worker_id"), columns.texts("host"), strict=True)])
        for owner in np.unique(owners[inside]).tolist():
            worker_id, _, host = owner.partition("\0")
            mine = inside & (owners == owner)
            series = parts.setdefault((worker_id, host), {name: [] for name in (_AT, *_COLUMNS)})
            series[_AT].append((times[mine] - (0 if window is None else window.start_unix_ns)).astype(np.float64))
            for name in _COLUMNS:
                series[name].append(columns.floats(name)[mine])
    return {owner: {name: np.concatenate(chunks) for name, chunks in series.items()} for owner, series in parts.items()}


def _known(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def _quantile(values: Floats, q: Fraction) -> float | None:
    known = np.sort(_known(values))
    return percentile(known, q) if len(known) else None


def _maximum(values: Floats) -> float | None:
    known = _known(values)
    return float(known.max()) if len(known) else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _worst(series: _Series, name: str, q: Fraction) -> float | None:
    values = [_quantile(columns[name], q) for columns in series.values()]
    return max((value for value in values if value is not None), default=None)


def _run_delay_share(delay_ns: Floats, at_ns: Floats) -> float | None:
    """Of the time from one sample to the next: that of a worker which was held up speaks of more than a second."""
    known = ~np.isnan(delay_ns)
    if not known.any():
        return None
    return min(1.0, float(delay_ns[known].sum() / (np.ptp(at_ns[known]) + _SECOND_NS)))


def _summarize(worker_id: str, host: str, columns: dict[str, Floats]) -> dict[str, Any]:
    samples = len(columns["cpu_fraction"])
    return {
        "worker_id": worker_id,
        "host": host,
        "samples": samples,
        "in_flight_max": _whole(_maximum(columns["in_flight"])),
        "cpu_fraction_mean": float(columns["cpu_fraction"].mean()),
        "cpu_fraction_p95": _quantile(columns["cpu_fraction"], _P95),
        "run_delay_share": _run_delay_share(columns["run_delay_ns"], columns[_AT]),
        "loop_lag_p99_s": seconds(_quantile(columns["loop_lag_ns"], _P99)),
        "loop_lag_max_s": seconds(_maximum(columns["loop_lag_ns"])),
        "receive_lag_p99_s": seconds(_quantile(columns["receive_lag_p99_ns"], _P95)),
        "receive_lag_max_s": seconds(_maximum(columns["receive_lag_max_ns"])),
        "gc_pause_max_s": seconds(_maximum(columns["gc_pause_ns"])),
        "open_fds_max": _whole(_maximum(columns["open_fds"])),
        "rss_bytes_max": _whole(_maximum(columns["rss_bytes"])),
        "spooled_batches_max": _whole(_maximum(columns["spooled_batches"])),
    }
