"""Stands between Locust's master and what peers send it. Its port has no login, and one message that is none would end
the greenlet that listens to all workers.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from typing import Any, Final

from locust.exception import RPCReceiveError
from locust.rpc.protocol import Message

MAX_ID: Final = 256
_NAMED_AT_MOST: Final = 1000
logger = logging.getLogger(__name__)


class RefusedMessages:
    """Counted by kind, and named in the log once for each peer and kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._named: set[tuple[str, str]] = set()

    def add(self, kind: str, sender: str, reason: object) -> None:
        kind = kind[:MAX_ID]
        if kind not in self.counts and len(self.counts) >= _NAMED_AT_MOST:
            kind = "others"
        self.counts[kind] += 1
        if (sender, kind) not in self._named and len(self._named) < _NAMED_AT_MOST:
            self._named.add((sender, kind))
            logger.warning("A %s message of worker %r is not usable, and so are maybe more: %s", kind, sender, reason)


def guard(runner: Any, refused: RefusedMessages) -> None:
    """Have a master runner drop what it cannot handle. Peers are known by the identity of their connection, which a
    message cannot borrow.
    """
    message_class: Any = Message
    if not isinstance(message_class.unserialize, _Checked):
        message_class.unserialize = _Checked(message_class.unserialize)
    handle = runner.handle_message

    @functools.wraps(handle)
    def handle_message(client_id: str, message: Message) -> None:
        if message.node_id != client_id:
            refused.add(message.type, client_id, f"it names {str(message.node_id)[:MAX_ID]!r} as its sender")
            return
        try:
            handle(client_id, message)
        except Exception as error:  # noqa: BLE001 - whatever a peer has brought about: the others are still heard
            refused.add(message.type, client_id, f"{type(error).__name__}: {error}")

    runner.handle_message = handle_message


class _Checked:
    """``Message.unserialize`` that raises only what Locust's listener outlives."""

    def __init__(self, unserialize: Any) -> None:
        self._unserialize = unserialize

    def __call__(self, data: bytes) -> Message:
        try:
            message: Message = self._unserialize(data)
            texts = (message.type, message.node_id)
            if not all(isinstance(text, str) and 0 < len(text) <= MAX_ID and text.isprintable() for text in texts):
                raise ValueError("its kind or its sender is no short text")
        except Exception as error:
            raise RPCReceiveError(f"{len(data)} bytes that are no message: {type(error).__name__}") from error
        return message
