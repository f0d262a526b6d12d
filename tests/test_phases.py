import numpy as np
import pytest

from vllm_locust.phases import PHASES, assign_phase, belonging_time, interval_index


def names(codes: np.ndarray[tuple[int], np.dtype[np.int8]]) -> list[str]:
    return [str(PHASES[code]) for code in codes.tolist()]


def test_a_request_belongs_by_its_scheduled_time_else_by_when_it_was_sent() -> None:
    belongs = belonging_time(np.array([5, 0]), np.array([True, False]), np.array([9, 7]))
    assert belongs.tolist() == [5, 7]


def test_the_window_is_half_open() -> None:
    times = np.array([9, 10, 19, 20])
    assert names(assign_phase(times, 10, 20)) == ["warmup", "window", "window", "drain"]


def test_a_window_that_never_began_or_has_no_end() -> None:
    times = np.array([9, 10, 19])
    assert names(assign_phase(times, None, None)) == ["warmup"] * 3
    assert names(assign_phase(times, 10, None)) == ["warmup", "window", "window"]


def test_an_empty_window_holds_nothing() -> None:
    assert names(assign_phase(np.array([9, 10, 11]), 10, 10)) == ["warmup", "drain", "drain"]


def test_stages_with_a_gap() -> None:
    index, inside = interval_index(np.array([0, 10, 14, 15, 20, 29, 30]), [10, 20], [15, 30])
    assert inside.tolist() == [False, True, True, False, True, True, False]
    assert index[inside].tolist() == [0, 0, 1, 1]


def test_no_stages_hold_nothing_and_overlapping_ones_are_refused() -> None:
    _, inside = interval_index(np.array([1, 2]), [], [])
    assert inside.tolist() == [False, False]
    with pytest.raises(ValueError, match="overlap"):
        interval_index(np.array([1]), [0, 5], [6, 9])
