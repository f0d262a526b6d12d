"""The tiles of a report's first screen: two rates that count by different bases say so."""

from __future__ import annotations

from tests.report.rows import batch, request, run
from vllm_locust.report.headline import headline
from vllm_locust.report.summary import summarize


def test_each_rate_names_what_it_counts() -> None:
    rows = [request(11, [1, 2], [1, 1], scheduled=11), request(12, [1, 2], [1, 1], scheduled=12)]
    tiles = {name: remark for name, _, remark in headline(summarize(run(slos=("ttft<=5s",)), [batch(rows)]))}
    assert tiles["requests/s"].startswith("ended in the window; ")
    assert tiles["requests/s"].endswith("/s offered")
    assert tiles["goodput/s"] == "100 % good of those due"
