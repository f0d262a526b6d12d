"""When each request of all phases was due, sent and over: how many were in flight at a time, and what that says."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_locust.load_audit import audit
from vllm_locust.phases import belonging_time
from vllm_locust.report.columns import Columns, Floats, Ints, RequestColumns, Source, first_known, read_batches
from vllm_locust.report.run_facts import Interval, Stage
from vllm_locust.report.stage_samples import REFUSED
from vllm_locust.steady_state import UNKNOWN, Hold, Occupancy, SteadyState, assess


class RequestTimes:
    """Filled batch by batch; ``settle`` once all are there."""

    def __init__(self) -> None:
        self._parts: dict[str, list[npt.NDArray[Any]]] = {}
        self._missed: list[Ints] = []
        self._due = self._sent = self._over = self._planned = np.empty(0, np.int64)
        self._was_sent = self._scheduled = self._refused = np.empty(0, np.bool_)
        self._latency_ns: Floats = np.empty(0)
        self._in_flight = self._in_system = Occupancy(np.empty(0), np.empty(0))

    def add(self, columns: RequestColumns) -> None:
        sent, scheduled = columns.ints("sent_unix_ns"), columns.known("scheduled_unix_ns")
        http_status = columns.ints("http_status")
        latency_ns = first_known(*(columns.metric_ns(name) for name in ("ttft_from_schedule", "ttft", "e2e", "done")))
        parts = {
            "due": belonging_time(columns.ints("scheduled_unix_ns"), scheduled, sent),
            "scheduled": scheduled,
            "sent": sent,
            "over": sent + columns.ended_ns,
            "was_sent": columns.sent,
            "refused": np.isin(http_status, REFUSED) & ~columns.ok,
            "latency_ns": np.where(columns.ok, latency_ns, np.nan),
        }
        for name, part in parts.items():
            self._parts.setdefault(name, []).append(part)

    def add_missed(self, arrivals: Source | None) -> None:
        """Arrivals that became no request."""
        for batch in read_batches(arrivals or ()):
            self._missed.append(Columns(batch).ints("scheduled_unix_ns"))

    def settle(self) -> None:
        if self._parts:
            all_parts = {name: np.concatenate(parts) for name, parts in self._parts.items()}
            order = np.argsort(all_parts["due"], kind="stable")
            by_due = {name: values[order] for name, values in all_parts.items()}
            self._due, self._sent, self._over = by_due["due"], by_due["sent"], by_due["over"]
            self._was_sent, self._scheduled, self._refused, self._latency_ns = (
                by_due[name] for name in ("was_sent", "scheduled", "refused", "latency_ns")
            )
            self._planned = self._due[self._scheduled]
        self._planned = np.sort(np.concatenate([self._planned, *self._missed]))
        over_s = self._seconds(self._over)
        self._in_system = Occupancy(self._seconds(self._due), over_s)
        self._in_flight = Occupancy(self._seconds(self._sent[self._was_sent]), over_s[self._was_sent])
        self._parts, self._missed = {}, []

    @property
    def extent(self) -> Interval | None:
        """From the first request that was due to the end of the last; None without requests."""
        if not len(self._due):
            return None
        return Interval(start_unix_ns=int(self._due[0]), end_unix_ns=int(max(self._over.max(), self._sent.max())))

    @property
    def planned_unix_ns(self) -> Ints:
        """When each arrival of an open loop was due, sent or not, in order of time."""
        return self._planned

    def _seconds(self, unix_ns: Ints | int) -> Any:
        """On the axis of the occupancies: so near to its zero that floats hold it to the nanosecond."""
        return (unix_ns - (self._due[0] if len(self._due) else 0)) / 1e9

    def _belonging(self, interval: Interval) -> slice:
        first, after = np.searchsorted(self._due, (interval.start_unix_ns, interval.end_unix_ns)).tolist()
        return slice(first, after)

    def in_flight_means(self, edges_unix_ns: Ints) -> Floats:
        """Between each two successive edges."""
        return self._in_flight.means(self._seconds(edges_unix_ns))

    def in_flight_json(self, interval: Interval | None) -> dict[str, float | None]:
        if interval is None or interval.length_s <= 0:
            return {"mean": None, "max": None}
        edges = np.array([interval.start_unix_ns, interval.end_unix_ns])
        return {
            "mean": float(self.in_flight_means(edges)[0]),
            "max": self._in_flight.most(*self._seconds(edges).tolist()),
        }

    def delivery_json(self, interval: Interval | None, process_gap_cv: float | None) -> dict[str, Any] | None:
        """Whether the plan's arrivals were sent when they were due; None in a closed loop. What a task sends after its
        arrival's request is in no plan.
        """
        if interval is None or not len(self._planned):
            return None
        bounds = (interval.start_unix_ns, interval.end_unix_ns)
        planned = self._planned[slice(*np.searchsorted(self._planned, bounds).tolist())]
        sent = self._sent[self._was_sent & self._scheduled]
        sent = sent[(sent >= bounds[0]) & (sent < bounds[1])]
        audited = audit(planned, sent)
        return {
            "planned": len(planned),
            "sent": len(sent),
            "achieved_fraction": audited.achieved_fraction,
            "process_gap_cv": process_gap_cv,
            "planned_gap_cv": audited.planned_gap_cv,
            "sent_gap_cv": audited.sent_gap_cv,
        }

    def steady_state(self, stage: Stage, planned: int | None) -> SteadyState:
        """Of a hold; nothing is known of a ramp. ``planned`` arrivals in an open loop."""
        interval = stage.interval
        if stage.kind != "hold" or interval is None or interval.length_s <= 0:
            return UNKNOWN
        mine = self._belonging(interval)
        latency_ns = self._latency_ns[mine]
        return assess(
            Hold(
                start_s=self._seconds(interval.start_unix_ns),
                length_s=interval.length_s,
                in_system=self._in_system,
                in_flight=self._in_flight,
                times_in_system_s=(self._over[mine] - self._due[mine]) / 1e9,
                latencies_s=latency_ns[~np.isnan(latency_ns)] / 1e9,
                open_loop=planned is not None,
                arrivals=mine.stop - mine.start if planned is None else planned,
                dropped=stage.dropped_arrivals,
                refused=int(self._refused[mine].sum()),
            )
        )
