"""The diagnosis in a summary and on its pages; what prefills do to streams, against an engine's own steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.report.rows import MIXED, SCHEMA, SECOND, batch, health, health_row, interval, request, run
from tests.report.test_gpu_numbers import row as gpu_row
from tests.report.test_server_numbers import SCHEMA as SERVER_SCHEMA
from tests.report.test_server_numbers import Look, times
from tests.report.test_server_numbers import rows as server_rows
from vllm_locust.diagnosis.figures import PrefillFigures
from vllm_locust.diagnosis.finding import Need
from vllm_locust.report.columns import RequestColumns
from vllm_locust.report.diagnosis_prefills import Turns
from vllm_locust.report.html import render_html
from vllm_locust.report.reading import Reading
from vllm_locust.report.run_facts import RunFacts
from vllm_locust.report.summary import summarize
from vllm_locust.report.text import WIDTH, render_text
from vllm_locust.simserver.engine import Engine, EngineConfig, EngineRequest
from vllm_locust.store.telemetry_schema import telemetry_rows
from vllm_locust.telemetry import TelemetryKind

HOSTILE = "<b>\x1b[31m\u202e"


@dataclass(frozen=True)
class Served:
    """What an engine did: each request's row, and of each gap how long its step was and which prompts it read."""

    rows: list[dict[str, Any]]
    gaps: list[tuple[int, int]]
    """Nanoseconds, and tokens of the prompts that got their first token at its end (of other requests)."""


def serve(prompts: Sequence[int], every_ns: int, config: EngineConfig) -> Served:
    engine = Engine(config)
    requests = [EngineRequest(str(n), prompt_tokens=tokens, output_tokens=40) for n, tokens in enumerate(prompts)]
    due = [n * every_ns for n in range(len(prompts))]
    chunks: dict[str, list[int]] = {one.request_id: [] for one in requests}
    gaps: list[tuple[int, int]] = []
    now, next_one = 0, 0
    while next_one < len(requests) or engine.has_work:
        while next_one < len(requests) and due[next_one] <= now:
            engine.add(requests[next_one], now)
            next_one += 1
        if not engine.has_work:
            now = due[next_one]
            continue
        step = engine.step(now)
        now += step.duration_ns
        read = sum(one.prompt_tokens for one, _ in step.outputs if not chunks[one.request_id])
        for one, _ in step.outputs:
            if chunks[one.request_id]:
                gaps.append((now - chunks[one.request_id][-1], read))
            chunks[one.request_id].append(now)
    rows = [
        request(
            at / SECOND,
            [(chunk - at) / SECOND for chunk in chunks[one.request_id]],
            [1] * 40,
            prompt=one.prompt_tokens,
            request_id=one.request_id,
        )
        for one, at in zip(requests, due, strict=True)
    ]
    return Served(rows, gaps)


def prefill_figures(rows: list[dict[str, Any]], **facts: Any) -> PrefillFigures:
    reading = Reading(RunFacts.from_run(run(0, 1000, **facts)))
    reading.read([batch(rows)], None)
    reading.gap_inflations([batch(rows[n : n + 37]) for n in range(0, len(rows), 37)])
    return reading.prefills[0].figures()


@pytest.fixture(scope="module")
def served() -> Served:
    """Every tenth prompt has 4,000 tokens, which an engine reads in 100 ms, and a step without takes some 6 ms."""
    return serve([4000 if n % 10 == 7 else 100 for n in range(400)], every_ns=40_000_000, config=EngineConfig())


def test_what_prefills_did_to_gaps_is_what_the_engine_did(served: Served) -> None:
    told = prefill_figures(served.rows)
    lengths, read = (np.array(column) for column in zip(*served.gaps, strict=True))
    quiet, long = lengths[read == 0], lengths[read >= 4000]
    assert (told.requests, told.long_tokens, told.long_share) == (400, 4000, 0.1)
    assert told.gaps_quiet == len(quiet) > 1000
    assert told.gap_p50_quiet_ns == pytest.approx(np.median(quiet), rel=0.01)
    assert told.gaps_long == len(long) > 100
    assert told.gap_p50_long_ns == pytest.approx(np.median(long), rel=0.01)
    assert told.gaps_short == ((read > 0) & (read <= 1000)).sum() > 100
    excess = lengths[read > 0].sum() - (read > 0).sum() * np.median(quiet)
    assert told.stretched_share == pytest.approx(excess / lengths.sum(), rel=0.02)
    of_long, of_short = (
        np.sort([row["ttft_ns"] for row in served.rows if row["prompt_tokens"] == tokens]) for tokens in (4000, 100)
    )
    assert (told.ttft_p90_long_ns, told.ttft_p90_rest_ns) == (of_long[35], of_short[323])


def test_long_prompts_in_the_way_of_streams_are_found(served: Served) -> None:
    (finding,) = summarize(run(0, 1000), [batch(served.rows)])["diagnosis"]["findings"]
    assert finding["code"] == "long_prompts"
    assert finding["weight"] == finding["figures"]["stretched_share"] > 0.05
    assert "while prompts of 4,000 tokens and more (10 % of them) were read" in finding["sentence"]


@pytest.mark.parametrize(
    ("lengths", "long"),
    [
        ([*range(1, 101)], 90),
        ([5] * 100, 5),
        ([5] * 95 + [7, 8, 9, 10, 11], 7),
        ([5] * 60 + [7] * 40, 7),
    ],
)
def test_where_long_begins(lengths: list[int], long: int) -> None:
    rows = [request(1, [1], [1], prompt=tokens) for tokens in lengths]
    assert prefill_figures(rows).long_tokens == long


def test_prompts_of_one_length_are_in_nobodys_way() -> None:
    even = serve([150] * 400, every_ns=40_000_000, config=EngineConfig())
    summary = summarize(run(0, 1000), [batch(even.rows)])
    assert "long_prompts" in summary["diagnosis"]["not_found"]


def test_a_replica_is_not_held_up_by_the_prompts_of_another() -> None:
    table = pa.Table.from_pylist(
        [
            request(1, [1, 2, 3], [1, 1, 1], prompt=10) | {"target": "a"},
            request(1.5, [1.4], [1], prompt=90) | {"target": "b"},
        ],
        schema=SCHEMA.append(pa.field("target", pa.string())),
    )
    for target, quiet in (("b", 2), ("a", 1)):
        moved = table.set_column(table.schema.get_field_index("target"), "target", [["a", target]])
        reading = Reading(RunFacts.from_run(run(0, 10)))
        reading.read(moved.to_batches(), None)
        reading.gap_inflations(moved.to_batches())
        assert reading.prefills[0].figures().gaps_quiet == quiet


def turns_of(*rows: tuple[str | None, int | None, str]) -> float | None:
    fields = [*SCHEMA, pa.field("conversation_id", pa.string()), pa.field("turn", pa.int64())]
    listed = [
        request(n, [1], [1], phase=phase) | {"conversation_id": conversation, "turn": turn}
        for n, (conversation, turn, phase) in enumerate(rows)
    ]
    turns = Turns()
    for one in listed:
        turns.add(RequestColumns(pa.RecordBatch.from_pylist([one], schema=pa.schema(fields))))
    return turns.later_share()


def test_later_turns_are_those_whose_conversation_the_run_has_begun() -> None:
    assert turns_of() is None
    assert turns_of((None, None, "window")) is None
    assert turns_of(("a", 0, "window"), ("b", 3, "window")) == 0, "the only turn of it that was sent"
    assert turns_of(("a", 0, "warmup"), ("a", 1, "window"), ("b", 0, "window"), (None, None, "window")) == 1 / 3


def overloaded_summary(name: str = "30/s") -> dict[str, Any]:
    """A server that tells of a queue, and two GPUs that decode."""
    looks: list[Look] = [
        (
            t,
            {
                "requests_running": 4,
                "requests_waiting": 3 * t,
                "kv_cache_usage": 0.2,
                **times("ttft", 2.0 * t, t),
                **times("queue", 1.8 * t, t),
                **times("prefill", 0.1 * t, t),
            },
        )
        for t in range(41)
    ]
    server = pa.Table.from_pylist(server_rows(looks), schema=SERVER_SCHEMA).to_batches()
    busy = {"utilization": 0.98, "sm_activity": 0.58, "tensor_activity": 0.02, "dram_activity": 0.55}
    gpu = [
        telemetry_rows(
            TelemetryKind.GPU,
            [gpu_row(t / 2, index, throttle_reasons=[], **busy) for t in range(80) for index in (0, 1)],
        )
    ]
    rows = [request(t, [2.0, 3.0], [1, 1], stage=int(t >= 20)) for t in range(40)]
    stages = [
        {"stage": 0, "name": "10/s", "stage_kind": "hold", **interval(0, 20)},
        {"stage": 1, "name": name, "stage_kind": "hold", **interval(20, 40)},
    ]
    workers = [health([health_row(t) for t in range(40)])]
    facts = run(0, 40, stages=stages)
    return summarize(facts, [batch(rows)], server=server, gpu=gpu, workers=workers)


def test_a_summary_holds_the_findings_and_what_was_not_judged() -> None:
    diagnosis = overloaded_summary()["diagnosis"]
    queueing, decoding = diagnosis["findings"]
    assert (queueing["code"], queueing["stages"]) == ("queueing", ["10/s", "30/s"])
    assert queueing["weight"] == pytest.approx(0.9)
    assert queueing["figures"] == {
        "waiting_first": 1.5,
        "waiting_last": 55.5,
        "waiting_mean": 28.5,
        "running_max": 4,
        "queue_share": pytest.approx(0.9),
        "ttft_p99_s": 2,
    }
    assert (decoding["code"], decoding["figures"]["dram_activity"]) == ("memory_bound_decode", pytest.approx(0.55))
    assert diagnosis["not_found"] == [
        *("refusals", "kv_cache_pressure", "compute_bound", "throttling", "uneven_gpus", "client_bound"),
        "network_bound",
    ]
    assert {rule["code"]: rule["needs"] for rule in diagnosis["not_judged"]} == {
        "long_prompts": Need.PROMPT_LENGTHS,
        "buffered_stream": Need.STREAMS,
        "prefix_cache_unused": Need.SERVER_PREFIX_CACHE,
        "cold_start": Need.WARMUP,
    }


def test_the_pages_show_findings_right_after_the_stages() -> None:
    summary = overloaded_summary()
    page = render_text(summary)
    assert max(len(line) for line in page.split("\n")) <= WIDTH
    assert page.index("STAGES") < page.index("LIMITS of the server") < page.index("LOAD  ")
    told = " ".join(page.split())
    assert "- queueing (stage 10/s; also in 30/s): requests waited for their turn at the server: its queue" in told
    assert " try: a higher --max-num-seqs (the KV cache was at most 20 % full), then" in told
    assert " confirmed where at the same load the queue stays near 0" in told
    assert told.index("- queueing") < told.index("- memory-bound decoding")
    assert " not judged, needs a warm-up with requests that are ok: cold start" in told
    html = render_html(summary, run())
    assert html.index(">Stages</h2>") < html.index(">Limits of the server</h2>") < html.index(">Load</h2>")
    assert "<strong>queueing</strong> (stage 10/s; also in 30/s): requests waited" in html
    assert "Not judged, needs a warm-up with requests that are ok: cold start." in html


def test_names_from_outside_cannot_leave_their_line() -> None:
    summary = overloaded_summary(HOSTILE)
    page, html = render_text(summary), render_html(summary, run())
    assert not set(page) & {"\x1b", "\u202e"}
    assert "<b>" not in html
    assert "also in &lt;b&gt;" in html


def test_a_run_in_which_nothing_limits() -> None:
    rows = [
        request(t / 10, [0.1 + 0.1 * n for n in range(5)], [1] * 5, prompt=100, request_id=str(t)) for t in range(300)
    ]
    summary = summarize(run(0, 31), [batch(rows)], workers=[health([health_row(t) for t in range(30)])])
    assert summary["diagnosis"]["findings"] == []
    assert summary["diagnosis"]["not_found"] == ["refusals", "long_prompts", "client_bound", "buffered_stream"]
    sentence = "None of the 4 limits that could be judged was found."
    assert sentence in render_text(summary)
    assert sentence in render_html(summary, run())


def test_a_window_that_never_began() -> None:
    summary = summarize(run() | {"window": None}, [batch(MIXED[:1])])
    assert summary["diagnosis"]["findings"] == []
    assert "not judged, needs" in render_text(summary)
