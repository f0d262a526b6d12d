"""The search for the capacity inside one run: probes as stages of a load that is planned while it runs.

Each probe is a load that settles, unmeasured, and a window, which is a stage. Behind it the load goes on until the
window's requests have ended, for these must not find a server that gets emptier; where the probe is a clear miss there
is silence instead. After a miss there is silence, before a lower load, until no more is in flight than that load has.

An open loop is planned two seconds ahead, so a window comes in pieces: a hopeless one ends with the piece that runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import gevent

from vllm_locust import clock
from vllm_locust.aggregate import RunAggregate
from vllm_locust.capacity.probe import Probe
from vllm_locust.capacity.record import RecordedProbe, SearchRecord, search_of
from vllm_locust.capacity.search import Capacity
from vllm_locust.capacity_options import CapacityOrder, hold
from vllm_locust.errors import VllmLocustError
from vllm_locust.load_profile import Quantity
from vllm_locust.run.capacity.live_probe import LiveProbe
from vllm_locust.run.course.stage_spans import Stretch
from vllm_locust.slo import parse_slos
from vllm_locust.store.rundir import write_json

if TYPE_CHECKING:
    from vllm_locust.run.course.course import Course, RunView

logger = logging.getLogger(__name__)

LOOK_NS: Final = 1_000_000_000
NEWS_NS: Final = 2_200_000_000
"""A worker tells once a second, and what it tells is on its way for a moment."""
LOST_NS: Final = 5_000_000_000
"""So long after a window's end every worker that is there has told of all the arrivals that it has of it."""
STEP_NS: Final = 1_000_000_000
PIECES: Final = 20
MIN_PIECE_NS: Final = 2_000_000_000
SETTLE_LATENCIES: Final = 2.0
"""A load has settled after so many times the median latency, if not before."""
FULL_IN_A_ROW: Final = 2
"""So many probes without a free slot in a row end the search."""
LEFT_OUT_IN_A_ROW: Final = 3
"""So often a load is tried at which the probe did not count."""
_Result = TypeVar("_Result")


class CapacityProbes:
    """Conducts the search; see ``Search``."""

    def __init__(
        self,
        view: RunView,
        order: CapacityOrder,
        *,
        terms: Mapping[str, Any],
        earlier: Sequence[RecordedProbe] = (),
        reset_prefix_cache: Callable[[], None] | None = None,
    ) -> None:
        """``reset_prefix_cache`` is called before each probe, when nothing is in flight. It may take its time."""
        self._view = view
        self._open_loop = order.settings.quantity is Quantity.RATE
        self._quantity = order.settings.quantity
        self._record = SearchRecord(run_id=view.run_id, settings=order.settings, terms=terms, probes=list(earlier))
        self._search = search_of(order.settings, earlier)
        self._slos = parse_slos(view.config.slos)
        self._reset_prefix_cache = reset_prefix_cache
        self._known: Capacity | None = None
        self._course: Course | None = None
        self._plan: Iterator[Stretch] | None = None
        self._live: LiveProbe | None = None
        self._stage = 0
        self._full_in_a_row = 0
        self._workers: set[str] = set()
        """Those that were there when the probe began."""
        self._due: int | None = None
        self._began_ns = 0
        self._looked_ns = 0

    @property
    def aim(self) -> str:
        settings = self._record.settings
        start = hold(settings.start_load, None, self._quantity).name
        what = "rate" if self._open_loop else "number of users"
        return (
            f"search for the highest {what} within the SLOs: from {start}, at most {settings.max_probes} probes in "
            f"{settings.budget_s:g} s"
        )

    @property
    def state(self) -> str:
        number = len(self._record.probes) + 1
        load = "" if self._live is None else f": {hold(self._live.load, None, self._quantity).name}"
        return f"probe {number}{load}{self._known_in_words()}"

    @property
    def probe(self) -> dict[str, Any]:
        """Its number, its load, and what the probes before it say: the capacity's interval, the highest load that held
        and the lowest that did not; null where unknown.
        """
        bounds = ("low", "high", "held_load", "missed_load")
        return {
            "number": len(self._record.probes) + 1,
            "load": None if self._live is None else self._live.load,
            "unit": "requests/s" if self._open_loop else "users",
            **{name: None if self._known is None else getattr(self._known, name) for name in bounds},
        }

    def _known_in_words(self) -> str:
        known = self._known
        if known is None:
            return ""
        if known.low is not None and known.high is not None:
            return f", capacity {known.low:.3g}-{known.high:.3g}"
        if known.held_load is not None:
            return f", capacity above {known.held_load:.3g}"
        return "" if known.missed_load is None else f", capacity below {known.missed_load:.3g}"

    def follow(self, course: Course) -> None:
        self._course = course

    def next_stretch(self) -> Stretch | None:
        if self._plan is None:
            self._plan = self._probes()
        return next(self._plan, None)

    # The plan

    def _probes(self) -> Iterator[Stretch]:
        self._began_ns = clock.monotonic_ns()
        self._write()
        while (probe := self._next_probe()) is not None:
            yield from self._one_probe(probe)
            self._finish()
            self._stage += 1
        self._live = None

    def _next_probe(self) -> Probe | None:
        self._record.ended = self._why_given_up()
        if self._record.ended is not None:
            logger.error("%s", self._record.ended)
            self._write()
            return None
        return _aside(self._search.next_probe)

    def _why_given_up(self) -> str | None:
        """The same load would only bring the same again."""
        if self._live is not None and self._live.server.gone is not None:
            return f"The search ended early: {self._live.server.gone}."
        if self._full_in_a_row >= FULL_IN_A_ROW:
            return (
                f"The search ended early: in {self._full_in_a_row} probes in a row every slot was busy, so that the "
                "load was not the planned one; raise -u."
            )
        probes = self._record.probes
        left_out = [probe.left_out for probe in probes if probe.left_out is not None]
        last = [probe.left_out for probe in probes[-LEFT_OUT_IN_A_ROW:] if probe.left_out is not None]
        if len(last) == LEFT_OUT_IN_A_ROW:
            return f"The search ended early: {len(last)} probes in a row do not count, the last since {last[-1]}."
        if len(left_out) > self._record.settings.max_probes // 2:
            return f"The search ended early: {len(left_out)} probes do not count, the last since {left_out[-1]}."
        return None

    def _one_probe(self, probe: Probe) -> Iterator[Stretch]:
        logger.info(
            "Probe %d: %s for %.0f s (%s)",
            len(self._record.probes) + 1,
            hold(probe.load, None, self._quantity).name,
            probe.window_s,
            probe.why,
        )
        yield from self._empty(probe)
        settle_s = max(probe.settle_s, SETTLE_LATENCIES * (self._latency_s() or 0.0))
        yield self._stretch(probe.load, round(settle_s * 1e9), None)
        self._workers = set(self._view.messenger.worker_ids())
        self._live, self._due = LiveProbe(probe.load, self._slos, open_loop=self._open_loop), None
        for length_ns in self._pieces(round(probe.window_s * 1e9)):
            yield self._stretch(probe.load, length_ns, self._stage)
            if self._live.is_over:
                break
        yield from self._await_answers(self._live)

    def _pieces(self, window_ns: int) -> list[int]:
        if not self._open_loop:
            return [window_ns]
        count = max(1, window_ns // max(MIN_PIECE_NS, window_ns // PIECES))
        return [window_ns * (i + 1) // count - window_ns * i // count for i in range(count)]

    def _stretch(self, load: float, length_ns: int, stage: int | None) -> Stretch:
        return Stretch(hold(load, length_ns, self._quantity), stage)

    def _await_answers(self, live: LiveProbe) -> Iterator[Stretch]:
        """Until the window's requests have ended, have had the time that requests have at the end of any run, or the
        budget is spent.
        """
        assert self._course is not None
        span = self._course.span(self._stage)
        assert span is not None
        assert span.end_unix_ns is not None
        end_ns = span.end_unix_ns
        self._due = self._course.arrivals_due(span)
        while True:
            now_ns = self._view.common_unix_ns()
            in_doubt = live.server.in_doubt and live.server.gone is None
            if (
                self._answered(now_ns - end_ns) and not in_doubt
            ) or now_ns - end_ns > self._view.config.drain_timeout_ns:
                return
            if now_ns - end_ns > NEWS_NS and self._budget_is_spent():
                return
            hopeless = live.is_over or (self._due is not None and live.surely_missed(self._due) and not in_doubt)
            yield self._stretch(0.0 if hopeless and self._open_loop else live.load, STEP_NS, None)

    def _budget_is_spent(self) -> bool:
        before_s = sum(probe.result.elapsed_s for probe in self._record.probes)
        return before_s + (clock.monotonic_ns() - self._began_ns) / 1e9 >= self._record.settings.budget_s

    def _answered(self, since_end_ns: int) -> bool:
        stage = self._view.snapshots.of_stage(self._stage)
        if stage is None or since_end_ns < 0:
            return False
        if self._due is None:
            return since_end_ns > NEWS_NS and not self._unfinished()
        if sum(stage.finished.values()) + stage.dropped_arrivals >= self._due:
            return True
        return since_end_ns > LOST_NS and not self._unfinished()

    def _unfinished(self) -> int:
        """Of the stage's arrivals, those in flight or without a slot. What a worker that is gone had is lost."""
        here, snapshots = self._view.messenger.worker_ids(), self._view.snapshots
        newest = [snapshot for worker_id in here if (snapshot := snapshots.of_worker(worker_id)) is not None]
        in_flight = sum(one.stages[self._stage].in_flight for one in newest if self._stage in one.stages)
        return in_flight + sum(one.aggregate.waiting_arrivals for one in newest)

    def _empty(self, probe: Probe) -> Iterator[Stretch]:
        """Silence until no more is in flight than the load itself has; nothing at all, where the cache is reset. Users
        have nothing in flight beyond their number.
        """
        if self._reset_prefix_cache is None and not (self._open_loop and probe.empty_first):
            return
        latency_s = 0.0 if self._reset_prefix_cache is not None else self._latency_s() or 0.0
        silent_ns = 0
        while silent_ns < self._view.config.drain_timeout_ns and not self._budget_is_spent():
            everything = self._view.snapshots.merged()
            enough = everything.in_flight + everything.waiting_arrivals <= probe.load * latency_s
            # The silence begins after what is planned already, and the news of it is late.
            if enough and (self._reset_prefix_cache is None or silent_ns > 2 * NEWS_NS):
                break
            yield self._stretch(0.0, STEP_NS, None)
            silent_ns += STEP_NS
        self._reset()

    def _reset(self) -> None:
        if self._reset_prefix_cache is None:
            return
        try:
            self._reset_prefix_cache()
        except VllmLocustError as error:
            note = f"The server's prefix cache was not reset before probe {len(self._record.probes) + 1}: {error}"
            logger.warning("%s", note)
            self._record.notes.append(note)

    def _latency_s(self) -> float | None:
        """Of a request at the highest load that held: there it is not a queue's."""
        held = [probe for probe in self._search.probes if probe.held and probe.latency_s is not None]
        return max(held, key=lambda probe: probe.load).latency_s if held else None

    # What is seen

    def look(self) -> None:
        live, now_ns = self._live, clock.monotonic_ns()
        if live is None or self._course is None or now_ns - self._looked_ns < LOOK_NS:
            return
        span, stage = self._course.span(self._stage), self._view.snapshots.of_stage(self._stage)
        at_ns = self._view.common_unix_ns()
        if span is None or stage is None or at_ns < span.start_unix_ns:
            return
        self._looked_ns = now_ns
        in_window = span.end_unix_ns is None or at_ns < span.end_unix_ns
        at_s = (at_ns - span.start_unix_ns) / 1e9
        if in_window:
            live.generator.look(self._view.snapshots)
        live.look(at_s, stage, self._view.snapshots.merged(), self._view.requests_waiting(), in_window=in_window)

    def _finish(self) -> None:
        assert self._live is not None
        assert self._course is not None
        live, span = self._live, self._course.span(self._stage)
        assert span is not None
        assert span.end_unix_ns is not None
        now_ns = clock.monotonic_ns()
        stage = self._view.snapshots.of_stage(self._stage) or RunAggregate()
        live.judge_full_slots(stage)
        result = live.result(
            stage,
            window_s=(span.end_unix_ns - span.start_unix_ns) / 1e9,
            elapsed_s=(now_ns - self._began_ns) / 1e9,
            due=self._due,
            ended_early=live.overload is not None,
        )
        self._began_ns = now_ns
        self._full_in_a_row = self._full_in_a_row + 1 if live.slots_full else 0
        worker_gone = not self._workers <= set(self._view.messenger.worker_ids())
        fault = live.fault(stage, self._due, self._unfinished(), worker_gone=worker_gone)
        probe = RecordedProbe(run_id=self._view.run_id, stage=self._stage, result=result, left_out=fault)
        self._record.probes.append(probe)
        self._note_repeated_prompts()
        self._write()
        self._search = search_of(self._record.settings, self._record.probes)
        self._known = _aside(self._search.result)
        self._tell(probe)

    def _tell(self, probe: RecordedProbe) -> None:
        words = {True: "met", False: "missed", None: "not judged"}[probe.result.held]
        logger.info(
            "Probe %d: %s %s%s",
            len(self._record.probes),
            hold(probe.result.load, None, self._quantity).name,
            words if probe.left_out is None else f"does not count: {probe.left_out}",
            self._known_in_words(),
        )

    def _note_repeated_prompts(self) -> None:
        workload, sent = self._view.workload, self._view.snapshots.merged().sent
        note = (
            f"The workload's {workload.rows:,} prompts were sent more than once: where the server keeps a prefix "
            "cache, later probes found more in it (a larger workload, or --reset-prefix-cache, avoids that)."
        )
        if workload.repeats and sent > workload.rows and self._reset_prefix_cache is None:
            self._record.notes = [*dict.fromkeys([*self._record.notes, note])]

    def _write(self) -> None:
        path, content = self._view.run_dir.capacity_json, self._record.to_json()
        _aside(lambda: write_json(path, content))


def _aside(call: Callable[[], _Result]) -> _Result:
    """In a thread, so that load which this process sends goes on meanwhile."""
    result: _Result = gevent.get_hub().threadpool.apply(call)
    return result
