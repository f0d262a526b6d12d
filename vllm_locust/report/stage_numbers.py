"""One stage of ``summary.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vllm_locust.confidence import proportion_ci95
from vllm_locust.metrics import CATALOGUE
from vllm_locust.outcome import Outcome
from vllm_locust.report.blocks import metric_block, pooled_block
from vllm_locust.report.request_times import RequestTimes
from vllm_locust.report.run_facts import Interval, RunFacts, Stage
from vllm_locust.report.stage_samples import PER_REQUEST, POOLED, StageSamples
from vllm_locust.report.telemetry_numbers import TelemetryNumbers
from vllm_locust.slo import Slo, SloKind
from vllm_locust.steady_state import SteadyState

Inflations = Mapping[str, Mapping[str, float]]
"""By pooled metric, then by percentile: how many of its samples are worth one independent one."""


def stage_numbers(
    stage: Stage,
    samples: StageSamples,
    rates: Mapping[str, Any],
    inflations: Inflations,
    times: RequestTimes,
    facts: RunFacts,
    telemetry: TelemetryNumbers,
) -> dict[str, Any]:
    """The numbers that a stage and the whole window have in common."""
    interval = stage.interval
    planned = _planned(stage, samples)
    blocks = _blocks(samples, inflations)
    return {
        "start_unix_ns": None if interval is None else interval.start_unix_ns,
        "end_unix_ns": None if interval is None else interval.end_unix_ns,
        "length_s": None if interval is None else interval.length_s,
        "offered_rps": stage.offered_rps if stage.offered_rps is not None else _per_second(planned, interval),
        "planned_arrivals": planned,
        "requests": _requests_json(stage, samples),
        "failed_fraction": 1 - samples.outcomes[Outcome.OK] / samples.attempted if samples.attempted else None,
        **rates,
        **_good_json(samples, interval, facts.slos),
        "in_flight": times.in_flight_json(interval),
        "delivery": times.delivery_json(interval, facts.process_gap_cv if stage.kind == "hold" else None),
        "tokens_per_chunk": _tokens_per_chunk(samples),
        "tpot_reads_low": _tpot_reads_low(samples),
        **blocks,
        **telemetry.of_stage(interval, rates["output_tokens_per_s"], blocks["ttft_s"]),
        **_state_json(times.steady_state(stage, planned)),
    }


def _state_json(state: SteadyState) -> dict[str, Any]:
    return {
        "steady": state.steady,
        "trend": {
            "in_system": None if state.in_system is None else state.in_system.as_json(),
            "latency_s": None if state.latency is None else state.latency.as_json(),
        },
        "overloaded": state.overloaded,
        "overload": state.overload,
    }


def _planned(stage: Stage, samples: StageSamples) -> int | None:
    """Arrivals that the plan had in the stage; None in a closed loop."""
    missed = stage.dropped_arrivals + stage.lost_arrivals
    scheduled = int(samples.flags["scheduled"].sum()) + missed
    return scheduled or None


def _per_second(count: int | None, interval: Interval | None) -> float | None:
    return None if count is None or interval is None or interval.length_s <= 0 else count / interval.length_s


def _requests_json(stage: Stage, samples: StageSamples) -> dict[str, Any]:
    outcomes = samples.outcomes
    ok, censored = outcomes[Outcome.OK], outcomes[Outcome.CENSORED]
    failed = {name: count for name, count in sorted(outcomes.items()) if name not in (Outcome.OK, Outcome.CENSORED)}
    return {
        "attempted": samples.attempted,
        "ok": ok,
        "failed": samples.attempted - ok - censored,
        "failed_by_outcome": failed,
        "censored": censored,
        "dropped_arrivals": stage.dropped_arrivals,
        "lost_arrivals": stage.lost_arrivals,
    }


def _good_json(samples: StageSamples, interval: Interval | None, slos: Sequence[Slo]) -> dict[str, Any]:
    if not any(slo.kind is SloKind.REQUEST for slo in slos):
        names = "good_requests undecidable_requests goodput_rps goodput_rps_ci95 good_fraction good_fraction_ci95"
        return dict.fromkeys(names.split())
    good, decided = samples.flags["good"], samples.flags["decided"]
    count, judged = int(good.sum()), int(decided.sum())
    fractions = proportion_ci95(good[decided])
    per_second = _per_second(judged, interval)
    return {
        "good_requests": count,
        "undecidable_requests": int((~decided).sum()),
        "goodput_rps": _per_second(count, interval),
        "goodput_rps_ci95": None if fractions is None or per_second is None else [f * per_second for f in fractions],
        "good_fraction": count / judged if judged else None,
        "good_fraction_ci95": None if fractions is None else list(fractions),
    }


def _tokens_per_chunk(samples: StageSamples) -> float | None:
    keep = samples.flags["ok"] & (samples.floats["chunks"] > 0) & ~np.isnan(samples.floats["output_tokens"])
    chunks = float(samples.floats["chunks"][keep].sum())
    return float(samples.floats["output_tokens"][keep].sum()) / chunks if chunks else None


def _tpot_reads_low(samples: StageSamples) -> int:
    """Ok requests whose first chunk held several tokens: they are in TPOT's divisor and took none of its time."""
    return int((samples.flags["ok"] & (samples.floats["first_tokens"] > 1)).sum())


def _blocks(samples: StageSamples, inflations: Inflations) -> dict[str, Any]:
    blocks: dict[str, Any] = {}
    for name, metric in CATALOGUE.items():
        if name in PER_REQUEST:
            blocks[f"{name}_s"] = metric_block(samples.values(name))
            if metric.adjusted:
                blocks[f"{name}_adjusted_s"] = metric_block(samples.adjusted(name))
        elif name in POOLED:
            reported, failed = samples.gaps[name].reported, samples.failed_gap_samples(name)
            blocks[f"{name}_s"] = pooled_block(reported, inflations=inflations[name])
            blocks[f"{name}_adjusted_s"] = pooled_block(reported, failed_samples=failed)
    return blocks
