"""What is known about a run, on which the verdict rests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """How far one reported percentile could be off, because chunks came without stamps of their own. There is none for
    a percentile that is flagged for its few samples: no one should lean on it in the first place.
    """

    metric: str
    percentile: str
    reported_ns: float
    lowest_ns: float
    highest_ns: float

    @property
    def shift_ns(self) -> float:
        return max(self.reported_ns - self.lowest_ns, self.highest_ns - self.reported_ns)

    @property
    def share(self) -> float:
        return self.shift_ns / self.reported_ns if self.reported_ns > 0 else float(self.shift_ns > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What of a stage's planned arrivals was sent in its time, and how evenly."""

    stage: str
    is_hold: bool
    planned: int
    sent: int
    planned_gap_cv: float | None
    """Coefficient of variation of the gaps between arrivals."""
    sent_gap_cv: float | None

    @property
    def deviation(self) -> float:
        """Of the sent from the planned, as a share of the planned."""
        return (self.sent - self.planned) / self.planned if self.planned else 0.0

    @property
    def gap_cv_deviation(self) -> float:
        if self.planned_gap_cv is None or self.sent_gap_cv is None:
            return 0.0
        return self.sent_gap_cv - self.planned_gap_cv


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known about a run. None: not known or not applicable, and no rule fires on it."""

    window_requests: int
    window_ok: int
    attempted: int
    failed: int
    """All that are not ok."""
    unfinished: int = 0
    """Of the failed ones, those that the end of the drain cut off."""
    max_failures: float | None = None
    records_lost: int = 0
    """Requests that a worker is known to have sent and that are on no record."""
    batches_lost: int = 0
    """Numbered batches that a worker made and that are in no file."""
    spooled_batches: int = 0
    spools: Sequence[str] = ()
    """The files in which they may be, each on its worker's host."""
    unstorable_values: int = 0
    """Values in records that no column could hold: the records are there without them."""
    workers_expected: int | None = None
    workers_missing: Sequence[str] = ()
    shifts: Sequence[Shift] = ()
    coalesced_share: float | None = None
    """Share of the chunk gaps that touch a chunk without a stamp of its own."""
    generator_lag_p99_ns: float | None = None
    """Of sent − scheduled without the wait for a free slot."""
    slot_wait_p99_ns: float | None = None
    planned_arrivals: int | None = None
    sent_in_time: int | None = None
    """Of the planned arrivals, those that were sent, and not late."""
    deliveries: Sequence[Delivery] = ()
    """Of the stages of an open loop."""
    arrivals_dropped: int = 0
    arrivals_lost: int | None = 0
    """Planned, and neither on record nor dropped. None: in an open loop it could not be found out."""
    arrivals_doubled: int = 0
    arrivals_misplaced: int = 0
    """On record with another time than the schedule's."""
    receive_lag_p99_ns: float | None = None
    user_stamp_share: float = 0.0
    loop_lag_p99_ns: float | None = None
    health_samples: int | None = None
    cpu_fraction_p95: float | None = None
    cpu_worker: str | None = None
    run_delay_share: float | None = None
    gc_pause_max_ns: int | None = None
    clock_step_max_ns: int | None = None
    clock_uncertainty_max_ns: int | None = None
    telemetry_silence: Mapping[str, float] = field(default_factory=dict)
    """By what was to be sampled beside the requests: the share of the window in which nothing came of it."""
    stopped_early: str | None = None
    """Why the run ended before its time."""
    token_sources: Sequence[str] = ()
    slos_undecided: Sequence[str] = ()
    """Per-stage SLOs for which a stage has no value."""
    capacity_unknown: str | None = None
    """Why a search for the capacity says nothing of it."""
    search_given_up: str | None = None
    """Why a search for the capacity ended before it had what it was for, where it says something of it."""
