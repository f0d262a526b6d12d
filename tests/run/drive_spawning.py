"""Lets the package's dispatcher of users meet what Locust's master does to it, in a gevent-patched process of its own.

``python -m tests.run.drive_spawning`` prints a line (JSON) for each scene: the users of each worker after each step.
"""

from __future__ import annotations

import json
from typing import Any

from locust import User
from locust.runners import WorkerNode

from vllm_locust.run.course.spawning import OrderedDispatcher, SpawnOrder


class Asks(User):
    pass


def nodes(*names: str) -> list[Any]:
    return [WorkerNode(name) for name in names]


def told(dispatcher: OrderedDispatcher, users: int, rate: float) -> list[dict[str, int]]:
    """As the master's ``start`` does."""
    dispatcher.new_dispatch(users, rate)
    return [{worker: counts["Asks"] for worker, counts in step.items()} for step in dispatcher]


def dropped() -> list[list[dict[str, int]]]:
    """A worker is missing; long after, Locust drops it and its dispatcher, and starts all users with a new one."""
    order, three = SpawnOrder(), nodes("a", "b", "c")
    first = OrderedDispatcher(order, worker_nodes=three, user_classes=[Asks])
    steps = [told(first, 8, 100)]
    first.remove_worker(three[1])
    second = OrderedDispatcher(order, worker_nodes=[three[0], three[2]], user_classes=[Asks])
    steps += [told(second, 8, 4), told(second, 10, 100), told(second, 4, 100)]
    order.reset()
    third = OrderedDispatcher(order, worker_nodes=[three[0], three[2]], user_classes=[Asks])
    return [*steps, told(third, 2, 100)]


def dropped_in_a_ramp() -> list[list[dict[str, int]]]:
    """The dispatcher that is replaced tells nobody anything any more."""
    order, two = SpawnOrder(), nodes("a", "b")
    first = OrderedDispatcher(order, worker_nodes=two, user_classes=[Asks])
    first.new_dispatch(6, 100)
    first._user_count_per_dispatch_iteration = 2
    begun = next(first)
    first.remove_worker(two[1])
    second = OrderedDispatcher(order, worker_nodes=two[:1], user_classes=[Asks])
    steps = told(second, 6, 100)
    left = list(first)
    return [[{worker: counts["Asks"] for worker, counts in begun.items()}], steps, left]


def joins() -> list[list[dict[str, int]]]:
    """Locust asks for the users again where no dispatch is in progress."""
    order, node_list = SpawnOrder(), nodes("a", "b", "c")
    dispatcher = OrderedDispatcher(order, worker_nodes=node_list[:1], user_classes=[Asks])
    steps = [told(dispatcher, 6, 100)]
    for node in node_list[1:]:
        dispatcher.add_worker(node)
        steps.append([] if dispatcher.dispatch_in_progress else told(dispatcher, 6, 100))
    return steps


if __name__ == "__main__":
    for scene in (dropped, dropped_in_a_ramp, joins):
        print(json.dumps(scene()), flush=True)
