"""The middle of a closed-loop run whose number of users changes by plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import gevent

from vllm_locust import clock
from vllm_locust.load_profile import LoadProfile, Quantity
from vllm_locust.run.course.course import ClosedCourse, RunView, Search
from vllm_locust.run.course.stage_spans import Stretch, append_stretch
from vllm_locust.run.workers import POLL_S

TELL_AGAIN_NS = 10_000_000_000
"""Users that have gone with their worker come back on the others, when Locust is asked for all of them again."""


class UserStagesCourse(ClosedCourse):
    """A stage is measured from when its users are there; those that are too many for it end their requests first.

    A ``search`` says what comes after the warm-up, in place of the profile's stages.
    """

    def __init__(
        self,
        view: RunView,
        profile: LoadProfile,
        *,
        spawn_rate: float | None,
        search: Search | None = None,
    ) -> None:
        """``spawn_rate``: from one stage to the next; None for all at once."""
        super().__init__(view, search)
        self._profile = profile
        self._spawn_rate = math.inf if spawn_rate is None else spawn_rate
        self._spawning: gevent.Greenlet | None = None

    @property
    def ends_by_itself(self) -> bool:
        return self._search is not None or self._profile.length_ns is not None

    @property
    def in_words(self) -> str:
        stages = ", ".join(stage.name for stage in self._profile.stages[:10])
        more = ", …" if len(self._profile.stages) > 10 else ""
        config = self._view.config
        warmup = f"warm-up of {config.warmup_requests} requests or {config.warmup_time_ns / 1e9:g} s"
        if self._search is not None:
            return f"{self._search.aim}; {warmup}"
        return f"{stages}{more}; {warmup}, then the stages"

    @property
    def _users_at_most(self) -> int:
        capacity = self._view.config.capacity
        if capacity is not None:
            return round(capacity.settings.max_load or capacity.settings.start_load)
        return round(max(max(stage.start_value, stage.end_value) for stage in self._profile.stages))

    def parts(self, worker_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        users = round(self._profile.stages[0].start_value)
        order = self._view.spawn_order
        order.users, order.rate = users, self._spawn_rate
        self._view.messenger.want_users(users)
        return super().parts(worker_ids)

    def run(self) -> str | None:
        self._warm_up()
        for stretch in self._stretches():
            if not self._measure_stretch(stretch):
                return self._why_users_ended()
        return None

    def _stretches(self) -> Iterator[Stretch]:
        if self._search is None:
            for number, load in enumerate(self._profile.stages):
                yield Stretch(load, number)
        while (stretch := self._next_stretch()) is not None:
            yield stretch

    def _measure_stretch(self, stretch: Stretch) -> bool:
        """Whether its users have lasted to its end."""
        self._spawn(round(stretch.load.start_value), self._spawn_rate)
        if not self._settle():
            return False
        start_ns = self._view.common_unix_ns()
        if not self.has_begun:
            self._begin_window(start_ns)
            self.phase = "window"
        self._spans = append_stretch(self._spans, stretch, Quantity.USERS, start_ns)
        self._publish_stages()
        self._announce_stage()
        at_ns = start_ns
        for piece in stretch.load.pieces():
            users, length_ns = round(piece.end_rps), piece.length_ns
            if length_ns is not None:
                change = abs(piece.end_rps - piece.start_rps)
                self._spawn(users, change / (length_ns / 1e9) if change else self._spawn_rate)
            at_ns += length_ns or 0
            self._planned_end_ns = None if length_ns is None else at_ns
            if not self._wait():
                return False
        return True

    def _spawn(self, users: int, rate: float) -> None:
        order = self._view.spawn_order
        if order.users != users:
            # After a stage without users there are none to have ended.
            self._users_seen = self._users_seen and order.users != 0
            order.users, order.rate = users, rate
            self._tell_locust()

    def _tell_locust(self) -> None:
        users = self._view.spawn_order.users
        assert users is not None
        self._spawning = self._view.messenger.spawn_users(users, 1.0)

    def _settle(self) -> bool:
        """Until there are as many users as are wanted; False where they have all ended."""
        told_ns = clock.monotonic_ns()
        while self._is_spawning() or self._view.messenger.users != self._view.spawn_order.users:
            if self._all_users_ended():
                return False
            if not self._is_spawning() and clock.monotonic_ns() - told_ns > TELL_AGAIN_NS:
                told_ns = clock.monotonic_ns()
                self._tell_locust()
            self._look()
            self.show()
            gevent.sleep(POLL_S)
        return True

    def _is_spawning(self) -> bool:
        return self._spawning is not None and not self._spawning.ready()

    def _wait(self) -> bool:
        """Until the planned end, or for ever; False where all users have ended before."""
        while (left_s := self._left_s()) is None or left_s > 0:
            if self._all_users_ended():
                return False
            self._look()
            self.show()
            gevent.sleep(POLL_S if left_s is None else min(POLL_S, left_s))
        return True

    def _all_users_ended(self) -> bool:
        return bool(self._view.spawn_order.users) and super()._all_users_ended()

    def _show_load(self) -> None:
        self._show(self._left_s(), stage=self._spans[-1].load.name if self._spans else None)
