"""``--patience``: how long a simulated user waits for the first token."""

from __future__ import annotations

import random


class Patience:
    """Draws uniformly from a range: from the arrival's own generator in an open loop, whoever sends it, and from the
    user's own in a closed one. So what one request draws hangs on the seed, and not on the others.
    """

    def __init__(self, range_ns: tuple[int, int] | None, *, seed: int, worker_id: str) -> None:
        self._range_ns = range_ns
        self._seed = seed
        self._worker_id = worker_id
        self._of_user: dict[int, random.Random] = {}

    def draw_ns(self, user_id: int, arrival: int | None = None) -> int | None:
        """None for a user that waits for ever."""
        if self._range_ns is None:
            return None
        low_ns, high_ns = self._range_ns
        if low_ns == high_ns:
            return low_ns
        if arrival is not None:
            return random.Random(f"{self._seed}:patience:{arrival}").randint(low_ns, high_ns)
        own = self._of_user.get(user_id)
        if own is None:
            own = self._of_user[user_id] = random.Random(f"{self._seed}:patience:{self._worker_id}:{user_id}")
        return own.randint(low_ns, high_ns)
