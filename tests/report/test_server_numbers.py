"""The figures of a server in a stage, from samples whose answers are plain."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.rows import BASE, SECOND, batch, request, run
from vllm_locust.report.counters import Counter, Series
from vllm_locust.report.html import render_html
from vllm_locust.report.run_facts import Interval
from vllm_locust.report.server_numbers import ServerMetrics
from vllm_locust.report.summary import summarize
from vllm_locust.report.text import WIDTH, render_text

TYPES: dict[str, pa.DataType] = {
    "time_unix_ns": pa.int64(),
    **dict.fromkeys(("target", "engine", "metric"), pa.string()),
    "value": pa.float64(),
}
SCHEMA = pa.schema(TYPES)
A, B = "http://a:8000", "http://b:8000"
Look = tuple[float, Mapping[str, float] | None]
"""Second, and what the page of one engine tells; None where it cannot be read."""


def rows(looks: Sequence[Look], *, target: str = A, engine: str = "0") -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for second, told in looks:
        common = {"time_unix_ns": BASE + round(second * SECOND), "target": target}
        of_page = {"up": 0.0} if told is None else {"up": 1.0, "scrape_duration_seconds": 0.01 + second / 1000}
        if told is not None and "process_start_time_seconds" in told:
            of_page["process_start_time_seconds"] = told["process_start_time_seconds"]
        made += [common | {"engine": None, "metric": name, "value": value} for name, value in of_page.items()]
        made += [
            common | {"engine": engine, "metric": name, "value": value}
            for name, value in (told or {}).items()
            if name not in of_page
        ]
    return made


def metrics(*parts: list[dict[str, Any]]) -> ServerMetrics:
    together = [row for part in parts for row in part]
    return ServerMetrics(pa.Table.from_pylist(together, schema=SCHEMA).to_batches())


def stage(first: float, last: float) -> Interval:
    return Interval(start_unix_ns=BASE + round(first * SECOND), end_unix_ns=BASE + round(last * SECOND))


NO_CLIENT: dict[str, Any] = {"n": 0, "mean": None}


def numbers(
    found: ServerMetrics, first: float, last: float, client_ttft_s: float | None = None, client_n: int = 0
) -> dict[str, Any]:
    told = found.numbers(stage(first, last), {"n": client_n, "mean": client_ttft_s})
    assert told is not None
    return told


def times(name: str, seconds_sum: float, count: float) -> dict[str, float]:
    return {f"{name}_seconds_sum": seconds_sum, f"{name}_seconds_count": count}


def test_one_engine() -> None:
    looks: list[Look] = [
        (
            t,
            {
                "requests_running": 4 + t % 2,
                "requests_waiting": t,
                "kv_cache_usage": t / 10,
                "prompt_tokens_total": 1000 * t,
                "generation_tokens_total": 100 + 50 * t,
                "prefix_cache_queries_total": 1000 * t,
                "prefix_cache_hits_total": 250 * t,
                "preemptions_total": 2 * t,
                'request_success_total{finished_reason="stop"}': 3 * t,
                'request_success_total{finished_reason="length"}': t,
                'ttft_seconds_bucket{le="+Inf"}': 1e9,
                **times("ttft", 0.5 * 4 * t, 4 * t),
                **times("queue", 0.125 * 4 * t, 4 * t),
                **times("prefill", 0.25 * 4 * t, 4 * t),
                **times("decode", 2 * 4 * t, 4 * t),
                **times("itl", 0.5 * t, 50 * t),
                **times("e2e", 2.5 * 4 * t, 4 * t),
            },
        )
        for t in range(11)
    ]
    assert numbers(metrics(rows(looks)), 2, 8, client_ttft_s=0.75, client_n=24) == {
        "targets": [A],
        "pages_read": 6,
        "pages_failed": 0,
        "page_duration_max_s": pytest.approx(0.017),
        "clock_uncertainty_s": None,
        "restarts": 0,
        "requests_running": {"mean": 4.5, "max": 5, "first": 4, "last": 5, "grows": None},
        "requests_waiting": {"mean": 4.5, "max": 7, "first": 2, "last": 7, "grows": None},
        "kv_cache_usage": {"mean": pytest.approx(0.45), "max": 0.7},
        "prompt_tokens_per_s": 1000,
        "generation_tokens_per_s": 50,
        "prefix_cache_queries": 6000,
        "prefix_cache_hit_rate": 0.25,
        "preemptions": 12,
        "requests_finished": {"stop": 18, "length": 6},
        "ttft_s": {"n": 24, "mean": 0.5, "queue": 0.125, "prefill": 0.25, "front_end": 0.125, "network": 0.25},
        "decode_mean_s": 2,
        "itl_mean_s": 0.01,
        "e2e_mean_s": 2.5,
    }
    quicker = numbers(metrics(rows(looks)), 2, 8, client_ttft_s=0.4, client_n=24)["ttft_s"]
    assert quicker["network"] is None, "no request is at the client before it left the server: they are others"


def test_borders_of_a_stage_lie_between_looks() -> None:
    found = metrics(rows([(t, {"generation_tokens_total": 10 * t}) for t in (0.0, 1.0, 2.0, 3.0)]))
    assert numbers(found, 0.25, 2.75)["generation_tokens_per_s"] == pytest.approx(10)
    assert numbers(found, 2.0, 9.0)["generation_tokens_per_s"] == pytest.approx(10), "over the time it was watched"
    assert found.numbers(stage(5, 9), NO_CLIENT) is None, "nobody looked"
    assert found.numbers(None, NO_CLIENT) is None


def test_replicas_and_engines() -> None:
    """Requests and tokens are added up; of the KV cache the fullest counts; ratios are of sums, not of ratios."""
    first = rows(
        [
            (
                t,
                {
                    "requests_running": 2,
                    "kv_cache_usage": 0.5,
                    "generation_tokens_total": 10 * t,
                    **times("ttft", t, t),
                },
            )
            for t in range(5)
        ]
    )
    second = [
        row
        for row in rows(
            [
                (
                    t,
                    {
                        "requests_running": 3,
                        "kv_cache_usage": 0.9 if t == 2 else 0.1,
                        "generation_tokens_total": 20 * t,
                        **times("ttft", 9 * t, 3 * t),
                    },
                )
                for t in range(5)
            ],
            engine="1",
        )
        if row["engine"] is not None
    ]
    other = rows([(t + 0.5, {"requests_running": 5 + t, "generation_tokens_total": 5 * t}) for t in range(5)], target=B)
    told = numbers(metrics(first, second, other), 1, 4)
    assert told["targets"] == [A, B]
    assert told["requests_running"]["max"] == 2 + 3 + 8
    assert told["kv_cache_usage"] == {"mean": 0.5, "max": 0.9}
    assert told["generation_tokens_per_s"] == pytest.approx(35)
    assert told["ttft_s"]["mean"] == pytest.approx(10 / 4)
    assert told["ttft_s"]["queue"] is None
    assert told["ttft_s"]["front_end"] is None
    assert told["ttft_s"]["network"] is None


def test_a_server_that_is_started_anew() -> None:
    """400 tokens before, 30 after; what it made between the last look and its end is not known."""
    looks: list[Look] = [
        (0, {"generation_tokens_total": 1000, "process_start_time_seconds": 100.0}),
        (1, {"generation_tokens_total": 1400, "process_start_time_seconds": 100.0}),
        (2, None),
        (3, None),
        (4, {"generation_tokens_total": 10, "process_start_time_seconds": 103.0}),
        (5, {"generation_tokens_total": 30, "process_start_time_seconds": 103.0}),
    ]
    told = numbers(metrics(rows(looks)), 0, 5.001)
    assert told["restarts"] == 1
    assert (told["pages_read"], told["pages_failed"]) == (4, 2)
    assert told["generation_tokens_per_s"] == pytest.approx(430 / 5)
    assert numbers(metrics(rows(looks)), 4.5, 5.001)["restarts"] == 0


def test_a_new_server_that_has_overtaken_the_old_one() -> None:
    looks: list[Look] = [
        (0, {"generation_tokens_total": 5, "process_start_time_seconds": 100.0}),
        (9, {"generation_tokens_total": 50, "process_start_time_seconds": 101.0}),
    ]
    assert numbers(metrics(rows(looks)), 0, 9)["generation_tokens_per_s"] == pytest.approx(50 / 9)


def test_a_start_that_no_process_tells() -> None:
    looks: list[Look] = [
        (t, {"generation_tokens_total": tokens, **times("queue", waited, tokens)})
        for t, tokens, waited in ((0, 10, 5.0), (1, 20, 6.0), (2, 8, 7.5), (3, 9, 8.0))
    ]
    told = numbers(metrics(rows(looks)), 0, 3)
    assert told["restarts"] == 1
    assert told["generation_tokens_per_s"] == pytest.approx((10 + 8 + 1) / 3)
    assert told["ttft_s"]["queue"] == pytest.approx((1 + 7.5 + 0.5) / (10 + 8 + 1)), "all counters began anew with it"


def test_a_sum_that_goes_back_is_no_start() -> None:
    looks: list[Look] = [(0, times("queue", 5.0, 10)), (1, times("queue", 4.75, 12)), (2, times("queue", 6.0, 14))]
    told = numbers(metrics(rows(looks)), 0, 2)
    assert told["restarts"] == 0
    assert told["ttft_s"]["queue"] == pytest.approx(1 / 4)


def test_a_counter_that_comes_with_its_first_count() -> None:
    aborted = 'request_success_total{finished_reason="abort"}'
    looks: list[Look] = [
        (0, {"up": 1}),
        (1, {"up": 1}),
        (2, {aborted: 3}),
        (3, {aborted: 4}),
    ]
    assert numbers(metrics(rows(looks)), 0, 3)["requests_finished"] == {"abort": 4}


@pytest.mark.parametrize(("slope", "grows"), [(0.0, False), (0.5, True), (-0.5, False)])
def test_a_queue_that_grows(slope: float, grows: bool) -> None:
    noise = np.random.default_rng(7).normal(0, 2, 60)
    found = metrics(rows([(t, {"requests_waiting": 40 + slope * t + noise[t]}) for t in range(60)]))
    waiting = numbers(found, 0, 60)["requests_waiting"]
    assert waiting["grows"] is grows
    assert waiting["last"] - waiting["first"] == pytest.approx(slope * 54, abs=4)


def test_how_much_of_the_window_nobody_saw() -> None:
    looks: list[Look] = [(t, None if 10 <= t < 30 else {"requests_running": 1}) for t in range(100)]
    found = metrics(rows(looks))
    assert found.silence(A, stage(0, 100)) == pytest.approx(21 / 100), "from the last look to the next"
    assert found.silence(A, stage(40, 100)) == 0
    assert found.silence(B, stage(0, 100)) == 1, "a page that was never read"
    assert found.silence(A, stage(11.5, 14.5)) == 1
    assert found.silence(A, stage(11.5, 13)) == 0, "shorter than two looks"


def test_silence_in_the_verdict() -> None:
    def verdict(read_until: float) -> Any:
        looks: list[Look] = [(t, {"requests_running": 1} if t < read_until else None) for t in range(80)]
        server = pa.Table.from_pylist(rows(looks), schema=SCHEMA).to_batches()
        facts = run(10, 70, server_metrics={"pages": [{"url": f"{A}/metrics", "target": A}]})
        return summarize(facts, [batch([request(11, [1, 2])])], server=server)["verdict"]

    assert verdict(80)["reasons"] == []
    assert verdict(65)["reasons"] == [], "a tenth may be missing"
    (reason,) = verdict(40)["reasons"]
    assert (reason["code"], reason["severity"]) == ("telemetry_missing", "degraded")
    assert reason["value"] == pytest.approx(31 / 60)
    assert "Nothing came of the metrics of http://a:8000 for up to 51.7 % of the window" in reason["sentence"]


@given(st.lists(st.tuples(st.integers(0, 1000), st.booleans()), min_size=2, max_size=30))
def test_gains_add_up_whatever_starts_anew(steps: list[tuple[int, bool]]) -> None:
    """Each step: what the server counts until the next look, and whether it began at 0 for it."""
    values, gains, restarts = [0.0], [], []
    for number, (counted, anew) in enumerate(steps):
        values.append((0.0 if anew else values[-1]) + counted)
        gains.append(counted)
        restarts += [number + 1] if anew else []
    looks = np.arange(len(values), dtype=np.int64) * SECOND
    counter = Counter(Series(looks, np.array(values)), looks, np.array(restarts, dtype=np.int64) * SECOND)
    assert counter.gain(0, int(looks[-1])) == (sum(gains), len(steps))
    for cut in range(1, len(steps)):
        before, after = counter.gain(0, cut * SECOND), counter.gain(cut * SECOND, int(looks[-1]))
        assert before is not None
        assert after is not None
        assert (before[0], after[0]) == (sum(gains[:cut]), sum(gains[cut:]))


def test_in_summary_and_pages() -> None:
    looks: list[Look] = [
        (
            10 + t,
            {
                "requests_running": 2,
                "requests_waiting": 5 * t,
                "generation_tokens_total": 40 * t,
                **times("ttft", 0.25 * t, t),
                **times("queue", 0.125 * t, t),
                **times("prefill", 0.0625 * t, t),
            },
        )
        for t in range(61)
    ]
    requests = [request(11, [1, 2]), request(12, [1, 2])]
    server = pa.Table.from_pylist(rows(looks), schema=SCHEMA).to_batches()
    sources = [
        {"source": f"server-metrics-{run_id}-1-ab", "kinds": ["server"], "uncertainty_ns": uncertainty_ns}
        for run_id, uncertainty_ns in (("run-1", 2_000_000), ("run-2", 9_000_000))
    ]
    summary = summarize(run(10, 70, telemetry={"sources": sources}), [batch(requests)], server=server)
    told = summary["stages"][0]["server"]
    assert told["clock_uncertainty_s"] == 0.002, "of the run's own scraper"
    assert told == summary["totals"]["server"]
    assert told["ttft_s"]["network"] is None, "the server counted 60 first tokens, the clients 2"
    text, html = render_text(summary), render_html(summary, {})
    cells = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    shown = {row[0]: row[-1] for row in cells}
    assert {
        "running, mean (max)": "2 (2)",
        "waiting, first → last": "12.5 → 282",
        "KV cache, fullest": "–",
        "generation tokens/s": "40",
        "TTFT there, mean": "250 ms",
        "queue": "125 ms",
        "front end": "62.5 ms",
        "network, beyond it": "–",
    }.items() <= shown.items()
    assert "- the window: the server's queue grew from 12.5 to 282 waiting requests" in text
    assert "<td>waiting, first → last</td><td>12.5 → 282</td>" in html
    assert max(map(len, text.splitlines())) <= WIDTH

    without = summarize(run(10, 70), [batch(requests)])
    assert without["stages"][0]["server"] is None
    assert "SERVER" not in render_text(without)
    assert ">Server</h2>" not in render_html(without, {})
