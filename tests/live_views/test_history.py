from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_locust.live.history import History


@given(st.integers(0, 500), st.integers(2, 40))
def test_it_is_bounded_and_even_and_begins_with_the_first_point(count: int, limit: int) -> None:
    history = History(limit)
    for number in range(1, count + 1):
        assert history.add({"value": number}) == {"n": number, "value": number}
    points = history.after(0, 10_000)
    numbers = [point["n"] for point in points]
    assert len(points) <= limit
    assert numbers == list(range(1, count + 1, history.step))[: len(numbers)]
    assert count - (numbers[-1] if numbers else 0) <= history.step
    assert len(points) * 2 >= min(count, limit), "no more is thrown away than must be"


def test_a_viewer_gets_what_is_new_to_it() -> None:
    history = History()
    for number in range(100):
        history.add({"t": number})
    assert [point["n"] for point in history.after(97, 1000)] == [98, 99, 100]
    assert history.after(100, 1000) == []
    few = [point["n"] for point in history.after(0, 10)]
    assert len(few) == 10
    assert few[-1] == 100
