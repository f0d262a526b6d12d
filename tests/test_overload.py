import numpy as np
import pytest

from vllm_locust.overload import Overload


def watch(arrived: list[int], completed: list[int], waiting: list[int] | None = None) -> tuple[int, str] | None:
    """The second at which it fires and why, from counts per second."""
    detector, come, gone = Overload(), 100, 0
    for second in range(len(arrived)):
        why = detector.feed(second, come - gone, gone, come, None if waiting is None else waiting[second])
        if why is not None:
            return second, why
        come, gone = come + arrived[second], gone + completed[second]
    return None


def test_it_says_what_it_saw() -> None:
    assert watch([20] * 60, [15] * 60) == (
        15,
        "queue grows: in flight rose from 100 to 175 in 15 s although the rate is constant",
    )
    fired = watch([20] * 60, [15] * 60, [5] * 60)
    assert fired is not None
    assert fired[1].endswith(", and 5 wait on the server")


def test_a_steady_server_is_not_overloaded() -> None:
    assert watch([20, 18, 22] * 40, [19, 21, 20] * 40) is None


@pytest.mark.parametrize("at_first", [0, 200])
def test_a_server_that_fills_up_is_not_overloaded(at_first: int) -> None:
    """20 requests come each second and take 60 to 120 s, so that for a minute nothing ends."""
    detector = Overload()
    ends = np.sort(np.repeat(np.arange(300), 20) + 60 + 60 * np.random.default_rng(1).random(6000))
    for second in range(at_first // 20, 300):
        gone = int(np.searchsorted(ends, second))
        assert detector.feed(second, 20 * second - gone, gone, 20 * second) is None


def test_it_fires_as_soon_as_what_was_there_is_finished() -> None:
    # A flood: 60 come and 20 are finished each second; at first 100 are in flight.
    fired = watch([60] * 60, [20] * 60)
    assert fired is not None
    assert fired[0] == 15
