"""Who owns which share of the schedule, and which slots go with it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_locust.run.course.shares import Shares


def test_a_share_has_one_owner_and_its_history_is_kept() -> None:
    shares = Shares(["a", "b"])
    shares.stand_by("c")
    shares.stand_by("d")
    assert shares.free([]) is None
    assert shares.free(["b"]) == 1
    shares.take(1, "c", 41)
    assert (shares.owners, shares.standby, shares.replaced) == (["a", "c"], ["d"], {"b"})
    shares.leave("a")
    assert shares.free([]) == 0
    shares.take(0, "d", 60)
    assert shares.replaced == {"b"}, "one that has left in order needs not be told to stop"
    assert shares.to_json() == [
        {"share": 0, "worker_id": "a", "first_arrival": 0},
        {"share": 1, "worker_id": "b", "first_arrival": 0},
        {"share": 1, "worker_id": "c", "first_arrival": 41},
        {"share": 0, "worker_id": "d", "first_arrival": 60},
    ]


def test_one_that_leaves_while_it_stands_by_gets_no_share() -> None:
    shares = Shares(["a"])
    shares.stand_by("b")
    shares.stand_by("b")
    assert shares.standby == ["b"], "Locust may tell twice that it has come"
    shares.leave("b")
    assert shares.standby == []


@given(users=st.integers(0, 50), workers=st.integers(1, 8))
@settings(max_examples=40)
def test_every_slot_has_one_worker_and_a_loss_moves_none(users: int, workers: int) -> None:
    names = [f"w{number}" for number in range(workers)]
    shares = Shares(names)
    before = {name: list(shares.slots(users)(name)) for name in names}
    assert sorted(slot for slots in before.values() for slot in slots) == list(range(users))
    assert max(map(len, before.values())) - min(map(len, before.values())) <= 1
    shares.leave(names[0])
    shares.stand_by("new")
    assert list(shares.slots(users)("new")) == []
    assert all(list(shares.slots(users)(name)) == before[name] for name in names[1:])
    shares.take(0, "new", 7)
    assert list(shares.slots(users)("new")) == before[names[0]]
