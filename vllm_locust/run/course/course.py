"""The middle of a run: when its warm-up, window and stages begin and end, and which part of the load is whose."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gevent
from gevent.event import Event

from vllm_locust import clock
from vllm_locust.aggregate import Snapshots
from vllm_locust.config import RunConfig
from vllm_locust.run.course.spawning import SpawnOrder
from vllm_locust.run.course.stage_spans import StageSpan, Stretch, cut_stages
from vllm_locust.run.messenger import STAGE, Messenger
from vllm_locust.run.progress import Progress
from vllm_locust.run.results.recovery import STAGES, WINDOW_END, WINDOW_START
from vllm_locust.run.workers import POLL_S, RunWorkers
from vllm_locust.store.rundir import RunDirectory
from vllm_locust.workload.workload import Workload

_NEVER_NS = 1 << 62
USED_UP = "every user has ended: the workload is used up"
_LEAVING_NS = 5_000_000_000
"""Users whose worker leaves end some time before it says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """What a course sees of its run, and what it moves it with."""

    config: RunConfig
    workload: Workload
    messenger: Messenger
    workers: RunWorkers
    snapshots: Snapshots
    progress: Progress
    spawn_order: SpawnOrder
    spawned: Event
    """Set when Locust has spawned all users."""
    add_worker: Callable[[str, dict[str, Any]], None]
    """Prepare a worker that has come late for its part."""
    common_unix_ns: Callable[[], int]
    """Now on the common clock; it runs on at the monotonic clock's pace."""
    publish: Callable[[dict[str, str]], None]
    """Control fields, for a merge without the master."""
    requests_waiting: Callable[[], float | None]
    """At all servers together by their own metrics, a second ago at most or so; None where they do not tell."""
    run_id: str
    run_dir: RunDirectory


class Search(Protocol):
    """Decides on the load while it runs. It is asked for what comes next shortly before the planned end in an open
    loop, at that end in a closed one; None ends the run there. ``look`` is called often meanwhile.
    """

    @property
    def aim(self) -> str:
        """What is searched for, for the log."""

    @property
    def state(self) -> str:
        """Where it is, in a few words."""

    @property
    def probe(self) -> Mapping[str, Any]:
        """The same as numbers."""

    def follow(self, course: Course) -> None:
        """Called once, before anything else."""

    def next_stretch(self) -> Stretch | None: ...

    def look(self) -> None: ...


class Course(ABC):
    """One run's middle. ``run`` may be killed at any point; ``end`` follows in any case."""

    def __init__(self, view: RunView, search: Search | None = None) -> None:
        """With a ``search`` what comes next hangs on what was measured: workers tell of each stage while it runs."""
        self._view = view
        self._search = search
        self._users_seen = False
        self._idle_since_ns: int | None = None
        """When the last user was found to have ended, on the common clock."""
        self._users: int | None = None
        """Of a closed loop, when the window began."""
        self._window_start_ns: int | None = None
        self._window_end_ns: int | None = None
        self._planned_end_ns: int | None = None
        """On the common clock; None while it is not known, and where the window is open until the run is stopped."""
        self._spans: tuple[StageSpan, ...] = ()
        self.phase = "warmup"
        self.told: dict[str, Any] = {"left_s": None}
        """What progress was last told beside the phase."""
        if search is not None:
            search.follow(self)

    def span(self, stage: int) -> StageSpan | None:
        """Of a stage that was planned so far."""
        return next((span for span in reversed(self._spans) if span.stage == stage), None)

    def arrivals_due(self, span: StageSpan) -> int | None:  # noqa: ARG002 - a closed loop has no schedule
        """Planned for this span; None in a closed loop."""
        return None

    @property
    def has_begun(self) -> bool:
        """Whether there was a window."""
        return self._window_start_ns is not None

    @property
    @abstractmethod
    def ends_by_itself(self) -> bool:
        """Whether the window has a planned length."""

    @property
    @abstractmethod
    def in_words(self) -> str:
        """The load, the warm-up and the window, for the log."""

    @property
    def users_of_a_worker(self) -> int:
        """The most users that one worker may have to run."""
        return -(-self._users_at_most // max(1, len(self._view.messenger.worker_ids())))

    @property
    def _users_at_most(self) -> int:
        return self._view.messenger.users_wanted

    @abstractmethod
    def parts(self, worker_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What each of the workers at the start is told about its part of the load."""

    @abstractmethod
    def join(self, worker_id: str) -> None:
        """A worker has come while the run goes on."""

    def check_ready(self) -> None:  # noqa: B027 - most have nothing more to look at
        """All workers are ready. Raises UsageError where they differ in what they must have in common."""

    def on_ready(self, worker_id: str) -> None:  # noqa: B027 - most have nothing more to say to it
        """A worker that has joined is ready."""

    def on_refused(self, worker_id: str) -> None:  # noqa: B027 - most have kept nothing for it
        """A worker that was to join cannot."""

    @abstractmethod
    def run(self) -> str | None:
        """Warm-up and window. Why the window ended before its time, or None."""

    def end(self) -> None:
        """The window, if there is one, ends now or has ended as planned."""
        if self._window_start_ns is None:
            return
        now_ns = self._view.common_unix_ns()
        if self._idle_since_ns is not None:
            now_ns = max(self._window_start_ns, self._idle_since_ns)
        if now_ns < self._window_start_ns:
            self._window_start_ns = None
            self._view.publish({WINDOW_START: ""})
            return
        self._window_end_ns = now_ns if self._planned_end_ns is None else min(now_ns, self._planned_end_ns)
        self._view.publish({WINDOW_END: str(self._window_end_ns)})

    def facts(self) -> dict[str, Any]:
        """Its part of ``run.json``."""
        start_ns, end_ns = self._window_start_ns, self._window_end_ns
        known = start_ns is not None and end_ns is not None
        return {
            "window": {"start_unix_ns": start_ns, "end_unix_ns": end_ns} if known else None,
            "stages": [] if end_ns is None else cut_stages(self._spans, end_ns),
            "schedule": None,
            "shares": None,
            "slots": None,
            "users": self._users,
        }

    def show(self) -> None:
        """A line of progress, when it is time for one."""
        if self.phase == "drain":
            self._show(None)
        else:
            self._show_load()

    def _show_load(self) -> None:
        """The same while load is sent."""
        self._show(None)

    # For the courses themselves

    def _begin_window(self, start_unix_ns: int) -> None:
        self._window_start_ns = start_unix_ns
        self._users = self._view.messenger.users_wanted
        self._view.publish({WINDOW_START: str(start_unix_ns)})

    def _publish_stages(self) -> None:
        self._view.publish({STAGES: json.dumps([span.to_json() for span in self._spans])})

    def _announce_stage(self) -> None:
        """Have the last stage's requests counted apart, where somebody waits for it."""
        if self._search is not None and self._spans:
            span = self._spans[-1]
            end_ns = _NEVER_NS if span.end_unix_ns is None else span.end_unix_ns
            times = {"start_unix_ns": span.start_unix_ns, "end_unix_ns": end_ns}
            self._view.workers.tell(self._view.messenger.worker_ids(), STAGE, stage=span.stage, **times)

    def _left_s(self) -> float | None:
        end_ns = self._planned_end_ns
        return None if end_ns is None else max(0.0, (end_ns - self._view.common_unix_ns()) / 1e9)

    def _next_stretch(self) -> Stretch | None:
        return None if self._search is None else self._search.next_stretch()

    def _look(self) -> None:
        if self._search is not None:
            self._search.look()

    def _show(self, left_s: float | None, **facts: Any) -> None:
        if self._search is not None:
            # The planned end moves on with the search.
            left_s, facts["search"], facts["probe"] = None, self._search.state, self._search.probe
        self.told = {"left_s": left_s, **facts}
        self._view.progress.show(clock.monotonic_ns(), self.phase, left_s, self._view.snapshots.merged, **facts)

    def _all_users_ended(self) -> bool:
        """The users of a finite workload end with it. A worker that has not reported yet or is away shows none too."""
        view = self._view
        if view.messenger.users:
            self._users_seen, self._idle_since_ns = True, None
            return False
        if not self._users_seen or not set(view.workers.ids) <= set(view.messenger.worker_ids()):
            return False
        now_ns = view.common_unix_ns()
        if self._idle_since_ns is None:
            self._idle_since_ns = now_ns
        has_an_end = view.workload.replays_times
        return has_an_end or view.workers.all_left is not None or now_ns - self._idle_since_ns > _LEAVING_NS

    def _why_users_ended(self) -> str:
        view = self._view
        if view.workers.all_left is not None:
            return view.workers.all_left
        return USED_UP if view.workload.replays_times else "every user has ended, by the locustfile's own code"


def window_in_words(length_ns: int | None) -> str:
    return f"a window of {'no set length, until it is stopped' if length_ns is None else f'{length_ns / 1e9:g} s'}"


class ClosedCourse(Course):
    """A closed loop: the window begins once the warm-up requests have been completed."""

    @property
    def ends_by_itself(self) -> bool:
        return self._view.config.window_ns is not None

    @property
    def in_words(self) -> str:
        config = self._view.config
        return (
            f"{self._view.messenger.users_wanted} users; warm-up of {config.warmup_requests} requests or "
            f"{config.warmup_time_ns / 1e9:g} s, then {window_in_words(config.window_ns)}"
        )

    def parts(self, worker_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        shares, seed = len(worker_ids), self._view.config.seed
        return {
            worker_id: {"share": share, "shares": shares, "prompt_seed": seed}
            for share, worker_id in enumerate(worker_ids)
        }

    def join(self, worker_id: str) -> None:
        """It draws from the whole workload in an order of its own: the shares of the others are theirs to the end. Of a
        finite workload nothing is left for it.
        """
        share, shares = 0, 1
        if self._view.workload.replays_times:
            share = self._view.workload.rows
            shares = share + 1
        seed = self._view.config.seed + len(self._view.workers.ids) + 1
        self._view.add_worker(worker_id, {"share": share, "shares": shares, "prompt_seed": seed})

    def run(self) -> str | None:
        self._warm_up()
        self._begin_window(self._view.common_unix_ns())
        self.phase = "window"
        return self._measure()

    def _measure(self) -> str | None:
        length_ns, start_ns = self._view.config.window_ns, clock.monotonic_ns()
        while length_ns is None or clock.monotonic_ns() - start_ns < length_ns:
            if self._all_users_ended():
                return self._why_users_ended() if length_ns is not None else None
            left_ns = None if length_ns is None else length_ns - (clock.monotonic_ns() - start_ns)
            self._show(None if left_ns is None else left_ns / 1e9)
            gevent.sleep(POLL_S if left_ns is None else min(POLL_S, max(0, left_ns) / 1e9))
        return None

    def _warm_up(self) -> None:
        """Until all users are there and have completed the warm-up requests, or for the warm-up time at most."""
        config, spawned = self._view.config, self._view.spawned
        started_ns = clock.monotonic_ns()
        while clock.monotonic_ns() - started_ns < config.warmup_time_ns or not spawned.is_set():
            if spawned.is_set() and (self._completed() >= config.warmup_requests or self._all_users_ended()):
                return
            self._show(None)
            gevent.sleep(POLL_S)

    def _completed(self) -> int:
        snapshots = self._view.snapshots
        known = [snapshots.of_worker(worker_id) for worker_id in snapshots.worker_ids]
        return sum(sum(snapshot.aggregate.finished.values()) for snapshot in known if snapshot is not None)
