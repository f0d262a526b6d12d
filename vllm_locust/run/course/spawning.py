"""How Locust spawns the users of a run: its own ramp-up in a closed loop; slots by share, at once, in an open loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import gevent
from locust.dispatch import UsersDispatcher

_STEPS_PER_S = 10


@dataclass(slots=True)
class SpawnOrder:
    """What the run wants of Locust's spawning, whatever the start form or a key press asks for. None: what they ask
    for.
    """

    users: int | None = None
    rate: float | None = None
    """Users per second, evenly; infinite for all at once."""
    slots: Callable[[int], Callable[[str], range]] | None = None
    """Given the number of users, which of them each worker runs: ``Shares.slots``."""
    dispatcher: OrderedDispatcher | None = None
    """The one that carries out the order."""

    def reset(self) -> None:
        self.users = self.rate = self.slots = self.dispatcher = None


class OrderedDispatcher(UsersDispatcher):
    """Locust's dispatcher of users to workers, under an order."""

    def __init__(self, order: SpawnOrder, **settings: Any) -> None:
        super().__init__(**settings)
        self._order = order

    def new_dispatch(
        self, target_user_count: int, spawn_rate: float, user_classes: list[type[Any]] | None = None
    ) -> None:
        self._take_over()
        order = self._order
        users = target_user_count if order.users is None else order.users
        rate = spawn_rate if order.rate is None else min(order.rate, max(1, users, self.get_current_user_count()))
        super().new_dispatch(users, rate, user_classes)
        if order.rate is not None and math.isfinite(order.rate):
            self._dispatcher_generator = self._evenly(rate)
        if order.slots is not None:
            self._dispatcher_generator = self._by_share(order.slots(users), users)

    def __next__(self) -> dict[str, dict[str, int]]:
        try:
            return super().__next__()
        except StopIteration:
            # Locust leaves this set after a rebalance, and a worker that comes later would get no users.
            self._dispatch_in_progress = False
            raise

    def _take_over(self) -> None:
        """Go on where the dispatcher before has got to. Locust drops it with a worker that has been missing for long:
        the next one would know of no users, and stop those of all workers to ramp up anew.
        """
        before, self._order.dispatcher = self._order.dispatcher, self
        if before is None or before is self:
            return
        before._dispatcher_generator = _nothing()
        self._current_user_count = before._current_user_count
        self._prepare_rebalance()

    def _evenly(self, rate: float) -> Generator[dict[str, dict[str, int]]]:
        """Not in bursts once a second: the steps lie evenly around the straight line that was asked for."""
        self._dispatch_in_progress = True
        self._user_count_per_dispatch_iteration = max(1, round(rate / _STEPS_PER_S))
        self._wait_between_dispatch = self._user_count_per_dispatch_iteration / rate
        gevent.sleep(self._wait_between_dispatch / 2)
        yield from self._dispatcher()

    def _by_share(self, slots_of: Callable[[str], range], users: int) -> Generator[dict[str, dict[str, int]]]:
        """The users of each worker. Nothing moves from one to another when a worker comes or goes."""
        self._try_dispatch_fixed = True
        names = list(islice(self._user_gen(), users))
        dealt = {}
        for node in self._worker_nodes:
            mine = [names[slot] for slot in slots_of(node.id)]
            dealt[node.id] = {cls.__name__: mine.count(cls.__name__) for cls in self._original_user_classes}
        yield dealt


def _nothing() -> Generator[dict[str, dict[str, int]]]:
    yield from ()
