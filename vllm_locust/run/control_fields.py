"""The run's control fields on their way from the master to Redis.

Whoever sets one does not wait: with a Redis that is away the load would begin late and end late. The fields are sent
as soon as they can be, in a greenlet of their own, and all of them again to a Redis that has lost them.
"""

from __future__ import annotations

import logging
from typing import Final

import gevent
from gevent.event import Event

from vllm_locust.errors import StoreError
from vllm_locust.run.results.recovery import RUN
from vllm_locust.store.redis_store import RunStore

logger = logging.getLogger(__name__)

_LOOK_S: Final = 5.0
"""So often it is looked whether Redis still has them."""
_RETRY_S: Final = 0.5


class ControlFields:
    def __init__(self, store: RunStore, run: str) -> None:
        """Publish ``run``, the first field, which says that there is such a run. Raises ``StoreError``."""
        self._store = store
        self._fields = {RUN: run}
        self._unsent: dict[str, str] = {}
        self._news = Event()
        self._told: str | None = None
        store.publish_control(self._fields)
        self._sender = gevent.spawn(self._send_always)

    def set(self, fields: dict[str, str]) -> None:
        self._fields |= fields
        self._unsent |= fields
        self._news.set()

    def close(self) -> None:
        self._sender.kill()

    def _send_always(self) -> None:
        while True:
            looks = not self._news.wait(_RETRY_S if self._unsent else _LOOK_S)
            self._news.clear()
            try:
                if looks and not self._store.has_control(RUN):
                    self._unsent = dict(self._fields)
                self._send()
                self._told = None
            except StoreError as error:
                if str(error) != self._told:
                    logger.warning("%s", error)
                self._told = str(error)
                gevent.sleep(_RETRY_S)

    def _send(self) -> None:
        sent = dict(self._unsent)
        self._store.publish_control(sent)
        # What was set anew meanwhile goes with the next.
        self._unsent = {name: value for name, value in self._unsent.items() if sent.get(name) != value}
