"""Messages between master and workers over Locust's connection, or within one process where there are no workers.

Payloads are plain values that msgpack carries. Whatever a peer sent is checked by the receiver before it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import gevent
from locust.runners import MasterRunner, WorkerRunner

from vllm_locust import clock
from vllm_locust.run.message_guard import RefusedMessages, guard

logger = logging.getLogger(__name__)

PRESENT = "vllm_locust.present"
"""Of a worker, once it hears what it is told: Locust drops messages that come before, right after it has connected."""
PREPARE = "vllm_locust.prepare"
READY = "vllm_locust.ready"
BEGIN = "vllm_locust.begin"
"""``t0_unix_ns``, on the common clock: the schedule's arrivals lie at their offsets after it. ``pieces``: the plan."""
EXTEND = "vllm_locust.extend"
"""``pieces``: the whole plan, which has grown at its end."""
STAGE = "vllm_locust.stage"
"""``stage``, ``start_unix_ns`` and ``end_unix_ns`` on the common clock: what is due then is also counted apart."""
DRAIN = "vllm_locust.drain"
ABANDON = "vllm_locust.abandon"
"""The run could not begin: let go of it, there is nothing to ship."""
SNAPSHOT = "vllm_locust.snapshot"
FLUSHED = "vllm_locust.flushed"

Handler = Callable[[str, Any], None]
"""Called with the sender's id and the payload, in a greenlet of its own."""


class Messenger:
    """One per process. In a local run the same object is both ends."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._local: dict[str, Handler] = {}
        self._spawning: gevent.Greenlet | None = None
        self.refused = RefusedMessages()
        """What peers sent and nobody can use."""
        if isinstance(runner, MasterRunner):
            guard(runner, self.refused)

    @property
    def own_id(self) -> str:
        return str(self._runner.client_id)

    @property
    def users(self) -> int:
        """Users alive on all workers."""
        return int(self._runner.user_count)

    @property
    def users_wanted(self) -> int:
        """Users that the run is to have when its ramp-up is over."""
        return int(self._runner.target_user_count)

    @property
    def has_workers(self) -> bool:
        """Whether the users run in other processes."""
        return isinstance(self._runner, MasterRunner)

    @property
    def is_alone(self) -> bool:
        """Whether master and worker are this one process."""
        return not isinstance(self._runner, MasterRunner | WorkerRunner)

    def spawn_users(self, users: int, spawn_rate: float) -> gevent.Greenlet:
        """Have that many users from now on. Locust adds or ends users at the rate given, over the workers there are;
        the greenlet ends when it has told them all. Asked again meanwhile, the new order stands.
        """
        if self._spawning is not None:
            self._spawning.kill()
        self._spawning = gevent.spawn(self._runner.start, users, spawn_rate)
        return self._spawning

    def want_users(self, users: int) -> None:
        """How many the spawning that begins now is for."""
        self._runner.target_user_count = users

    @property
    def sessions_wanted(self) -> bool:
        """Whether a user class of the locustfile holds whole conversations."""
        return any(getattr(cls, "holds_sessions", False) for cls in self._runner.user_classes)

    def on(self, kind: str, handler: Handler) -> None:
        """Register the handler of a kind of message."""
        if self.is_alone:
            self._local[kind] = handler
            return

        def listener(msg: Any, **_: Any) -> None:
            _call(handler, kind, str(msg.node_id), msg.data)

        # concurrent: a handler that waits must not hold up heartbeats.
        self._runner.register_message(kind, listener, concurrent=True)

    def to_worker(self, worker_id: str, kind: str, payload: Any) -> None:
        if kind in self._local:
            gevent.spawn(_call, self._local[kind], kind, worker_id, payload)
        else:
            self._runner.send_message(kind, payload, client_id=worker_id)

    def to_master(self, kind: str, payload: Any) -> None:
        if kind in self._local:
            gevent.spawn(_call, self._local[kind], kind, self.own_id, payload)
        else:
            self._runner.send_message(kind, payload)

    def worker_ids(self) -> list[str]:
        """The workers that are connected now; this process itself in a local run."""
        if isinstance(self._runner, MasterRunner):
            clients = self._runner.clients
            return sorted(str(client.id) for client in clients.all if client.state != "missing")
        return [self.own_id]

    def has_left(self, worker_id: str) -> bool:
        """Whether it has said goodbye. One that is only silent, be it busy or dead, has not."""
        return isinstance(self._runner, MasterRunner) and worker_id not in self._runner.clients


class Absences:
    """For how long workers have been away, as far as was looked at them."""

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self._since_ns: dict[str, int] = {}

    def beyond(self, worker_ids: Sequence[str], limit_s: float) -> list[str]:
        """Those of the workers that have been away for longer. To be asked often."""
        here, now_ns = set(self._messenger.worker_ids()), clock.monotonic_ns()
        away = [worker for worker in worker_ids if worker not in here]
        self._since_ns = {worker: self._since_ns.get(worker, now_ns) for worker in away}
        return [worker for worker, since_ns in self._since_ns.items() if now_ns - since_ns > limit_s * 1e9]


def _call(handler: Handler, kind: str, sender: str, payload: Any) -> None:
    try:
        handler(sender, payload)
    except Exception:
        logger.exception("A %s message from %s could not be handled", kind, sender)
