import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.report.rows import MIXED, SCHEMA, SECOND, batch, health, health_row, interval, request, run
from vllm_locust.report import columns
from vllm_locust.report.columns import read_batches
from vllm_locust.report.html import render_html
from vllm_locust.report.summary import summarize
from vllm_locust.report.text import render_text


def numbers(block: dict[str, Any], *names: str) -> list[Any]:
    return [block[name] for name in names]


def only_stage(rows: list[dict[str, Any]], **keys: Any) -> dict[str, Any]:
    (stage,) = summarize(run(**keys), [batch(rows)])["stages"]
    assert isinstance(stage, dict)
    return stage


def test_requests_are_counted_in_the_window_only() -> None:
    stage = only_stage(MIXED)
    assert stage["requests"] == {
        "attempted": 4,
        "ok": 3,
        "failed": 1,
        "failed_by_outcome": {"http_error": 1},
        "censored": 0,
        "dropped_arrivals": 0,
        "lost_arrivals": 0,
    }
    assert stage["failed_fraction"] == 0.25
    assert numbers(stage, "stage", "name", "stage_kind", "length_s") == [0, "window", "hold", 10]


def test_rates_count_what_arrived_in_the_window() -> None:
    stage = only_stage(MIXED)
    # Sent at 10, 12, 15, 18.
    assert stage["achieved_rps"] == 0.4
    # Last tokens at 13, 14, 15 are in the window, the one at 22 is not.
    assert stage["requests_per_s"] == pytest.approx(0.3)
    # 2 of the warm-up's request, 4, 2, and 1 of the last request's 2.
    assert stage["output_tokens_per_s"] == pytest.approx(0.9)
    # First tokens at 11, 14, 19; the warm-up's came before the window.
    assert stage["input_tokens_per_s"] == 6
    assert stage["total_tokens_per_s"] == pytest.approx(6.9)


def test_tokens_without_a_chunk_of_their_own_are_spread_or_scaled() -> None:
    rows = [
        # Half of its 10 tokens in the window: 2 chunks, one after the window.
        request(19, [0.5, 2], None, output_tokens=10),
        # In one piece at 12.
        request(11, streamed=False, e2e_ns=1_000_000_000, output_tokens=8, prompt_tokens=3),
        # The server's total is 4, the chunks say 2: each counts twice.
        request(12, [1, 2], [1, 1]) | {"output_tokens": 4},
        # Broken off, and its tokens had been delivered.
        request(13, [1, 2], [1, 1], outcome="truncated"),
    ]
    stage = only_stage(rows)
    assert stage["output_tokens_per_s"] == pytest.approx((5 + 8 + 4 + 2) / 10)
    assert stage["input_tokens_per_s"] == pytest.approx(0.3)


def test_latencies_of_ok_requests() -> None:
    stage = only_stage(MIXED)
    # TTFT 1 2 1
    assert numbers(stage["ttft_s"], "n", "p50", "p90", "max") == [3, 1, 2, 2]
    assert stage["ttft_s"]["mean"] == pytest.approx(4 / 3)
    # TPOT 3/3, 1/1, 3/1
    assert numbers(stage["tpot_s"], "n", "mean", "p50", "max") == [3, pytest.approx(5 / 3), 1, 3]
    # Gaps 1 2 1 3
    assert numbers(stage["chunk_gap_s"], "n", "mean", "p50", "p90", "max") == [4, 1.75, 1, 3, 3]
    # 0.5 0.5 2 1 3
    assert numbers(stage["itl_s"], "n", "mean", "p50", "p90", "max") == [5, 1.4, 1, 3, 3]
    # 4 3 4
    assert numbers(stage["e2e_s"], "n", "p50", "max") == [3, 4, 4]
    assert stage["ttft_from_schedule_s"]["n"] == stage["schedule_lag_s"]["n"] == 0
    assert stage["tokens_per_chunk"] == 8 / 7
    assert stage["ttft_s"]["few_samples"] == ["p50", "p90", "p95", "p99", "p99_9"]


def test_a_failure_is_slower_than_everything() -> None:
    stage = only_stage(MIXED)
    adjusted = stage["ttft_adjusted_s"]
    # 1 1 2 ∞
    assert numbers(adjusted, "n", "failed", "mean", "p50", "p90", "max") == [4, 1, None, 1, None, None]
    assert adjusted["beyond"] == ["p90", "p95", "p99", "p99_9", "max"]
    # Three ok requests have 4 gaps, so the failed one stands for 2: 1 1 2 3 ∞ ∞.
    assert numbers(stage["chunk_gap_adjusted_s"], "n", "failed", "p50", "p90") == [6, 2, 2, None]
    assert "beyond" not in stage["ttft_s"]


def test_a_failure_stands_for_the_samples_of_those_that_have_some() -> None:
    """Of three ok requests two have no ITL: their chunks' tokens are not known, or there is one chunk."""
    rows = [
        request(11, [1, 2, 3], [1, 1, 1]),
        request(12, [1, 2, 3]) | {"chunk_tokens": None},
        request(13, [1], [1]),
        request(14, outcome="http_error"),
    ]
    stage = only_stage(rows)
    assert numbers(stage["itl_adjusted_s"], "n", "failed") == [4, 2]
    assert numbers(stage["chunk_gap_adjusted_s"], "n", "failed") == [6, 2]


def test_what_happens_before_a_request_can_fail_is_not_adjusted() -> None:
    stage = only_stage([request(12, scheduled=11, outcome="connect_error"), request(14, [1, 2], [1, 1], scheduled=14)])
    assert numbers(stage["schedule_lag_s"], "n", "max") == [2, 1]
    assert "schedule_lag_adjusted_s" not in stage
    assert numbers(stage["ttft_from_schedule_adjusted_s"], "n", "failed", "p50") == [2, 1, 1]


def test_an_answer_in_one_piece_has_no_ttft_and_its_failures_do_not_count_there() -> None:
    rows = [
        request(11, streamed=False, e2e_ns=2_000_000_000, done_ns=2_000_000_000, output_tokens=5),
        request(12, streamed=False, outcome="http_error"),
    ]
    stage = only_stage(rows)
    assert stage["ttft_s"]["n"] == stage["ttft_adjusted_s"]["n"] == stage["itl_adjusted_s"]["n"] == 0
    assert numbers(stage["e2e_adjusted_s"], "n", "failed", "p50", "p99") == [2, 1, 2, None]


def test_itl_is_null_where_tokens_per_chunk_are_not_known() -> None:
    rows = [request(11, [1, 2, 3], None, output_tokens=6)]
    stage = only_stage(rows)
    assert stage["itl_s"]["n"] == 0
    assert stage["itl_s"]["p50"] is None
    assert stage["chunk_gap_s"]["n"] == 2
    assert stage["tokens_per_chunk"] == 2
    assert stage["tpot_s"]["p50"] == 2 / 5


def test_tpot_needs_two_tokens_in_two_chunks_and_reads_low_after_a_full_first_one() -> None:
    stage = only_stage([request(11, [1], [1]), request(12, [1], [5]), request(13, [1, 3], [3, 2])])
    assert numbers(stage["tpot_s"], "n", "p50") == [1, 0.5]
    assert stage["tpot_reads_low"] == 2


def test_goodput_counts_failures_as_not_good() -> None:
    stage = only_stage(MIXED, slos=("ttft<=1s",))
    assert numbers(stage, "good_requests", "undecidable_requests", "goodput_rps", "good_fraction") == [2, 0, 0.2, 0.5]
    low, high = stage["good_fraction_ci95"]
    assert 0 < low < 0.5 < high < 1
    # 4 requests in 10 s.
    assert stage["goodput_rps_ci95"] == pytest.approx([0.4 * low, 0.4 * high])
    assert only_stage(MIXED)["goodput_rps"] is None


def test_an_slo_that_does_not_apply_leaves_a_request_undecided() -> None:
    stage = only_stage([request(11, [1], [1]), request(12, [1, 2], [1, 1])], slos=("tpot<=1s",))
    assert numbers(stage, "good_requests", "undecidable_requests", "good_fraction") == [1, 1, 1.0]


def test_stages_are_apart_and_the_whole_window_is_their_union() -> None:
    stages = [
        {
            "stage": 0,
            "name": "4/s",
            "stage_kind": "hold",
            "offered_rps": 4.0,
            "dropped_arrivals": 1,
            **interval(10, 14),
        },
        {"stage": 1, "name": "up", "stage_kind": "ramp", **interval(14, 16)},
        {"stage": 2, "name": "8/s", "stage_kind": "hold", "users": 8, "lost_arrivals": 2, **interval(16, 20)},
    ]
    rows = [
        request(11, [1, 2], [1, 1], scheduled=11, stage=0),
        request(15, [2, 5], [1, 1], scheduled=15, stage=1),
        request(17, [3, 7], [1, 1], scheduled=16, stage=2),
    ]
    summary = summarize(run(slos=("p50(ttft)<=2s",), stages=stages), [batch(rows)])
    assert [stage["ttft_s"]["p50"] for stage in summary["stages"]] == [1, 2, 3]
    assert [stage["planned_arrivals"] for stage in summary["stages"]] == [2, 1, 3]
    assert [stage["offered_rps"] for stage in summary["stages"]] == [4, 0.5, 0.75]
    asked = sum(stage["offered_rps"] * stage["length_s"] for stage in summary["stages"])
    assert summary["totals"]["offered_rps"] == pytest.approx(asked / summary["totals"]["length_s"])
    assert [stage["achieved_rps"] for stage in summary["stages"]] == [0.25, 0.5, 0.25]
    assert [stage["users"] for stage in summary["stages"]] == [None, None, 8]
    # Tokens at 12 and 13; at 17, of the ramp's request, in the last stage; 20 is after its end.
    assert [stage["output_tokens_per_s"] for stage in summary["stages"]] == [0.5, 0, 0.25]
    totals = summary["totals"]
    assert numbers(totals["ttft_s"], "n", "p50", "max") == [3, 2, 3]
    assert numbers(totals["chunk_gap_s"], "n", "p50", "max") == [3, 3, 4]
    assert totals["requests"]["dropped_arrivals"] == 1
    assert totals["requests"]["lost_arrivals"] == 2
    assert totals["planned_arrivals"] == 6
    # The ramp is not judged.
    assert [(entry["stage"], entry["met"], entry["value"]) for entry in summary["slo"]["stages"]] == [
        (0, True, 1),
        (2, False, 3),
    ]
    assert summary["slo"]["missed"]
    # Half of the planned arrivals were never sent, and one was late.
    assert {reason["code"] for reason in summary["verdict"]["reasons"]} == {"rate_missed", "schedule_lag"}
    assert summary["exit_code"] == 4


def test_a_request_of_the_window_outside_all_stages_counts_in_the_whole_only() -> None:
    stages = [{"stage": 5, "stage_kind": "hold", **interval(10, 12)}]
    rows = [request(11, [1], [1], stage=5), request(15, [2], [1], stage=None)]
    summary = summarize(run(stages=stages), [batch(rows)])
    assert summary["stages"][0]["requests"]["attempted"] == 1
    assert summary["totals"]["requests"]["attempted"] == 2


def test_all_phases_are_counted_for_comparison_with_the_server() -> None:
    everything = summarize(run(), [batch(MIXED)])["totals"]["all_phases"]
    assert everything == {
        "requests": 6,
        "ok": 4,
        "by_outcome": {"censored": 1, "http_error": 1, "ok": 4},
        "by_phase": {"warmup": 1, "window": 4, "drain": 1},
        "attempts": 6,
        "retried": 0,
        "prompt_tokens": 67,
        "output_tokens": 11,
        "token_sources": {"usage": 4},
        "stamp_sources": {"kernel": 4},
        "chunks": 10,
        "coalesced_chunks": 0,
    }


def test_refused_connections_say_nothing_about_stamps() -> None:
    refused = [request(11 + i / 10, outcome="connect_error", stamp_source="user") for i in range(30)]
    workers = [health([health_row(11 + i, loop_lag_ns=500_000_000) for i in range(5)])]
    summary = summarize(run(), [batch([request(11, [1, 2], [1, 1]), *refused])], workers=workers)
    assert summary["totals"]["all_phases"]["stamp_sources"] == {"kernel": 1}
    assert "user_stamps" not in {reason["code"] for reason in summary["verdict"]["reasons"]}
    late = summarize(run(), [batch([request(11, [1, 2], [1, 1], stamp_source="user"), *refused])], workers=workers)
    assert "user_stamps" in {reason["code"] for reason in late["verdict"]["reasons"]}


def test_what_the_drain_cut_off_is_a_failure() -> None:
    rows = [request(11 + i / 10, [1, 2], [1, 1]) for i in range(8)]
    rows += [request(15, [1], [1], outcome="censored"), request(16, outcome="http_error", http_status=503)]
    facts = run()
    facts["config"]["max_failures"] = 0.19
    summary = summarize(facts, [batch(rows)])
    assert summary["stages"][0]["requests"]["failed"] == 1
    assert summary["exit_code"] == 1
    (reason,) = (one for one in summary["verdict"]["reasons"] if one["fails_run"])
    assert reason["code"] == "too_many_failures"
    assert reason["sentence"].startswith("2 of 10 requests failed, of which 1 unfinished at the end of the drain (20 %")
    facts["config"]["max_failures"] = 0.2
    assert summarize(facts, [batch(rows)])["exit_code"] == 0


def test_what_never_left_us_is_no_achieved_request() -> None:
    rows = [request(11, [1, 2], [1, 1]), request(12, outcome="connect_error"), request(13, outcome="timeout_connect")]
    rows += [request(14, outcome="client_error"), request(15, outcome="timeout_first_token")]
    stage = only_stage(rows)
    assert (stage["requests"]["attempted"], stage["achieved_rps"]) == (5, 0.3)


def test_what_was_turned_away_before_the_server_was_gone_had_left_us() -> None:
    turned_away = request(12, outcome="connect_error", attempts=2, http_status=429, error="refused")
    rows = [request(11, [1, 2], [1, 1]), turned_away, request(13, outcome="connect_error", attempts=3, error="refused")]
    summary = summarize(run(), [batch(rows)])
    assert summary["stages"][0]["achieved_rps"] == 0.2
    (connect_error,) = summary["errors"]
    assert connect_error["examples"] == [{"text": "refused", "count": 2}], "the words are not those of the status"


def test_requests_that_needed_more_than_one_attempt_are_told_in_both_pages() -> None:
    rows = [request(11, [1, 2], [1, 1], attempts=attempts) for attempts in (1, 2, 4, 1, 0)]
    summary = summarize(run(), [batch(rows)])
    assert summary["totals"]["all_phases"]["retried"] == 2
    words = "2 requests needed more than one attempt: TTFT and E2E count from the first and hold the waits between them"
    assert f"- {words}" in " ".join(render_text(summary).split())
    assert words in render_html(summary, run())
    assert "more than one attempt" not in render_text(summarize(run(), [batch(MIXED)]))


@pytest.mark.parametrize(("slo", "exits"), [("p99(tpot)<=1s", 3), ("p99(e2e)<=9s", 0), ("p99(e2e)<=1s", 3)])
def test_a_gate_that_measures_nothing_does_not_pass(slo: str, exits: int) -> None:
    rows = [request(11, [2], [1]), request(12, [2], [1])]
    summary = summarize(run(slos=(slo,)), [batch(rows)])
    undecided = [one["sentence"] for one in summary["verdict"]["reasons"] if one["code"] == "slo_undecided"]
    assert summary["exit_code"] == exits
    assert [slo in sentence for sentence in undecided] == ([True] if slo.startswith("p99(tpot)") else [])
    assert summary["slo"]["missed"] is (slo == "p99(e2e)<=1s")


def test_a_gate_without_a_stage_to_judge_does_not_pass() -> None:
    ramp = [{"stage": 0, "name": "ramp", "stage_kind": "ramp", **interval(10, 20)}]
    summary = summarize(run(slos=("p99(e2e)<=9s",), stages=ramp), [batch([request(11, [2], [1])])])
    assert "slo_undecided" in {one["code"] for one in summary["verdict"]["reasons"]}
    assert summary["exit_code"] == 3


def test_errors_have_examples() -> None:
    rows = [request(11 + i / 10, outcome="http_error", http_status=503, error="busy") for i in range(3)]
    rows += [request(12, outcome="http_error", http_status=500), request(13, outcome="truncated", http_status=200)]
    errors = summarize(run(), [batch(rows)])["errors"]
    assert errors == [
        {
            "outcome": "http_error",
            "count": 4,
            "examples": [{"text": "HTTP 503: busy", "count": 3}, {"text": "HTTP 500", "count": 1}],
        },
        {"outcome": "truncated", "count": 1, "examples": []},
    ]


@pytest.mark.parametrize(
    ("rows", "window", "sentence"),
    [
        ([], None, "no request was sent"),
        ([], interval(10, 20), "no request was sent"),
        ([request(11, [1], [1], phase="warmup")], None, "none of the 1 requests"),
        (
            [request(11, outcome="connect_error", error="refused")],
            interval(10, 20),
            "all 1 requests of the window failed",
        ),
        ([request(10, outcome="connect_error")], interval(10, 10), "all 1 requests of the window failed"),
    ],
)
def test_a_run_that_measured_nothing_has_every_file(rows: list[dict[str, Any]], window: Any, sentence: str) -> None:
    facts = {**run(slos=("ttft<=1s", "p99(e2e)<=1s", "good_fraction>=0.9")), "window": window}
    for source in ([batch(rows)], [] if not rows else [batch(rows)]):
        summary = summarize(facts, source, workers=[health([])])
        assert json.loads(json.dumps(summary, allow_nan=False)) == summary
        assert summary["exit_code"] == 1
        assert summary["verdict"]["status"] == "invalid"
        assert summary["verdict"]["reasons"][0]["code"] == "nothing_measured"
        assert sentence in render_text(summary).split("\n")[0]
        assert sentence in render_html(summary, facts)
        assert summary["stages"][0]["ttft_s"]["n"] == 0


def test_all_failed_is_beyond_everywhere() -> None:
    stage = only_stage([request(11, outcome="timeout_first_token"), request(12, outcome="timeout_first_token")])
    for name in ("ttft", "tpot", "itl", "chunk_gap", "e2e"):
        assert numbers(stage[f"{name}_adjusted_s"], "n", "failed", "p50") == [2, 2, None]
        assert "p50" in stage[f"{name}_adjusted_s"]["beyond"]
        assert stage[f"{name}_s"]["n"] == 0


def test_coordinated_omission_is_shown() -> None:
    """Service 0.5 s, 10 requests/s, one slot: each request waits 0.4 s longer than the one before."""
    rows = [request(10 + 0.5 * i, [0.5], [1], scheduled=10 + 0.1 * i, slot_wait=0.4 * i) for i in range(20)]
    summary = summarize(run(), [batch(rows)], workers=[health([health_row(12, in_flight=1)])])
    stage = summary["stages"][0]
    assert numbers(stage["ttft_s"], "p50", "max") == [0.5, 0.5]
    assert stage["schedule_lag_s"]["max"] == pytest.approx(19 * 0.4)
    assert stage["ttft_from_schedule_s"]["max"] == pytest.approx(19 * 0.4 + 0.5)
    codes = {reason["code"]: reason["severity"] for reason in summary["verdict"]["reasons"]}
    assert codes == {"slots_full": "degraded", "rate_missed": "degraded"}


def test_pieces_and_files_give_the_same_summary(tmp_path: Path) -> None:
    rows = [
        request(
            10 + i / 100,
            [0.1 + i % 7 / 10, 1, 1.5 + i % 3],
            [1, 1 + i % 2, 2],
            prompt=i,
            outcome="truncated" if i % 9 == 4 else "ok",
        )
        for i in range(200)
    ]
    facts = run(slos=("ttft<=300ms",))
    whole = summarize(facts, [batch(rows)])
    path = tmp_path / "requests.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path, row_group_size=17)
    assert summarize(facts, path) == whole
    assert summarize(facts, [batch(rows[i : i + 13]) for i in range(0, 200, 13)]) == whole
    # Rows of several workers come in any order.
    assert summarize(facts, [batch(rows[::-1])]) == whole


def test_health_of_the_window() -> None:
    rows = [health_row(5, cpu_fraction=1.0), health_row(30, gc_pause_ns=10**9)]
    rows += [health_row(11 + i, cpu_fraction=0.1 * i) for i in range(9)]
    rows += [health_row(12, worker_id="w2", run_delay_ns=None, receive_lag_p99_ns=None, rss_bytes=5)]
    workers = summarize(run(), [batch(MIXED)], workers=[health(rows)])["health"]["workers"]
    assert [worker["worker_id"] for worker in workers] == ["w1", "w2"]
    first, second = workers
    assert numbers(first, "samples", "cpu_fraction_p95", "loop_lag_max_s", "gc_pause_max_s") == [9, 0.8, 0.002, 0]
    assert first["cpu_fraction_mean"] == pytest.approx(0.4)
    assert first["run_delay_share"] == pytest.approx(0.001)
    assert numbers(second, "samples", "run_delay_share", "receive_lag_p99_s", "rss_bytes_max") == [1, None, None, 5]


def test_a_worker_that_is_held_up_waits_for_a_share_of_the_time_and_not_of_its_samples() -> None:
    """Each of its samples comes after six seconds, of which it had no core for three."""
    rows = [health_row(11 + 6 * i, run_delay_ns=3 * SECOND) for i in range(2)]
    (worker,) = summarize(run(), [batch(MIXED)], workers=[health(rows)])["health"]["workers"]
    assert worker["run_delay_share"] == pytest.approx(6 / 7)


def test_lengths_are_compared_with_the_source() -> None:
    rows = [request(11 + i, [1, 2], [1, 1], prompt=10 + i, prompt_tokens_planned=9 + i) for i in range(4)]
    workload = summarize(run(), [batch(rows)], length_reference=([9, 10, 11, 12], [2, 3]))["workload"]  # type: ignore[arg-type]
    assert workload["prompt_tokens_planned"] == {"n": 4, "mean": 10.5, "source_mean": 10.5, "ks_distance": 0.0}
    assert workload["prompt_tokens"]["ks_distance"] == 0.25
    assert workload["output_tokens"] == {"n": 4, "mean": 2.0, "source_mean": 2.5, "ks_distance": 0.5}
    capped = run() | {"config": run()["config"] | {"max_tokens": 2}}
    workload = summarize(capped, [batch(rows)], length_reference=([9, 10, 11, 12], [2, 3]))["workload"]  # type: ignore[arg-type]
    assert (workload["output_limit"], workload["prompt_tokens"]["ks_distance"]) == (2, 0.25)
    assert workload["output_tokens"] == {"n": 4, "mean": 2.0, "source_mean": None, "ks_distance": None}
    assert "output tokens: limited to --max-tokens 2, not by the source" in render_text(
        summarize(capped, [batch(rows)])
    )
    without = summarize(run(), [batch(rows)])["workload"]
    assert without["output_tokens"] == {"n": 4, "mean": 2.0, "source_mean": None, "ks_distance": None}


def test_the_definition_card_in_small_numbers() -> None:
    rows = [
        # connect 1, TTFT 2, last 8, done 9, 4 tokens, 1 late: by the tools' own words
        request(12, [2, 8], [1, 3], scheduled=11, connect_ns=10**9, done_ns=9 * 10**9),
        request(13, [2], [1]),
        request(14, outcome="http_error"),
    ]
    card = {(e["tool"], e["name"]): e for e in summarize(run(), [batch(rows)])["definition_card"]}
    assert numbers(card["vLLM bench", "TTFT"], "n", "p50_s", "mean_s") == [2, 2.5, 2.5]
    assert numbers(card["vLLM bench", "TPOT"], "n", "p50_s") == [1, 2]
    assert numbers(card["vLLM bench", "ITL"], "n", "p50_s") == [1, 6]
    assert numbers(card["vLLM bench", "E2EL"], "n", "p50_s") == [2, 5.5]
    assert numbers(card["AIPerf", "inter token latency"], "n", "p50_s") == [1, 2]
    # GuideLLM: (8 + 1) / 4 four times and 2 / 1 once; the mean is weighted.
    assert numbers(card["GuideLLM", "TPOT"], "n", "p50_s", "mean_s") == [2, 2.25, (4 * 2.25 + 2) / 5]
    assert numbers(card["GuideLLM", "request latency"], "n", "p50_s", "p99_s") == [2, 2, 10]
    # MLPerf: 2 + 1 late, 9 + 1 late; (10 - 3) / 3
    assert numbers(card["MLPerf", "TTFT"], "n", "p50_s", "p99_s") == [2, 2, 3]
    assert numbers(card["MLPerf", "TPOT"], "n", "p50_s") == [1, pytest.approx(7 / 3)]
    assert numbers(card["MLPerf", "latency"], "n", "p99_s") == [2, 10]


def test_no_piece_is_larger_than_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "CHUNKS_PER_BATCH", 5)
    lengths = [3, 2, 0, 1, 9, 0, 4, 1, 1]
    rows = [request(11, [1 + k / 100 for k in range(length)], [1] * length) for length in lengths]
    pieces = [
        [len(chunks or ()) for chunks in piece.column("chunk_ns").to_pylist()] for piece in read_batches([batch(rows)])
    ]
    assert pieces == [[3, 2, 0], [1], [9], [0, 4, 1], [1]]
    assert summarize(run(), [batch(rows)])["stages"][0]["itl_s"]["n"] == 2 + 1 + 8 + 3
