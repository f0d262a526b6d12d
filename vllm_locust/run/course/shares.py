"""Who owns which share of an open loop's schedule. The number of shares is fixed for the run; a share has one owner.

Arrivals of a share whose owner is lost are lost until another worker takes it, from a stated arrival on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Shares:
    """One share per worker that was ready at the start. Workers that come later stand by until a share is free."""

    def __init__(self, worker_ids: Sequence[str]) -> None:
        self._owners: list[str | None] = list(worker_ids)
        self._history = [(share, worker_id, 0) for share, worker_id in enumerate(worker_ids)]
        self._standby: list[str] = []
        self._replaced: set[str] = set()

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def owners(self) -> list[str]:
        return [owner for owner in self._owners if owner is not None]

    @property
    def standby(self) -> list[str]:
        return list(self._standby)

    @property
    def replaced(self) -> set[str]:
        """Workers whose share was given to another. One that comes back must stop."""
        return self._replaced

    def share_of(self, worker_id: str) -> int | None:
        return self._owners.index(worker_id) if worker_id in self._owners else None

    def stand_by(self, worker_id: str) -> None:
        if worker_id not in self._standby:
            self._standby.append(worker_id)

    def leave(self, worker_id: str) -> None:
        """The worker will never send again: its share is free."""
        share = self.share_of(worker_id)
        if share is not None:
            self._owners[share] = None
        if worker_id in self._standby:
            self._standby.remove(worker_id)

    def free(self, gone: Sequence[str]) -> int | None:
        """The first share that has no owner, or one that is gone."""
        return next((share for share, owner in enumerate(self._owners) if owner is None or owner in gone), None)

    def take(self, share: int, worker_id: str, first_arrival: int) -> str | None:
        """Returns the owner that the share had until now, if it had one."""
        before = self._owners[share]
        if before is not None:
            self._replaced.add(before)
        if worker_id in self._standby:
            self._standby.remove(worker_id)
        self._owners[share] = worker_id
        self._history.append((share, worker_id, first_arrival))
        return before

    def slots(self, users: int) -> Callable[[str], range]:
        """Which of so many users each worker runs: every owner its part, and nobody else any."""

        def slots_of(worker_id: str) -> range:
            share = self.share_of(worker_id)
            return range(0) if share is None else range(share, users, len(self))

        return slots_of

    def to_json(self) -> list[dict[str, Any]]:
        """Every owner that a share has had, in the order in which they took it."""
        return [
            {"share": share, "worker_id": worker_id, "first_arrival": first}
            for share, worker_id, first in self._history
        ]
