"""What the charts draw, against plain counting, and that it stays small."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.big_run import Size, described, measured, requests
from tests.report.rows import BASE, MIXED, SECOND, batch, health, health_row, interval, request, run
from tests.report.test_gpu_numbers import row as gpu_row
from tests.report.test_server_numbers import SCHEMA as SERVER_SCHEMA
from tests.report.test_server_numbers import rows as server_rows
from vllm_locust.report.charts.bins import HELD_NS, MAX_BINS, TimeBins, binned_percentiles, crowded_bins, thinned
from vllm_locust.report.charts.chart_data import chart_data
from vllm_locust.report.charts.curves import load_curve
from vllm_locust.report.charts.telemetry_charts import MAX_GPUS
from vllm_locust.report.summary import measure
from vllm_locust.statistics import PERCENTILES, percentile
from vllm_locust.store.telemetry_schema import telemetry_rows
from vllm_locust.telemetry import TelemetryKind

WEEK_NS = 7 * 86400 * SECOND


def charts(rows: list[dict[str, Any]], facts: dict[str, Any] | None = None, **beside: Any) -> dict[str, Any]:
    found = measure(run() if facts is None else facts, [batch(rows)], **beside)
    drawn = chart_data(found, [batch(rows)], beside.get("workers"))
    assert drawn is not None
    json.dumps(drawn, allow_nan=False)
    return drawn


@given(st.integers(0, WEEK_NS), st.integers(0, WEEK_NS), st.integers(0, WEEK_NS))
def test_bins_of_time_hold_the_run_and_begin_with_the_window(before: int, after: int, start: int) -> None:
    window = BASE + start
    bins = TimeBins.over(window - before, window + after, window)
    edges = bins.edges
    assert window in edges
    assert edges[0] <= window - before
    assert window + after < edges[-1]
    assert bins.count <= MAX_BINS + 2
    assert bins.step_ns % SECOND == 0
    assert bins.step_ns == SECOND or bins.count > MAX_BINS / 4, "no coarser than it must be"


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-5, 5)), max_size=60))
def test_percentiles_of_bins_are_those_of_the_reports(pairs: list[tuple[int, int]]) -> None:
    index = np.array([pair[0] for pair in pairs], dtype=np.int64)
    values = np.array([pair[1] for pair in pairs], dtype=np.float64)
    qs = [*PERCENTILES.values(), Fraction(1)]
    for q, column in zip(qs, binned_percentiles(index, values, 5, qs), strict=True):
        for place in range(5):
            mine = np.sort(values[index == place])
            assert (percentile(mine, q) == column[place]) if len(mine) else np.isnan(column[place])


@given(st.lists(st.integers(1, 30), min_size=1, max_size=300), st.integers(0, 20))
def test_bins_of_lengths_are_about_equally_full(lengths: list[int], count: int) -> None:
    values = np.array(lengths, dtype=np.float64)
    index, bins = crowded_bins(values, count)
    sizes = np.bincount(index, minlength=bins)
    assert sizes.min() > 0
    assert bins <= max(count, 1)
    assert len({(value, place) for value, place in zip(lengths, index.tolist(), strict=True)}) == len(set(lengths))
    most_alike = np.unique(values, return_counts=True)[1].max()
    assert sizes.max() <= len(values) / max(count, 1) + 1 + 2 * most_alike


def test_what_a_gauge_told_stands_for_three_seconds() -> None:
    bins = TimeBins.over(BASE, BASE + 9 * SECOND, BASE)
    times = BASE + np.array([SECOND // 2, SECOND // 2 + 7 * SECOND])
    told = bins.told(times, np.array([5.0, 7.0]))
    assert HELD_NS == 3 * SECOND
    assert [None if np.isnan(value) else value for value in told.tolist()] == [5, 5, 5, 5, None, None, None, 7, 7, 7]


def test_the_slowest_are_always_among_the_points() -> None:
    values = np.zeros(100_000)
    values[[7, 77_777]] = 9
    rows = thinned(values, 50, 2)
    assert {7, 77_777, 0, 99_999} <= set(rows.tolist())
    assert len(rows) <= 52
    assert thinned(np.zeros(52), 50, 2).tolist() == list(range(52))


def test_a_small_run_counted_by_hand() -> None:
    drawn = charts(MIXED)
    # From the first request, sent 2 s before the window, to the end of the one that ran until 22 s.
    assert drawn["time"] == {"start_s": -2, "step_s": 1, "count": 15}
    assert [(span["kind"], span["from_s"], span["to_s"]) for span in drawn["spans"]] == [
        ("warmup", -2, 0),
        ("hold", 0, 10),
        ("drain", 10, 13),
    ]
    load = drawn["load"]
    assert load["offered_rps"] is None
    assert load["achieved_rps"] == [1, 0, 1, 0, 1, 0, 0, 1, 0, 0, 1, 0, 1, 0, 0]
    # Chunks of 1 token each, but for the 2 tokens at 12 s.
    assert load["output_tokens_per_s"] == [0, 1, 0, 2, 2, 1, 2, 1, 0, 0, 0, 1, 0, 0, 1]
    assert load["input_tokens_per_s"] == [0, 7, 0, 10, 0, 0, 20, 0, 0, 0, 0, 30, 0, 0, 0]
    assert load["in_flight"][:5] == [1, 1, 2, 2, 3]
    ttft = drawn["latency"]["ttft"]
    assert ttft["shown"]["p50"] == [1, None, 1, None, 2, None, None, None, None, None, 1, None, None, None, None]
    assert ttft["points"] == [[0, 1], [2, 1], [4, 2], [10, 1]]
    assert drawn["latency"]["ttft_from_schedule"] is None
    assert drawn["failures"] == {
        "censored": [0] * 12 + [1, 0, 0],
        "http_error": [0] * 7 + [1] + [0] * 7,
    }
    assert drawn["lengths"]["prompt_tokens"]["points"] == [[7, 1], [10, 1], [20, 2], [30, 1]]
    assert drawn["load_curve"] is None
    assert (drawn["server"], drawn["gpus"], drawn["generator"]) == (None, None, None)


def test_the_map_of_gaps_has_every_token_in_its_place() -> None:
    drawn = charts(MIXED)["gap_map"]
    assert drawn["metric"] == "itl"
    edges, found = drawn["edges_s"], {}
    for column, row, count in drawn["cells"]:
        (inside,) = [gap for gap in (0.5, 1, 2, 3) if edges[row] <= gap * 1.001 and gap < edges[row + 1]]
        found[column, inside] = count
    # By the second in which the chunk came, after the first bin at 8 s; ITL of the 2 tokens at 12 s is 0.5 s each.
    assert found == {(3, 2): 1, (4, 0.5): 2, (5, 2): 1, (6, 2): 1, (7, 1): 1, (14, 3): 1}


def test_gaps_of_chunks_stand_in_where_tokens_are_unknown() -> None:
    drawn = charts([request(11, [1, 2, 4])])["gap_map"]
    assert drawn["metric"] == "chunk_gap"
    assert sum(count for _, _, count in drawn["cells"]) == 2


def test_curves_end_with_the_largest_sample_and_hold_the_reported_percentiles() -> None:
    size = Size(requests=3000)
    found, drawn = measured(size)
    beyond = drawn["percentiles"]["beyond"]
    for stage, block in zip(drawn["percentiles"]["stages"], found.summary["stages"], strict=True):
        for name in ("ttft", "ttft_from_schedule", "tpot", "itl", "chunk_gap", "e2e"):
            curve, told = stage["curves"][name], block[f"{name}_s"]
            assert curve == sorted(curve)
            assert curve[-1] == pytest.approx(told["max"], rel=1e-3)
            for percentile_name, share in (("p90", 0.1), ("p99", 0.01)):
                assert curve[beyond.index(share)] == pytest.approx(told[percentile_name], rel=1e-3)
            assert beyond[len(curve) - 2] * told["n"] >= 0.999 > beyond[len(curve) - 1] * told["n"]


def test_rates_add_up_to_the_totals() -> None:
    size = Size(requests=2000)
    found, drawn = measured(size)
    step_s, load = drawn["time"]["step_s"], drawn["load"]
    everything = found.summary["totals"]["all_phases"]
    assert sum(load["achieved_rps"]) * step_s == pytest.approx(size.requests, rel=1e-3)
    assert sum(load["offered_rps"]) * step_s == pytest.approx(size.requests, rel=1e-3)
    assert sum(load["requests_per_s"]) * step_s == pytest.approx(everything["ok"], rel=1e-3)
    assert sum(load["output_tokens_per_s"]) * step_s == pytest.approx(everything["output_tokens"], rel=1e-3)
    ended = {outcome: sum(counts) for outcome, counts in drawn["failures"].items()}
    assert ended == {name: n for name, n in everything["by_outcome"].items() if name != "ok"}
    tokens = sum(count for _, _, count in drawn["gap_map"]["cells"])
    assert tokens == everything["ok"] * (size.tokens - 1)


def test_telemetry_lies_on_the_same_axis() -> None:
    gpus = [gpu_row(9 + t, index, utilization=(t + index) / 20, power_w=100.0) for t in range(12) for index in (0, 1)]
    looks = server_rows(
        [(9 + t, {"requests_running": float(t), "requests_waiting": 1.0, "kv_cache_usage": t / 20}) for t in range(12)]
    )
    looks += server_rows(
        [(9 + t, {"requests_running": 1.0, "requests_waiting": 2.0, "kv_cache_usage": 0.1}) for t in range(12)],
        engine="1",
    )
    samples = [health([health_row(10 + t, cpu_fraction=t / 10, worker_id=w) for t in range(9) for w in ("a", "b")])]
    drawn = charts(
        [request(10, [1, 9], [1, 1])],
        workers=samples,
        gpu=[telemetry_rows(TelemetryKind.GPU, gpus)],
        server=pa.Table.from_pylist(looks, schema=SERVER_SCHEMA).to_batches(),
    )
    assert drawn["time"]["start_s"] == 0
    assert drawn["server"]["requests_running"][:3] == [2, 3, 4], "both engines"
    assert drawn["server"]["requests_waiting"][:3] == [3, 3, 3]
    assert drawn["server"]["kv_cache_usage"][:4] == [0.1, 0.1, 0.15, 0.2], "the fullest engine"
    mean, first, second = drawn["gpus"]["series"]
    assert [one["name"] for one in (mean, first, second)] == ["mean of 2 GPUs", "h 0", "h 1"]
    assert (first["utilization"][0], second["utilization"][0]) == (0.05, 0.1)
    assert mean["utilization"][:2] == [0.075, 0.125]
    assert mean["sm_activity"] is None
    # A sample speaks of the second before it.
    assert drawn["generator"]["cpu_fraction"][:3] == [0.1, 0.2, 0.3]
    assert drawn["generator"]["loop_lag_s"][0] == 0.002


def test_there_is_a_knee_among_the_stages() -> None:
    def summary(rates_and_latencies: list[tuple[float, float]], **capacity: Any) -> dict[str, Any]:
        blank = dict.fromkeys(("users", "output_tokens_per_s", "overloaded"))
        block = {"p50": None, "p99": None}
        return {
            "capacity": capacity or None,
            "slo": {"stages": []},
            "stages": [
                blank
                | {"stage": n, "name": str(n), "stage_kind": "hold", "offered_rps": rate, "requests_per_s": rate}
                | {"ttft_s": block, "tpot_s": block, "e2e_s": {"p50": latency, "p99": latency}}
                for n, (rate, latency) in enumerate(rates_and_latencies)
            ],
        }

    found = load_curve(summary([(30, 9.0), (10, 1.0), (20, 1.2)]))
    assert found is not None
    assert [point["requests_per_s"] for point in found["points"]] == [10, 20, 30]
    assert (found["knee"]["load"], found["knee"]["after"], found["knee"]["before"]) == (20, 10, 30)
    rising = load_curve(summary([(10, 1.0), (20, 1.0)]))
    assert rising is not None
    assert rising["knee"] is None
    assert load_curve(summary([(10, 1.0)])) is None
    probes = [{"stage": n, "left_out": "late" if n == 0 else None, "held": n == 1} for n in range(3)]
    earlier: dict[str, Any] = {
        "stage": None,
        "left_out": None,
        "held": False,
        "load": 40,
        "completed_rps": 22.0,
        "latency_s": 5.0,
    }
    earlier |= {"overload": "a queue grew", "figures": {"output_tokens_per_s": 700}}
    stages = [(30.0, 9.0), (10.0, 1.0), (20.0, 1.2)]
    of_search = load_curve(summary(stages, probes=[*probes, earlier], knee=None, unit="requests/s"))
    assert of_search is not None
    shown = [(point["offered_rps"], point["requests_per_s"], point["held"]) for point in of_search["points"]]
    assert shown == [(10, 10, True), (20, 20, False), (40, 22, False)]
    assert (of_search["points"][2]["e2e_p50"], of_search["points"][2]["ttft_p50"]) == (5, None)


def test_a_stage_that_missed_an_slo_is_marked_in_the_load_curve() -> None:
    stages = [{"stage": n, "name": f"{n + 1}/s", **interval(10 + 10 * n, 20 + 10 * n)} for n in range(3)]
    rows = [request(10 + k, [0.1 if k < 10 else 2.0, 3.0], stage=k // 10) for k in range(20)]
    rows += [request(30, None, stage=2, streamed=False, e2e_ns=SECOND, done_ns=SECOND)]
    facts = run(10, 40, slos=("p90(ttft)<=1s", "p50(ttft)<=5s"), stages=stages)
    drawn = charts(rows, facts)["load_curve"]
    assert {point["name"]: point["held"] for point in drawn["points"]} == {"1/s": True, "2/s": False, "3/s": None}


def test_stages_beyond_those_with_curves_are_counted() -> None:
    stages = [{"stage": n, "name": f"{n + 1}/s", **interval(10 + n, 11 + n)} for n in range(43)]
    drawn = charts([request(10 + n, [0.1, 0.2], stage=n) for n in range(42)], run(10, 53, stages=stages))
    assert len(drawn["percentiles"]["stages"]) == 40
    assert drawn["percentiles"]["left_out"] == 2


def test_nothing_to_draw_without_a_window_or_a_request() -> None:
    no_window = {**run(), "window": None}
    assert chart_data(measure(no_window, [batch(MIXED)]), [batch(MIXED)], None) is None
    assert chart_data(measure(run(), []), [], None) is None


def test_stages_without_a_request_leave_no_hole() -> None:
    stages = [{"stage": n, "name": f"{n}", "stage_kind": "hold", **interval(10 + 5 * n, 15 + 5 * n)} for n in range(2)]
    drawn = charts([request(11, [1, 2], [1, 1])], run(stages=stages))
    assert [stage["name"] for stage in drawn["percentiles"]["stages"]] == ["0"]


def test_many_gpus_are_in_the_mean_only() -> None:
    _, drawn = measured(Size(gpus=MAX_GPUS + 3, requests=100))
    assert len(drawn["gpus"]["series"]) == MAX_GPUS + 1
    assert drawn["gpus"]["left_out"] == 3


def test_the_same_run_gives_the_same_data_in_any_batches() -> None:
    size = Size(requests=2500)
    whole = pa.Table.from_batches(requests(size)).combine_chunks().to_batches()
    assert len(whole) == 1
    first, second = (chart_data(measure(described(size), rows), rows, None) for rows in (list(requests(size)), whole))
    assert json.dumps(first) == json.dumps(second)
