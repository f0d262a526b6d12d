"""The middle of an open-loop run: it begins and ends at times that were planned before the first request."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import gevent

from vllm_locust import clock
from vllm_locust.arrival import ArrivalProcess, DueCount, Piece
from vllm_locust.errors import UsageError
from vllm_locust.load_profile import Quantity
from vllm_locust.run.course.course import Course, RunView, Search, window_in_words
from vllm_locust.run.course.planned_load import PlannedLoad
from vllm_locust.run.course.shares import Shares
from vllm_locust.run.course.stage_spans import StageSpan, Stretch, append_stretch
from vllm_locust.run.messenger import BEGIN, DRAIN, EXTEND, Absences
from vllm_locust.run.results.recovery import SCHEDULE, SHARES
from vllm_locust.run.workers import POLL_S

logger = logging.getLogger(__name__)

LEAD_NS = 1_000_000_000
"""Time for a message to reach every worker before it must be heeded."""
EXTEND_LEAD_NS = 2_000_000_000
"""What comes next is asked for so long before the plan's end."""
SLOTS_TIMEOUT_NS = 30_000_000_000
GONE_S = 1.0
"""On top of the seconds after which Locust itself calls a worker missing."""
LAST_ARRIVALS_NS = 100_000_000
"""After the planned end: what is due just before it must be due on a worker's clock too."""


class OpenCourse(Course):
    """A ``search`` is asked shortly before the planned end what comes next; None ends the run there."""

    def __init__(self, view: RunView, load: PlannedLoad, search: Search | None = None) -> None:
        super().__init__(view, search)
        self._schedule = load.schedule
        self._due = DueCount(load.schedule)
        self._warmup_ns = load.warmup_ns
        self._stages = load.stages
        self._first_rps = load.first_rps
        self._may_grow = search is not None
        self._shares = Shares(())
        self._fingerprints: dict[str, str] = {}
        """Of the schedule as each worker was told it."""
        self._missed: set[str] = set()
        self._slots: int | None = None
        self._told_to_stop: set[str] = set()
        self._t0_unix_ns: int | None = None
        self._first_stage_ns = 0
        self._absences = Absences(view.messenger)

    @property
    def ends_by_itself(self) -> bool:
        return self._schedule.length_ns is not None

    @property
    def in_words(self) -> str:
        config, process = self._view.config, self._schedule.process
        if process is ArrivalProcess.TRACE:
            load = f"a trace of {self._stages[0].mean_value:.3g} requests/s"
        else:
            stages = ", ".join(stage.name for stage in self._stages[:10])
            load = f"{process} arrivals at {stages}{', …' if len(self._stages) > 10 else ''}"
        length_ns = self._schedule.length_ns
        window = window_in_words(None if length_ns is None else length_ns - self._warmup_ns)
        slots = self._view.messenger.users_wanted
        warmup = f"warm-up of {config.warmup_requests} requests in {self._warmup_ns / 1e9:.3g} s"
        if self._search is not None:
            return f"{self._search.aim}, {process} arrivals into {slots} slots; {warmup}"
        return f"{load} into {slots} slots; {warmup}, then {window}"

    # Who sends what

    def parts(self, worker_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        self._shares = Shares(worker_ids)
        self._slots = self._view.messenger.users_wanted
        if self._slots < len(worker_ids):
            raise UsageError(
                f"-u {self._slots}: each of the {len(worker_ids)} workers needs a slot at least; raise -u, or start "
                "fewer workers"
            )
        order = self._view.spawn_order
        order.rate = math.inf
        # A single process has no other to share with, and Locust knows it by another name.
        order.slots = self._shares.slots if self._view.messenger.has_workers else None
        return {worker_id: self._part(worker_id, share, 0) for share, worker_id in enumerate(worker_ids)}

    def _part(self, worker_id: str, share: int, first_arrival: int) -> dict[str, Any]:
        self._fingerprints[worker_id] = self._schedule.fingerprint()
        return {
            "share": share,
            "shares": len(self._shares),
            "first_arrival": first_arrival,
            "prompt_seed": self._view.config.seed,
            "schedule": self._schedule.to_json(),
        }

    def check_ready(self) -> None:
        problems = [problem for worker in self._shares.owners if (problem := self._schedule_problem(worker))]
        if problems:
            raise UsageError(*problems)

    def _schedule_problem(self, worker_id: str) -> str | None:
        if self._view.workers.schedule_fingerprint(worker_id) == self._fingerprints[worker_id]:
            return None
        return (
            f"worker {worker_id} computes another schedule than the master, likely with another release of numpy; "
            "install the same versions on all hosts"
        )

    def join(self, worker_id: str) -> None:
        logger.info("Worker %s stands by for a share of the schedule", worker_id)
        self._shares.stand_by(worker_id)

    def on_ready(self, worker_id: str) -> None:
        if self._t0_unix_ns is None or worker_id not in self._shares.owners:
            return
        if problem := self._schedule_problem(worker_id):
            logger.error("%s", problem)
            self._view.workers.tell([worker_id], DRAIN)
            self._shares.leave(worker_id)
            return
        self._view.workers.tell([worker_id], BEGIN, **self._plan())
        self._announce_stage()

    def on_refused(self, worker_id: str) -> None:
        self._shares.leave(worker_id)

    def _give(self, share: int, worker_id: str) -> None:
        first_arrival = self._first_arrival(share)
        before = self._shares.take(share, worker_id, first_arrival)
        if before is not None:
            # Should it only be silent: it finds this before it can send much that another sends too.
            self._view.workers.tell([before], DRAIN)
        self._view.publish({SHARES: json.dumps(self._shares.to_json())})
        logger.warning(
            "Worker %s takes share %d of %d from arrival %d on", worker_id, share, len(self._shares), first_arrival
        )
        self._view.add_worker(worker_id, self._part(worker_id, share, first_arrival))
        # Its slots: Locust asks the order again for whom they are.
        self._view.messenger.spawn_users(self._view.messenger.users_wanted, 1.0)

    def _first_arrival(self, share: int) -> int:
        """The first of the share that a new owner can be ready for."""
        if self._t0_unix_ns is None:
            return share
        ready_ns = self._view.common_unix_ns() + LEAD_NS + 2 * self._view.workers.preparation_ns
        due_before = len(self._schedule.offsets_ns(max(0, ready_ns - self._t0_unix_ns)))
        return due_before + (share - due_before) % len(self._shares)

    def _look_after_shares(self) -> None:
        workers, messenger = self._view.workers, self._view.messenger
        for worker_id in [*workers.left, *filter(messenger.has_left, self._shares.standby)]:
            self._shares.leave(worker_id)
        gone = self._absences.beyond(self._shares.owners, GONE_S)
        for worker_id in set(gone) - self._missed:
            logger.warning(
                "Worker %s is gone: what its share was to send is lost until it is back or replaced", worker_id
            )
        self._missed.update(gone)
        share, standby = self._shares.free(gone), self._shares.standby
        if share is not None and standby:
            self._give(share, standby[0])
        for worker_id in self._shares.replaced.intersection(messenger.worker_ids()) - self._told_to_stop:
            logger.warning("Worker %s is back, but another has its share: it is told to stop", worker_id)
            workers.tell([worker_id], DRAIN)
            self._told_to_stop.add(worker_id)

    # When

    def run(self) -> str | None:
        self._await_slots()
        self._begin()
        while True:
            now_ns = self._view.common_unix_ns()
            if self._planned_end_ns is not None and now_ns > self._planned_end_ns - EXTEND_LEAD_NS:
                self._extend()
            if self._planned_end_ns is not None and now_ns > self._planned_end_ns + LAST_ARRIVALS_NS:
                return None
            if self._all_users_ended():
                return self._why_users_ended() if self.ends_by_itself else None
            self._look_after_shares()
            self.phase = "warmup" if now_ns < self._first_stage_ns else "window"
            self._look()
            self.show()
            gevent.sleep(POLL_S)

    def _await_slots(self) -> None:
        """Until every slot is there; those of a worker that is lost meanwhile are not waited for."""
        view, deadline_ns = self._view, clock.monotonic_ns() + SLOTS_TIMEOUT_NS
        while not view.spawned.is_set() or view.messenger.users < view.messenger.users_wanted:
            if set(self._shares.owners) - set(view.messenger.worker_ids()):
                return
            if clock.monotonic_ns() > deadline_ns:
                logger.warning(
                    "Only %d of %d slots are there: the load begins without the others",
                    view.messenger.users,
                    view.messenger.users_wanted,
                )
                return
            gevent.sleep(POLL_S)

    def _begin(self) -> None:
        self._t0_unix_ns = self._view.common_unix_ns() + LEAD_NS
        self._first_stage_ns = self._planned_end_ns = self._t0_unix_ns + self._warmup_ns
        for number, load in enumerate(self._stages):
            self._append(Stretch(load, number))
        self._view.publish({SHARES: json.dumps(self._shares.to_json())})
        self._publish_plan()
        self._begin_window(self._first_stage_ns)
        self._tell_owners(BEGIN)
        self._announce_stage()

    def _append(self, stretch: Stretch) -> None:
        """To the stages, at the planned end."""
        assert self._planned_end_ns is not None
        self._spans = append_stretch(self._spans, stretch, Quantity.RATE, self._planned_end_ns)
        length_ns = stretch.load.length_ns
        self._planned_end_ns = None if length_ns is None else self._planned_end_ns + length_ns

    def _extend(self) -> None:
        stretch = self._next_stretch() if self._may_grow else None
        if stretch is None:
            self._may_grow = False
            return
        if stretch.stage is None:
            self._be_silent_until_now()
        for piece in stretch.load.pieces():
            self._schedule.extend(piece)
        self._append(stretch)
        self._tell_owners(EXTEND)
        if stretch.stage is not None:
            self._announce_stage()
        self._publish_plan()

    def _be_silent_until_now(self) -> None:
        """The search may have taken more time than there was: what comes next would begin in the past, with a burst."""
        assert self._planned_end_ns is not None
        late_ns = self._view.common_unix_ns() + LEAD_NS - self._planned_end_ns
        if late_ns > 0:
            self._schedule.extend(Piece(late_ns, 0.0, 0.0))
            self._planned_end_ns += late_ns

    def _tell_owners(self, kind: str) -> None:
        """All of the plan, so that a worker that has missed a message has the rest of it with the next one."""
        self._view.workers.tell(self._shares.owners, kind, **self._plan())

    def _plan(self) -> dict[str, Any]:
        return {"t0_unix_ns": self._t0_unix_ns, "pieces": [asdict(piece) for piece in self._schedule.pieces]}

    def _publish_plan(self) -> None:
        self._publish_stages()
        self._view.publish({SCHEDULE: json.dumps(self._schedule_json())})

    # What is told

    def arrivals_due(self, span: StageSpan) -> int | None:
        if self._t0_unix_ns is None or span.end_unix_ns is None:
            return None
        before = self._due.before(span.start_unix_ns - self._t0_unix_ns)
        return self._due.before(span.end_unix_ns - self._t0_unix_ns) - before

    def _show_load(self) -> None:
        now_ns = self._view.common_unix_ns()
        span = next((span for span in reversed(self._spans) if span.start_unix_ns <= now_ns), None)
        if span is None:
            self._show(self._left_s(), offered_rps=self._first_rps)
        else:
            self._show(self._left_s(), offered_rps=span.value_at(now_ns), stage=span.load.name)

    def facts(self) -> dict[str, Any]:
        begun = self._t0_unix_ns is not None
        return super().facts() | {
            "schedule": self._schedule_json() if begun else None,
            "shares": self._shares.to_json(),
            "slots": self._slots,
            "users": None,
        }

    def _schedule_json(self) -> dict[str, Any]:
        return self._schedule.to_json() | {
            "t0_unix_ns": self._t0_unix_ns,
            "warmup_ns": self._warmup_ns,
            "shares": len(self._shares),
            "fingerprint": self._schedule.fingerprint(),
        }
