"""Which row comes next: arithmetic on seeded permutations, so that any number of workers sends the same sequence.

The rows form one endless sequence, epoch after epoch, each epoch a fresh permutation of all rows. Worker ``share`` of
``shares`` takes every ``shares``-th position. The workers together therefore send every row once per epoch, whatever
their number, and also where it does not divide the number of rows or exceeds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt


@lru_cache(maxsize=2)
def epoch_order(rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The permutation of ``rows`` rows in one epoch. Two are kept, for those who ask now on this and now on that side
    of an epoch's end.
    """
    order = np.random.default_rng(np.random.SeedSequence([seed, epoch])).permutation(rows)
    order.flags.writeable = False
    return order


def positions(rows: int, *, seed: int, share: int, shares: int) -> Iterator[tuple[int, int]]:
    """Endless ``(epoch, row)`` pairs of one share."""
    check_share(share, shares)
    position, current, order = share, -1, np.empty(0, np.int64)
    while True:
        epoch, index = divmod(position, rows)
        if epoch != current:
            current, order = epoch, epoch_order(rows, seed, epoch)
        yield epoch, int(order[index])
        position += shares


def check_share(share: int, shares: int) -> None:
    if not 0 <= share < shares:
        raise ValueError(f"share {share} of {shares}: shares are numbered from 0 to shares - 1")
