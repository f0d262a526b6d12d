from __future__ import annotations

from typing import Any

import pytest

from tests.test_aggregate import Request, of
from vllm_locust.aggregate import HEALTH, RunAggregate, Snapshot, Snapshots
from vllm_locust.live.condition import Condition
from vllm_locust.outcome import Outcome
from vllm_locust.verdict.reason import Status

MS = 1_000_000
CALM = dict.fromkeys(HEALTH, 0.0) | {"cpu_fraction": 0.2, "loop_lag_ns": MS}


def condition(**of_b: float) -> Condition:
    """Of two workers, the second with other values."""
    found, snapshots = Condition(), Snapshots()
    for second in range(1, 21):
        for worker, health in (("a", CALM), ("b", CALM | of_b)):
            snapshots.offer(Snapshot(worker, second, RunAggregate(), health=health))
        found.take(snapshots)
        found.take(snapshots)
    return found


def judged(found: Condition, aggregate: RunAggregate, **facts: Any) -> list[str]:
    verdict = found.verdict(aggregate, **{"max_failures": 0.05, "workers_expected": 2, "workers_missing": (), **facts})
    assert verdict is not None
    return [reason.code for reason in verdict.reasons]


def fine(count: int = 200, lag_ms: int = 0) -> list[Request]:
    return [Request(ttft_ns=MS, e2e_ns=MS, schedule_lag_ns=lag_ms * MS, slot_wait_ns=0)] * count


def test_nothing_is_judged_before_a_request_has_ended() -> None:
    assert Condition().verdict(RunAggregate(), max_failures=0.05, workers_expected=1, workers_missing=()) is None


def test_a_calm_run_is_valid_so_far() -> None:
    verdict = condition().verdict(of(fine()), max_failures=0.05, workers_expected=2, workers_missing=())
    assert verdict is not None
    assert verdict.status is Status.VALID


@pytest.mark.parametrize(
    ("of_b", "code"),
    [
        ({"cpu_fraction": 0.95}, "cpu_saturated"),
        ({"run_delay_ns": 200 * MS}, "run_delay"),
        ({"gc_pause_ns": 30 * MS}, "gc_pause"),
        ({"receive_lag_p99_ns": 20 * MS}, "receive_lag"),
    ],
)
def test_one_worker_in_trouble_is_enough(of_b: dict[str, float], code: str) -> None:
    assert judged(condition(**of_b), of(fine())) == [code]
    (name,) = of_b
    shown = condition(**of_b).figures()
    assert shown["cpu_fraction_max"] == of_b.get("cpu_fraction", 0.2)
    assert shown["gc_pause_max_s"] == of_b.get("gc_pause_ns", 0) / 1e9, name


def test_late_requests_failures_and_missing_workers_are_told() -> None:
    assert judged(condition(), of(fine(lag_ms=50))) == ["schedule_lag"]
    failing = fine(90) + [Request(outcome=Outcome.HTTP_ERROR)] * 10
    assert judged(condition(), of(failing)) == ["too_many_failures"]
    assert judged(condition(), of(fine()), workers_missing=("b",)) == ["workers_missing"]
