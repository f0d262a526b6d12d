"""The schedule against an oracle in exact arithmetic, and against the distributions that it claims."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate, islice

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_locust.arrival import Arrival, ArrivalProcess, DueCount, Piece, Schedule
from vllm_locust.load_audit import audit

CONSTANT, POISSON, GAMMA, TRACE = ArrivalProcess
RANDOM = (POISSON, GAMMA)
S = 1_000_000_000

PIECES = st.builds(
    lambda length_ms, start, end: Piece(length_ms * 1_000_000, float(start), float(end)),
    st.integers(0, 20_000),
    st.integers(0, 80),
    st.integers(0, 80),
)
PROCESSES = st.sampled_from((CONSTANT, POISSON, GAMMA))


def schedule(process: ArrivalProcess, *pieces: Piece, seed: int = 1, burstiness: float = 0.5) -> Schedule:
    return Schedule(process, seed=seed, burstiness=burstiness, pieces=pieces)


def hold(rps: float, length_ns: int | None = None) -> Piece:
    return Piece(length_ns, rps, rps)


def planned_arrivals(pieces: Sequence[Piece], at_ns: Fraction) -> Fraction:
    """The integral of the rate up to a time, in exact arithmetic."""
    total, start_ns = Fraction(0), 0
    for piece in pieces:
        assert piece.length_ns is not None
        inside = min(max(at_ns - start_ns, Fraction(0)), Fraction(piece.length_ns))
        if inside:
            start, end = Fraction(str(piece.start_rps)), Fraction(str(piece.end_rps))
            reached = start + (end - start) * inside / piece.length_ns
            total += (start + reached) / 2 * inside / S
        start_ns += piece.length_ns
    return total


@pytest.mark.parametrize("rps", [10, 3, 1024, 0.1, 500, 7.123456, 0.001, 123456.7890123, 100 / 3, 5000])
def test_a_constant_rate_is_exact(rps: float) -> None:
    gap = Fraction(S) / Fraction(str(rps))
    offsets = schedule(CONSTANT, hold(rps)).offsets_ns(int(3000 * gap))
    assert offsets.tolist() == [round(k * gap) for k in range(len(offsets))]
    assert len(offsets) >= 3000


@pytest.mark.parametrize("rps", [300, 0.7, 1024, 100 / 3])
def test_a_constant_rate_does_not_drift(rps: float) -> None:
    """The arithmetic of arrival 10^7 and those around it."""
    plan = schedule(CONSTANT, hold(rps))
    numbers = np.arange(10_000_000, 10_000_100, dtype=np.int64)
    gap = Fraction(S) / Fraction(str(rps))
    assert plan.place(numbers).tolist() == [round(k * gap) for k in numbers.tolist()]


def test_a_stage_ends_before_the_arrival_at_its_end() -> None:
    offsets = schedule(CONSTANT, hold(10, 60 * S)).offsets_ns()
    assert (len(offsets), offsets[0], offsets[-1]) == (600, 0, 59_900_000_000)


def test_a_new_rate_goes_on_without_a_seam() -> None:
    """At 4/s for 1.1 s the plan has come to 4.4 arrivals: the sixth one is due after the missing 0.6 at the new rate,
    and a silent stretch between the two only moves it.
    """
    wanted = [0, 250_000_000, 500_000_000, 750_000_000, 1_000_000_000]
    plain = schedule(CONSTANT, hold(4, 1_100_000_000), hold(2, 10 * S))
    silent = schedule(CONSTANT, hold(4, 1_100_000_000), hold(0, 3 * S), hold(2, 10 * S))
    assert plain.offsets_ns(2 * S).tolist() == [*wanted, 1_400_000_000, 1_900_000_000]
    assert silent.offsets_ns(5 * S).tolist() == [*wanted, 4_400_000_000, 4_900_000_000]


def test_a_ramp_from_nothing_and_back() -> None:
    """k arrivals are due after sqrt(2k/slope); on the way down the same from the end."""
    up = schedule(CONSTANT, Piece(100 * S, 0, 10)).offsets_ns()
    assert up.tolist() == [round(math.sqrt(2 * k / 0.1) * S) for k in range(500)]
    down = schedule(CONSTANT, Piece(100 * S, 10, 0)).offsets_ns()
    assert down.tolist() == [100 * S - round(math.sqrt(2 * (500 - k) / 0.1) * S) for k in range(500)]


@given(st.lists(PIECES, min_size=1, max_size=6), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_the_plan_reaches_k_when_arrival_k_is_due(pieces: list[Piece], seed: int) -> None:
    plan = schedule(CONSTANT, *pieces, seed=seed)
    offsets = plan.offsets_ns().tolist()
    total = planned_arrivals(pieces, Fraction(plan.length_ns or 0))
    # One fewer where the last one would be due within half a nanosecond of the end.
    assert math.ceil(total) - 1 <= len(offsets) <= math.ceil(total)
    for number, offset_ns in list(enumerate(offsets))[:: max(1, len(offsets) // 50)]:
        early = planned_arrivals(pieces, Fraction(max(0, offset_ns - 1)))
        late = planned_arrivals(pieces, Fraction(offset_ns + 1))
        assert early <= number <= late


@given(
    PROCESSES,
    st.lists(PIECES, min_size=1, max_size=5),
    st.integers(1, 8),
    st.integers(0, 2**31),
    st.lists(st.integers(0, 300), min_size=8, max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_the_shares_are_the_whole(
    process: ArrivalProcess, pieces: list[Piece], shares: int, seed: int, stops: list[int]
) -> None:
    """For any number of workers, each with a schedule of its own that is extended while it is read, at any point."""
    whole = schedule(process, *pieces, seed=seed).offsets_ns()
    assert np.all(np.diff(whole) >= 0)
    union: list[Arrival] = []
    for share in range(shares):
        plan = schedule(process, pieces[0], seed=seed)
        arrivals = plan.share(share, shares)
        mine = list(islice(arrivals, stops[share]))
        for piece in pieces[1:]:
            plan.extend(piece)
            mine += islice(arrivals, stops[share])
        mine += arrivals
        assert next(arrivals, None) is None
        assert all(number % shares == share for number, _ in mine)
        union += mine
    assert sorted(union) == list(enumerate(whole.tolist()))


@given(PROCESSES, st.lists(PIECES, min_size=1, max_size=3), st.integers(1, 8), st.integers(0, 2000))
@settings(max_examples=30, deadline=None)
def test_a_share_may_be_taken_over_from_any_arrival_on(
    process: ArrivalProcess, pieces: list[Piece], shares: int, first: int
) -> None:
    plan = schedule(process, *pieces)
    all_of_it = list(plan.share(shares - 1, shares))
    assert list(plan.share(shares - 1, shares, first)) == [a for a in all_of_it if a.number >= first]


def test_an_ended_share_goes_on_after_an_extension_and_only_then() -> None:
    plan = schedule(POISSON, hold(50, 10 * S))
    arrivals = plan.share(0, 1)
    before = list(arrivals)
    assert list(arrivals) == []
    plan.extend(hold(0, 5 * S))
    assert list(arrivals) == []
    plan.extend(hold(100, 10 * S))
    after = list(arrivals)
    assert after[0].number == len(before)
    assert after[0].offset_ns >= 15 * S
    assert plan.length_ns == 25 * S


@given(process=PROCESSES, times_s=st.lists(st.floats(0, 45), min_size=1, max_size=8), more_at=st.integers(0, 8))
@settings(max_examples=40)
def test_what_is_due_is_counted_for_any_times(process: ArrivalProcess, times_s: list[float], more_at: int) -> None:
    """Also of a plan that grows between two questions."""
    plan = schedule(process, hold(300, 10 * S), hold(0, 5 * S))
    due = DueCount(plan)
    for number, time_s in enumerate(times_s):
        if number == more_at:
            plan.extend(Piece(20 * S, 100, 200))
        at_ns = round(time_s * S)
        assert due.before(at_ns) == len(plan.offsets_ns(at_ns))


@pytest.mark.parametrize("process", RANDOM)
def test_the_union_reaches_far_over_many_blocks(process: ArrivalProcess) -> None:
    pieces = (hold(400, 20 * S), Piece(20 * S, 400, 900), hold(1.5, 10 * S))
    whole = schedule(process, *pieces).offsets_ns()
    assert len(whole) > 20_000
    for shares in (1, 3, 8):
        union = sorted(a for share in range(shares) for a in schedule(process, *pieces).share(share, shares))
        assert [offset for _, offset in union] == whole.tolist()


def gaps_at(process: ArrivalProcess, burstiness: float, seed: int) -> tuple[npt.NDArray[np.float64], int]:
    """In units of the mean gap, and the number of arrivals."""
    offsets = Schedule(process, seed=seed, burstiness=burstiness, pieces=(hold(50, 1000 * S),)).offsets_ns()
    return np.diff(offsets) / S * 50, len(offsets)


@pytest.mark.parametrize(
    ("process", "burstiness", "cv"),
    [(CONSTANT, 1.0, 0.0), (POISSON, 1.0, 1.0), (GAMMA, 1.0, 1.0), (GAMMA, 0.25, 2.0), (GAMMA, 4.0, 0.5)],
)
def test_gaps_vary_as_the_process_asks(process: ArrivalProcess, burstiness: float, cv: float) -> None:
    """Over 50,000 gaps: the mean within 4 standard errors, the coefficient of variation within 3 %."""
    gaps, n = gaps_at(process, burstiness, seed=7)
    assert Schedule(process, seed=7, burstiness=burstiness).gap_cv == pytest.approx(cv)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03, abs=1e-6)
    assert abs(n - 50_000) <= 4 * cv * math.sqrt(50_000)
    assert cv == 0 or abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.02


@pytest.mark.parametrize("process", RANDOM)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gaps_of_a_poisson_process_are_exponential(process: ArrivalProcess, seed: int) -> None:
    """Kolmogorov-Smirnov at the 0.1 % level: 1.95 / sqrt(n). Gamma with burstiness 1 is the same law."""
    gaps, _ = gaps_at(process, 1.0, seed)
    ordered, n = np.sort(gaps), len(gaps)
    expected = 1 - np.exp(-ordered)
    steps = np.arange(n + 1) / n
    distance = max(np.max(steps[1:] - expected), np.max(expected - steps[:-1]))
    assert distance < 1.95 / math.sqrt(n)


def test_counts_per_second_of_a_poisson_process_are_poisson() -> None:
    offsets = schedule(POISSON, hold(50, 1000 * S), seed=5).offsets_ns()
    counts = np.bincount(offsets // S, minlength=1000)
    assert counts.var() / counts.mean() == pytest.approx(1, abs=4 * math.sqrt(2 / 1000))


def test_a_ramp_of_a_random_process_follows_the_rate() -> None:
    """Put back on the axis of planned arrivals, the gaps of a ramp are the exponential ones of the process."""
    pieces = (Piece(500 * S, 10, 90),)
    offsets = schedule(POISSON, *pieces, seed=3).offsets_ns()
    reached = [float(planned_arrivals(pieces, Fraction(offset))) for offset in offsets.tolist()]
    gaps = np.diff(reached)
    assert gaps.mean() == pytest.approx(1, abs=4 / math.sqrt(len(gaps)))
    assert gaps.std() == pytest.approx(1, rel=0.03)


def test_seeds_and_processes_give_schedules_of_their_own() -> None:
    plans = [schedule(process, hold(50, 100 * S), seed=seed) for process in RANDOM for seed in (0, 1)]
    assert len({tuple(plan.offsets_ns().tolist()) for plan in plans}) == 4
    assert len({plan.fingerprint() for plan in plans}) == 4


def test_the_first_arrivals_of_a_seed_stay_what_they_are() -> None:
    """A run is repeated by its seed: what a new version of the package or of numpy changes here, it must announce."""
    assert schedule(POISSON, hold(10, 100 * S)).offsets_ns()[:3].tolist() == [34_042_442, 45_826_467, 248_476_375]
    assert schedule(GAMMA, hold(10, 100 * S)).offsets_ns()[:3].tolist() == [3_257_155, 120_335_591, 120_564_703]


def test_a_fingerprint_hangs_on_the_plan_and_not_on_how_it_grew() -> None:
    for first_s in (1, 30):
        grown = schedule(POISSON, hold(100, first_s * S))
        before = grown.fingerprint()
        grown.extend(hold(50, 40 * S))
        assert (
            before != grown.fingerprint() == schedule(POISSON, hold(100, first_s * S), hold(50, 40 * S)).fingerprint()
        )


def test_fingerprints_tell_plans_apart_and_survive_json() -> None:
    plan = schedule(GAMMA, hold(10, 100 * S), Piece(50 * S, 10, 40))
    copy = Schedule.from_json(json.loads(json.dumps(plan.to_json())))
    assert copy.fingerprint() == plan.fingerprint()
    assert copy.offsets_ns().tolist() == plan.offsets_ns().tolist()
    # Beyond the first 1,000 arrivals too.
    copy.extend(hold(5, S))
    assert copy.fingerprint() != plan.fingerprint()


@pytest.mark.parametrize("process", [CONSTANT, POISSON, GAMMA])
@pytest.mark.parametrize(("first_rps", "next_rps"), [(7, 50), (30, 0.3), (3, 3)])
@pytest.mark.parametrize("requests", [1, 100, 1500])
def test_a_warmup_holds_its_arrivals_exactly(
    process: ArrivalProcess, first_rps: float, next_rps: float, requests: int
) -> None:
    length_ns = schedule(process).warmup_length_ns(requests, 10**6 * S, first_rps)
    plan = schedule(process, hold(first_rps, length_ns), hold(next_rps))
    offsets = plan.offsets_ns(length_ns + 100 * S)
    assert int(np.sum(offsets < length_ns)) == requests


def test_a_warmup_may_be_cut_by_time_or_be_none() -> None:
    plan = schedule(CONSTANT)
    assert plan.warmup_length_ns(100, 60 * S, 10) == 10 * S
    assert plan.warmup_length_ns(100, 5 * S, 10) == 5 * S
    assert plan.warmup_length_ns(0, 60 * S, 10) == 0
    assert schedule(POISSON).warmup_length_ns(0, 60 * S, 10) == 0
    assert plan.warmup_length_ns(100, 60 * S, 0) == 0
    assert plan.warmup_length_ns(999_999_999, 60 * S, 10) == 60 * S


def trace(*pieces: Piece) -> Schedule:
    offsets = list(accumulate([0, 5, 5, 0, 100] * 500))
    return Schedule(TRACE, seed=0, pieces=pieces, trace_offsets_ns=offsets)


def test_a_trace_is_replayed_as_it_is() -> None:
    plan = trace()
    wanted = list(accumulate([0, 5, 5, 0, 100] * 500))
    assert plan.offsets_ns().tolist() == wanted
    assert plan.length_ns == wanted[-1] + 1
    assert plan.gap_cv is None
    assert sorted(a for share in range(3) for a in trace().share(share, 3)) == list(enumerate(wanted))


def test_the_pieces_of_a_trace_give_its_length() -> None:
    assert trace(hold(0, 110)).offsets_ns().tolist() == [0, 5, 10, 10]
    assert trace(hold(0, 60), hold(0, 51)).offsets_ns().tolist() == [0, 5, 10, 10, 110, 110]
    longer = trace(hold(0, 60 * S))
    assert (longer.length_ns, len(longer.offsets_ns())) == (60 * S, 2500)
    assert trace(hold(0, 60), hold(0)).length_ns == trace().length_ns


def test_the_warmup_of_a_trace_is_its_first_arrivals() -> None:
    plan = trace()
    assert plan.warmup_length_ns(2, 60 * S, 0) == 10
    assert plan.warmup_length_ns(5, 60 * S, 0) == plan.offsets_ns()[5]
    assert plan.warmup_length_ns(5, 50, 0) == 50
    assert plan.warmup_length_ns(0, 50, 0) == 0


def test_json_holds_no_trace() -> None:
    plan = trace(hold(0, 110))
    offsets = plan.offsets_ns()
    copy = Schedule.from_json(plan.to_json(), trace_offsets_ns=trace().offsets_ns())
    assert copy.fingerprint() == plan.fingerprint()
    assert copy.offsets_ns().tolist() == offsets.tolist()
    other = Schedule.from_json(plan.to_json(), trace_offsets_ns=[*offsets, 10**12])
    assert other.fingerprint() != plan.fingerprint()


def test_an_endless_plan() -> None:
    plan = schedule(POISSON, hold(100))
    assert plan.length_ns is None
    assert len(list(islice(plan.share(1, 2), 5000))) == 5000
    with pytest.raises(ValueError, match="say until when"):
        plan.offsets_ns()
    with pytest.raises(ValueError, match="nothing can follow"):
        plan.extend(hold(1, S))
    assert schedule(POISSON, hold(50, S), hold(0)).offsets_ns(10**6 * S)[-1] < S


def test_nothing_planned_is_nothing_due() -> None:
    for process in (CONSTANT, POISSON):
        assert list(schedule(process).share(0, 1)) == []
        assert schedule(process, hold(0, 60 * S), hold(5, 0)).offsets_ns().tolist() == []
    assert Schedule(TRACE, seed=0, trace_offsets_ns=[]).length_ns == 0


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Piece(S, -1, 5), "rate"),
        (lambda: Piece(S, math.nan, 5), "rate"),
        (lambda: Piece(None, 1, 5), "ramp needs a length"),
        (lambda: Piece(-1, 1, 1), "at least 0"),
        (lambda: Schedule(TRACE, seed=0), "trace_offsets_ns"),
        (lambda: Schedule(POISSON, seed=0, trace_offsets_ns=[1]), "trace_offsets_ns"),
        (lambda: Schedule(TRACE, seed=0, trace_offsets_ns=[2, 1]), "in order"),
        (lambda: Schedule(TRACE, seed=0, trace_offsets_ns=[-2, 1]), "negative"),
        (lambda: Schedule(GAMMA, seed=0, burstiness=0), "burstiness"),
        (lambda: schedule(POISSON).share(2, 2), "share 2 of 2"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()


def test_an_audit_sees_a_missing_part_and_a_changed_process() -> None:
    planned = schedule(POISSON, hold(50, 200 * S)).offsets_ns()
    same = audit(planned, planned[::-1] + 1000)
    assert same.achieved_fraction == 1
    assert same.sent_gap_cv == same.planned_gap_cv == pytest.approx(1, rel=0.05)
    # Sent once a second in a burst, as a dispatcher would that wakes up once a second; the last second is missing.
    bursts = audit(planned, planned[planned < 199 * S] // S * S)
    assert bursts.achieved_fraction == pytest.approx(199 / 200, abs=0.002)
    assert bursts.sent_gap_cv is not None
    assert bursts.sent_gap_cv > 5
    assert audit(planned[:0], planned[:2]).achieved_fraction is None
    assert audit(planned[:2], planned[:0]).sent_gap_cv is None
    assert audit(planned, planned * 0).sent_gap_cv is None
