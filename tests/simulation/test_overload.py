"""The overload detector on the simulated server's engine: silent below what it can take, quick above."""

from __future__ import annotations

import pytest

from tests.simulation.cases import CASES
from tests.simulation.probing import Case
from tests.simulation.study import arrivals_until_overload, saturation_rps

ENGINES = [case for case in CASES if case.name in ("max_num_seqs, p99(ttft)", "prefill, p99(ttft)")]


@pytest.mark.parametrize("case", ENGINES, ids=lambda case: case.name)
def test_it_is_silent_below_and_quick_above(case: Case) -> None:
    """RESULTS.md has the rates over many more probes: none in 480 fired at up to 95 % of what the server can take."""
    saturation = saturation_rps(case)
    for share in (0.8, 0.9, 0.95):
        below = [arrivals_until_overload(case, share * saturation, 2_000, seed) for seed in range(100, 106)]
        assert below == [None] * 6
    for share, arrivals in ((1.2, 2_000), (1.5, 600)):
        above = [arrivals_until_overload(case, share * saturation, 3_000, seed) for seed in range(100, 106)]
        assert all(one is not None and one <= arrivals for one in above), above
