"""A worker and the merge judge a request by the same values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.servers import request
from vllm_locust.outcome import Outcome
from vllm_locust.record import RequestRecord
from vllm_locust.report import columns as report_columns
from vllm_locust.slo import REQUEST_METRICS, judge_request, judge_requests, parse_slos
from vllm_locust.store import columns as store_columns

NS = st.none() | st.integers(0, 10**10)


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    record = request(draw(st.integers(0, 1000)))
    record.outcome = draw(st.sampled_from([Outcome.OK, Outcome.TRUNCATED]))
    record.chunk_ns = sorted(draw(st.lists(st.integers(0, 10**10), max_size=6)))
    tokens = st.lists(st.integers(0, 5), min_size=len(record.chunk_ns), max_size=len(record.chunk_ns))
    record.chunk_tokens = draw(st.none() | tokens)
    record.ttft_ns = record.chunk_ns[0] if record.chunk_ns else None
    record.output_tokens = draw(st.none() | st.integers(0, 50))
    for name in ("ttft_answer_ns", "e2e_ns", "done_ns", "schedule_lag_ns"):
        setattr(record, name, draw(NS))
    return record


@settings(max_examples=80, deadline=None)
@given(st.lists(records(), min_size=1, max_size=5), st.sampled_from(REQUEST_METRICS), st.integers(1, 10**4))
def test_records_and_columns_have_the_same_values(rows: list[RequestRecord], metric: str, limit_ms: int) -> None:
    gathered = store_columns.RequestColumns()
    for row in rows:
        gathered.append(row)
    columns = report_columns.RequestColumns(gathered.to_arrow())
    by_column = columns.slo_values_ns()
    by_record: list[dict[str, Any]] = [row.slo_values_ns() for row in rows]
    assert {*by_column} == {*by_record[0]} == {*REQUEST_METRICS}
    for name in REQUEST_METRICS:
        expected = [np.nan if values[name] is None else values[name] for values in by_record]
        # TPOT of a record is rounded to the nanosecond.
        assert by_column[name].tolist() == pytest.approx(expected, abs=0.5, nan_ok=True)
    slos = parse_slos([f"{metric}<={limit_ms}ms"])
    good, decided = judge_requests(slos, columns.ok, by_column)
    for number, row in enumerate(rows):
        judged = judge_request(slos, row.outcome is Outcome.OK, by_record[number])
        assert (bool(good[number]) if decided[number] else None) == judged
