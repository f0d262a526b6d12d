"""What a comparison looks at of a run is what its report counts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.report.rows import batch, request, run
from vllm_locust.comparison.quantity import DISTRIBUTIONS
from vllm_locust.report.stage_series import read_stage_series
from vllm_locust.report.summary import summarize

PLANNED = [request(10 + k / 10, [0.1, 0.2], [1, 1], scheduled=10 + k / 10) for k in range(40)]
UNPLANNED = [request(15 + k / 10, [0.1, 0.3], [1, 1]) for k in range(5)]
"""What a task sends after its arrival's request."""
FAILED = [request(17 + k / 10, None, outcome="http_error") for k in range(3)]
FAILED_PLANNED = [request(18, None, outcome="http_error", scheduled=18)]
IN_ONE_PIECE = [request(19, None, streamed=False, e2e_ns=5 * 10**8, done_ns=5 * 10**8)]


@pytest.mark.parametrize(
    "rows",
    [
        PLANNED + UNPLANNED + FAILED + FAILED_PLANNED + IN_ONE_PIECE,
        UNPLANNED + FAILED,
        FAILED + FAILED_PLANNED,
        FAILED,
        IN_ONE_PIECE + FAILED,
    ],
)
def test_as_many_values_and_failures_as_in_the_adjusted_percentiles(rows: list[dict[str, object]]) -> None:
    (stage,) = summarize(run(), [batch(rows)])["stages"]
    found = read_stage_series(run(), [batch(rows)])[0].samples
    for metric in DISTRIBUTIONS:
        block, values = stage[f"{metric}_adjusted_s"], found[metric].values if metric in found else np.empty(0)
        if metric in found:
            assert found[metric].n == block["n"], metric
        else:
            assert block["n"] == 0, metric
        ok = values[np.isfinite(values)]
        assert len(ok) == stage[f"{metric}_s"]["n"], metric


def test_a_request_of_no_plan_that_failed_is_not_late() -> None:
    found = read_stage_series(run(), [batch(PLANNED + FAILED + FAILED_PLANNED)])[0].samples
    assert [int(np.isinf(found[name].values).sum()) for name in ("ttft", "ttft_from_schedule")] == [4, 1]
    assert math.isinf(found["e2e"].values[-1])
