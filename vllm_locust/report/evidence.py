"""What the verdict looks at, gathered from a run's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_locust.outcome import Outcome
from vllm_locust.report.reading import Reading
from vllm_locust.report.run_facts import RunFacts
from vllm_locust.report.stage_samples import StageSamples
from vllm_locust.report.telemetry_numbers import TelemetryNumbers
from vllm_locust.report.worker_health import WorkerHealth
from vllm_locust.verdict.evidence import Delivery, Evidence, Shift
from vllm_locust.verdict.reason import THRESHOLDS


def evidence(
    facts: RunFacts,
    reading: Reading,
    health: WorkerHealth,
    shifts: Sequence[Shift],
    total: Mapping[str, Any],
    slo: Mapping[str, Any],
    telemetry: TelemetryNumbers,
    stages: Sequence[Mapping[str, Any]],
    delivered: Mapping[str, Any],
) -> Evidence:
    """``stages`` are those whose load is judged, and ``delivered`` says how late it was in all of them."""
    everything, requests = reading.everything, total["requests"]
    judged = reading.total.outcomes if requests["attempted"] else everything.requests
    stamped = everything.stamp_sources.total()
    return Evidence(
        window_requests=requests["attempted"],
        window_ok=requests["ok"],
        attempted=judged.total(),
        failed=judged.total() - judged[Outcome.OK],
        unfinished=judged[Outcome.CENSORED],
        max_failures=facts.max_failures,
        records_lost=facts.records_lost,
        batches_lost=facts.batches_lost,
        spooled_batches=facts.spooled_batches,
        spools=facts.spools,
        unstorable_values=facts.unstorable_values,
        workers_expected=facts.workers_expected,
        workers_missing=facts.workers_missing,
        shifts=shifts,
        coalesced_share=reading.total.gaps["chunk_gap"].touched_share,
        **delivered,
        deliveries=tuple(_delivery(stage) for stage in stages if stage["delivery"] is not None),
        arrivals_dropped=requests["dropped_arrivals"],
        **_arrivals(facts.arrivals),
        receive_lag_p99_ns=health.receive_lag_p99_ns,
        user_stamp_share=everything.stamp_sources["user"] / stamped if stamped else 0.0,
        loop_lag_p99_ns=health.loop_lag_p99_ns,
        health_samples=health.samples,
        cpu_fraction_p95=health.cpu_fraction_p95,
        cpu_worker=health.cpu_worker,
        run_delay_share=health.run_delay_share,
        gc_pause_max_ns=health.gc_pause_max_ns,
        clock_step_max_ns=facts.clock_step_max_ns,
        clock_uncertainty_max_ns=facts.clock_uncertainty_max_ns,
        telemetry_silence=_silence(facts, telemetry),
        stopped_early=facts.stopped_early,
        token_sources=tuple(everything.token_sources),
        slos_undecided=_undecided(slo),
    )


def delivered(samples: StageSamples, planned: int | None) -> dict[str, Any]:
    """How much of ``planned`` arrivals was sent in time, which is not late enough to make a run invalid."""
    in_time = samples.floats["schedule_lag"][samples.flags["scheduled"]] <= THRESHOLDS.schedule_lag_p99_ns[1]
    return {
        "generator_lag_p99_ns": samples.generator_lag_p99_ns,
        "slot_wait_p99_ns": samples.slot_wait_p99_ns,
        "planned_arrivals": planned,
        "sent_in_time": None if planned is None else int(in_time.sum()),
    }


def _delivery(stage: Mapping[str, Any]) -> Delivery:
    delivery = stage["delivery"]
    return Delivery(
        stage=stage["name"],
        is_hold=stage["stage_kind"] == "hold",
        planned=delivery["planned"],
        sent=delivery["sent"],
        planned_gap_cv=delivery["planned_gap_cv"],
        sent_gap_cv=delivery["sent_gap_cv"],
    )


def _arrivals(arrivals: Mapping[str, int | None] | None) -> dict[str, Any]:
    if arrivals is None:
        return {}
    return {f"arrivals_{name}": arrivals[name] for name in ("lost", "doubled", "misplaced")}


def _silence(facts: RunFacts, telemetry: TelemetryNumbers) -> dict[str, float]:
    window = facts.window
    if window is None:
        return {}
    of_servers = {
        f"the metrics of {target}": telemetry.servers.silence(target, window) for target in facts.metrics_targets
    }
    return of_servers | telemetry.gpus.silence(facts.gpus_watched, window)


def _undecided(slo: Mapping[str, Any]) -> tuple[str, ...]:
    """Per-stage SLOs without a value in some stage, or without a stage that they could be judged in."""
    met: dict[str, list[bool | None]] = {text: [] for text in slo["per_stage"]}
    for judgement in slo["stages"]:
        met[judgement["slo"]].append(judgement["met"])
    return tuple(text for text, judgements in met.items() if not judgements or None in judgements)
