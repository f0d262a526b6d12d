"""The whole load of an open loop, planned before its first request: the schedule, its warm-up and its stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from vllm_locust.arrival import ArrivalProcess, Integers, Piece, Schedule
from vllm_locust.config import RunConfig
from vllm_locust.errors import UsageError
from vllm_locust.load_profile import ProfileStage
from vllm_locust.workload.workload import Workload

OPEN_LOOP_SLOTS = 2_048
"""Over all workers, where a rate is given without ``-u``."""
_LONE_GAP_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    schedule: Schedule
    warmup_ns: int
    """The window begins so long after T0."""
    first_rps: float
    """Of the warm-up."""
    stages: tuple[ProfileStage, ...]
    """None where a search decides on them while the run goes on."""


def plan_load(config: RunConfig, workload: Workload) -> PlannedLoad:
    """Raises UsageError where the workload cannot give what is asked."""
    if config.arrival is ArrivalProcess.TRACE:
        return _replay(config, workload)
    assert config.profile is not None
    schedule = Schedule(config.arrival, seed=config.seed, burstiness=config.burstiness)
    first_rps = config.profile.stages[0].start_value
    warmup_ns = schedule.warmup_length_ns(config.warmup_requests, config.warmup_time_ns, first_rps)
    schedule.extend(Piece(warmup_ns, first_rps, first_rps))
    stages = () if config.capacity is not None else config.profile.stages
    for stage in stages:
        for piece in stage.pieces():
            schedule.extend(piece)
    return PlannedLoad(schedule, warmup_ns, first_rps, stages)


def _replay(config: RunConfig, workload: Workload) -> PlannedLoad:
    offsets_ns = workload.offsets_ns()
    if offsets_ns is None:
        raise UsageError(
            f"--arrival trace: the workload {workload.name} has no recorded times; give --workload a trace (BurstGPT, "
            "Azure or Mooncake), or another --arrival"
        )
    whole = Schedule(ArrivalProcess.TRACE, seed=config.seed, trace_offsets_ns=offsets_ns)
    warmup_ns = whole.warmup_length_ns(config.warmup_requests, config.warmup_time_ns, 0.0)
    if int(offsets_ns[-1]) < warmup_ns:
        raise UsageError(
            f"--warmup-requests {config.warmup_requests}: the trace has {len(offsets_ns):,} requests, so nothing would "
            "be left to measure; give fewer, or 0"
        )
    length_ns = _whole_window_ns(offsets_ns, warmup_ns) if config.window_ns is None else config.window_ns
    due = len(whole.offsets_ns(warmup_ns + length_ns)) - len(whole.offsets_ns(warmup_ns))
    mean_rps = due / (length_ns / 1e9)
    # The pieces of a trace say how long it is, not how fast.
    pieces = (Piece(warmup_ns, 0.0, 0.0), Piece(length_ns, mean_rps, mean_rps))
    schedule = Schedule(ArrivalProcess.TRACE, seed=config.seed, pieces=pieces, trace_offsets_ns=offsets_ns)
    stage = ProfileStage(name="trace", start_value=mean_rps, end_value=mean_rps, length_ns=length_ns)
    return PlannedLoad(schedule, warmup_ns, mean_rps, (stage,))


def _whole_window_ns(offsets_ns: Integers, warmup_ns: int) -> int:
    """To one mean gap after the last arrival: n arrivals then stand for n gaps, and the last is inside. A single moment
    has no gap; it is measured for a second.
    """
    measured = offsets_ns[np.searchsorted(offsets_ns, warmup_ns) :]
    gaps_ns = int(measured[-1] - measured[0])
    return int(measured[-1]) - warmup_ns + (round(gaps_ns / (len(measured) - 1)) if gaps_ns else _LONE_GAP_NS)
