"""Everything that is found when runs of one setting are held against runs of another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm_locust.comparison.difference import ALPHA, Difference, can_pair, compare, holm
from vllm_locust.comparison.limit import Limit
from vllm_locust.comparison.quantity import TABLE, Quantity
from vllm_locust.comparison.series import StageSeries

BETTER: Final = "better"
WORSE: Final = "worse"
NO_EVIDENCE: Final = "no evidence"
TOO_FEW: Final = "too few"

PASSED: Final = "passed"
FAILED: Final = "failed"
UNDECIDED: Final = "undecided"


@dataclass(frozen=True, slots=True)
class Gate:
    """One ``--fail-if`` in one stage, by its name: no two stages of a run have the same."""

    limit: Limit
    stage: str
    difference: Difference
    status: str
    undecided: str | None
    """Why."""

    def as_json(self) -> dict[str, Any]:
        return {
            "fail_if": self.limit.text,
            "stage": self.stage,
            "status": self.status,
            **self.difference.as_json(),
            "undecided": self.undecided,
        }


@dataclass(frozen=True, slots=True)
class Result:
    paired: bool
    """Each request is compared with the one of the same arrival."""
    differences: Mapping[str, Sequence[Difference]]
    marked: set[tuple[str, Quantity]]
    """Those that differ, with at most 5 % chance that any one of them does so by chance (Holm)."""
    gates: Sequence[Gate]
    missing: Sequence[tuple[Limit, str]]
    """Limits on what a stage does not have."""

    def mark(self, stage: str, difference: Difference) -> str:
        if difference.p_worse is None:
            return TOO_FEW
        if (stage, difference.quantity) not in self.marked:
            return NO_EVIDENCE
        return WORSE if difference.p_worse < 0.5 else BETTER

    def stages_json(self) -> list[dict[str, Any]]:
        return [
            {
                "name": stage,
                "differences": [one.as_json() | {"mark": self.mark(stage, one)} for one in differences],
            }
            for stage, differences in self.differences.items()
        ]


Runs = Sequence[Mapping[str, StageSeries]]


def hold_against(
    base: Runs, new: Runs, limits: Sequence[Limit], *, same_schedule: bool, same_stages: bool = True
) -> Result:
    """The stages that all runs have are compared. ``same_schedule``: the same arrivals were planned in both.
    ``same_stages``: a stage of BASE that a run lacks was to be measured there too, and no limit holds without it.
    """
    of_base = list(dict.fromkeys(key for run in base for key in run))
    shared = [key for key in of_base if all(key in run for run in (*base, *new))]
    lacking = [key for key in of_base if key not in shared] if same_stages else []
    sides = {key: ([run[key] for run in base], [run[key] for run in new]) for key in shared}
    paired = bool(sides) and same_schedule and all(can_pair(*side) for side in sides.values())
    differences = {key: _table(side, paired) for key, side in sides.items()}
    p_values = {
        (key, one.quantity): one.p_two_sided
        for key, found in differences.items()
        for one in found
        if one.p_two_sided is not None
    }
    gates: list[Gate] = []
    missing: list[tuple[Limit, str]] = []
    for limit in limits:
        found = {key: compare(limit.quantity, *side, paired=paired) for key, side in sides.items()}
        missing += [(limit, key) for key, one in found.items() if one is None]
        gates += judge(limit, {key: one for key, one in found.items() if one is not None})
        gates += [_of_no_stage(limit, key, new) for key in lacking]
    return Result(paired, differences, holm(p_values), gates, missing)


def _table(side: tuple[Sequence[StageSeries], Sequence[StageSeries]], paired: bool) -> list[Difference]:
    """With one token in each chunk a chunk gap is an ITL, and is left out."""
    left_out = "chunk_gap" if all(_gaps_are_itl(run) for runs in side for run in runs) else None
    found = (compare(quantity, *side, paired=paired) for quantity in TABLE if quantity.metric != left_out)
    return [one for one in found if one is not None]


def _gaps_are_itl(run: StageSeries) -> bool:
    itl, gaps = run.samples.get("itl"), run.samples.get("chunk_gap")
    return itl is not None and gaps is not None and itl.same_as(gaps)


def judge(limit: Limit, found: Mapping[str, Difference]) -> list[Gate]:
    """With all its stages, a limit is one test at 5 %."""
    evident = holm({key: one.p_worse for key, one in found.items() if one.p_worse is not None}, ALPHA)
    return [_gate(limit, key, one, key in evident) for key, one in found.items()]


def _gate(limit: Limit, stage: str, difference: Difference, evident: bool) -> Gate:
    reason = difference.undecided
    if difference.base == math.inf == difference.new:
        reason = (
            f"{limit.quantity.text} of BASE is a failed request already, so how much worse NEW is has no number; "
            "limit failed_fraction"
        )
    if reason is not None:
        return Gate(limit, stage, difference, UNDECIDED, reason)
    return Gate(limit, stage, difference, FAILED if evident and limit.is_beyond(difference) else PASSED, None)


def _of_no_stage(limit: Limit, stage: str, new: Runs) -> Gate:
    side = "NEW" if any(stage not in run for run in new) else "BASE"
    reason = f"a run of {side} has no requests in this stage, and BASE has"
    return Gate(limit, stage, Difference(quantity=limit.quantity, base=None, new=None, n=0), UNDECIDED, reason)
