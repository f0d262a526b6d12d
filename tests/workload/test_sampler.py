from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_locust.workload.sampler import positions


def taken(rows: int, count: int, *, seed: int = 0, share: int = 0, shares: int = 1) -> list[tuple[int, int]]:
    return list(islice(positions(rows, seed=seed, share=share, shares=shares), count))


def test_one_share_takes_every_row_once_per_epoch_in_a_new_order() -> None:
    sequence = taken(50, 150)
    epochs = [[row for epoch, row in sequence if epoch == e] for e in range(3)]
    assert [sorted(rows) for rows in epochs] == [list(range(50))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert [epoch for epoch, _ in sequence] == [0] * 50 + [1] * 50 + [2] * 50


@pytest.mark.parametrize("shares", range(1, 9))
@pytest.mark.parametrize("rows", [1, 3, 8, 21])
def test_shares_dealt_out_in_turn_give_the_sequence_of_one(rows: int, shares: int) -> None:
    whole = taken(rows, 4 * rows * shares, seed=7)
    for share in range(shares):
        assert taken(rows, 4 * rows, seed=7, share=share, shares=shares) == whole[share::shares]


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 40), shares=st.integers(1, 8), seed=st.integers(0, 2**40))
def test_no_row_comes_twice_in_an_epoch(rows: int, shares: int, seed: int) -> None:
    count = 3 * rows
    parts = [taken(rows, count, seed=seed, share=share, shares=shares) for share in range(shares)]
    union = [pair for part in parts for pair in part]
    assert len(union) == len(set(union))
    assert sorted(row for epoch, row in union if epoch == 0) == list(range(rows))


def test_the_seed_decides_and_zero_is_one() -> None:
    assert taken(100, 100, seed=0) == taken(100, 100, seed=0)
    assert taken(100, 100, seed=0) != taken(100, 100, seed=1)


@pytest.mark.parametrize("share", [-1, 2])
def test_a_share_outside_is_refused(share: int) -> None:
    with pytest.raises(ValueError, match="numbered from 0"):
        taken(3, 1, share=share, shares=2)
