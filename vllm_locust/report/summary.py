"""The numbers of a run, from its run directory: ``summary.json``, schema 1.

Reads ``requests.parquet`` twice in pieces: once for the numbers, once for the confidence of pooled percentiles (the
charts of ``report.html`` read it once more). Kept
in memory are about 500 bytes for each request of the window, 60 for each of any phase, and 8 for each chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from vllm_locust.capacity.search import Status
from vllm_locust.outcome import Outcome
from vllm_locust.report.blocks import pooled_block, seconds
from vllm_locust.report.capacity_numbers import SLO_MISSED, capacity_numbers
from vllm_locust.report.columns import Source
from vllm_locust.report.definition_card import definition_card
from vllm_locust.report.diagnosis_figures import diagnosis_json
from vllm_locust.report.evidence import delivered, evidence
from vllm_locust.report.reading import Reading
from vllm_locust.report.run_facts import RunFacts, Stage
from vllm_locust.report.stage_numbers import stage_numbers
from vllm_locust.report.stage_samples import StageSamples
from vllm_locust.report.telemetry_numbers import TelemetryNumbers
from vllm_locust.report.worker_health import read_worker_health
from vllm_locust.slo import SloKind, StageJudgement, judge_stage
from vllm_locust.statistics import ks_distance
from vllm_locust.verdict.evidence import Evidence, Shift
from vllm_locust.verdict.judge import exit_code, judge

SCHEMA: Final = 1
LengthReference = tuple[npt.NDArray[Any], npt.NDArray[Any]]


class Beside(TypedDict, total=False):
    """What there may be beside ``run.json`` and the requests."""

    workers: Source | None
    missed_arrivals: Source | None
    server: Source | None
    gpu: Source | None
    host: Source | None
    length_reference: LengthReference | None
    capacity_search: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Measured:
    """The numbers, and what was read for them."""

    summary: dict[str, Any]
    reading: Reading
    telemetry: TelemetryNumbers


def summarize(run: Mapping[str, Any], requests: Source, **beside: Unpack[Beside]) -> dict[str, Any]:
    """``summary.json``; see ``measure``."""
    return measure(run, requests, **beside).summary


def measure(
    run: Mapping[str, Any],
    requests: Source,
    *,
    workers: Source | None = None,
    missed_arrivals: Source | None = None,
    server: Source | None = None,
    gpu: Source | None = None,
    host: Source | None = None,
    length_reference: LengthReference | None = None,
    capacity_search: Mapping[str, Any] | None = None,
) -> Measured:
    """``run`` is ``run.json`` (see ``run_facts``); ``requests``, ``workers``, ``missed_arrivals``, of an open loop,
    ``server``, ``gpu`` and ``host`` are the parquet files or their batches.

    ``length_reference`` holds the prompt and the output lengths of the workload's source. ``capacity_search`` is
    ``capacity.json``, where the load was searched for.
    """
    facts = RunFacts.from_run(run)
    reading = Reading(facts)
    reading.read(requests, missed_arrivals)
    inflations = reading.gap_inflations(requests)
    health = read_worker_health(workers, facts.window, reading.schedule_lags_max_ns)
    telemetry = TelemetryNumbers.read(facts, health, server, gpu, host)
    stages = [
        {
            "stage": stage.index,
            "name": stage.name,
            "stage_kind": stage.kind,
            "users": stage.users,
            **stage_numbers(stage, samples, rates, inflations[id(samples)], reading.times, facts, telemetry),
        }
        for stage, samples, rates in zip(facts.stages, reading.stages.values(), reading.stage_rates(), strict=True)
    ]
    rates = reading.window_arrivals.rates(0)
    of_total = inflations[id(reading.total)]
    total = stage_numbers(_whole_window(facts), reading.total, rates, of_total, reading.times, facts, telemetry)
    if stages:
        total["offered_rps"] = _offered_rps(stages, total)
    shifts = reading.total.shifts()
    slo = _slo_json(facts, stages)
    capacity = None if capacity_search is None else capacity_numbers(capacity_search, facts, stages, reading.stages)
    asked = _Asked(facts, slo, stages) if capacity is None else _of_a_search(capacity, facts, slo, stages)
    load = delivered(reading.total, total["planned_arrivals"]) if asked.stages is stages else _of_stages(asked, reading)
    found = evidence(asked.facts, reading, health, shifts, total, asked.slo, telemetry, asked.stages, load)
    verdict = judge(found if capacity is None else _evidence_of_a_search(found, capacity, reading))
    cold_start = reading.cold_start.as_json(total["in_flight"]["max"], total["ttft_s"]["p50"])
    summary = {
        "schema": SCHEMA,
        "run_id": facts.run_id,
        "run_name": run.get("run_name"),
        "tags": dict(run.get("tags") or {}),
        "verdict": verdict.as_json(),
        "exit_code": exit_code(verdict, asked.slo["missed"]),
        "capacity": capacity,
        "slo": slo,
        "totals": {"all_phases": reading.everything.as_json(), **total},
        "stages": stages,
        "over_time": reading.over_time.as_json(reading.times),
        "cold_start": cold_start,
        "diagnosis": diagnosis_json(stages, reading, cold_start, health, verdict),
        "arrivals": facts.arrivals,
        "errors": reading.everything.errors_json(),
        "workload": _workload_json(run, reading.total, length_reference),
        "coalesced": _coalesced_json(reading, shifts),
        "health": health.as_json(),
        "definition_card": definition_card(reading.total),
    }
    return Measured(summary, reading, telemetry)


class _Asked(NamedTuple):
    """What the verdict holds the run against."""

    facts: RunFacts
    slo: Mapping[str, Any]
    stages: Sequence[Mapping[str, Any]]


def _of_a_search(
    capacity: Mapping[str, Any], facts: RunFacts, slo: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]
) -> _Asked:
    """Probes beyond the capacity miss their SLOs: that is what they are for. Those that do not count, since the
    generator was late, are named with the result; where none counts, all are held against the run.
    """
    left_out = {probe["stage"] for probe in capacity["probes"] if probe["left_out"]}
    counted = [stage for stage in stages if stage["stage"] not in left_out]
    return _Asked(
        facts,
        {**slo, "missed": capacity[SLO_MISSED], "per_stage": (), "stages": ()},
        counted if left_out and counted else stages,
    )


def _evidence_of_a_search(found: Evidence, capacity: Mapping[str, Any], reading: Reading) -> Evidence:
    """Requests beyond the capacity may fail. Once a load has held, only those count that reached no server at all, be
    it before a window, within it or after it.
    """
    judged = [probe["held"] for probe in capacity["probes"] if not probe["left_out"]]
    unknown = capacity["status"] == Status.UNKNOWN and set(judged) <= {None}
    found = replace(
        found,
        capacity_unknown=capacity["why"] if unknown else None,
        search_given_up=None if unknown else capacity["ended"],
    )
    if True not in judged:
        return found
    requests = reading.everything.requests
    return replace(found, attempted=requests.total(), failed=requests[Outcome.CONNECT_ERROR], unfinished=0)


def _of_stages(asked: _Asked, reading: Reading) -> dict[str, Any]:
    planned = [stage["planned_arrivals"] for stage in asked.stages if stage["planned_arrivals"] is not None]
    samples = StageSamples.union([reading.stages[stage["stage"]] for stage in asked.stages])
    return delivered(samples, sum(planned) if planned else None)


def _whole_window(facts: RunFacts) -> Stage:
    return Stage(
        index=0,
        name="window",
        kind="window",
        interval=facts.window,
        dropped_arrivals=sum(stage.dropped_arrivals for stage in facts.stages),
        lost_arrivals=sum(stage.lost_arrivals for stage in facts.stages),
    )


def _offered_rps(stages: Sequence[Mapping[str, Any]], total: Mapping[str, Any]) -> float | None:
    """Over the window, what its stages asked for; None where one of them did not say, as in a closed loop."""
    rates = [stage["offered_rps"] for stage in stages]
    if None in rates or not total["length_s"]:
        return None
    return float(sum(stage["offered_rps"] * stage["length_s"] for stage in stages) / total["length_s"])


def _slo_json(facts: RunFacts, stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    judged = [
        (stage, judge_stage(slo, stage))
        for slo in facts.slos
        if slo.kind is SloKind.STAGE
        for stage in stages
        if stage["stage_kind"] == "hold"
    ]
    return {
        "per_request": [slo.text for slo in facts.slos if slo.kind is SloKind.REQUEST],
        "per_stage": [slo.text for slo in facts.slos if slo.kind is SloKind.STAGE],
        "missed": any(judgement.met is False for _, judgement in judged),
        "stages": [_judgement_json(stage, judgement) for stage, judgement in judged],
    }


def _judgement_json(stage: Mapping[str, Any], judgement: StageJudgement) -> dict[str, Any]:
    slo = judgement.slo
    return {
        "slo": slo.text,
        "stage": stage["stage"],
        "stage_name": stage["name"],
        "met": judgement.met,
        "value": judgement.value,
        "limit": slo.limit / 1e9 if slo.is_duration else slo.limit,
    }


def _workload_json(run: Mapping[str, Any], samples: StageSamples, reference: LengthReference | None) -> dict[str, Any]:
    """How far the lengths really sent are from the source's; null where either side has none, and of answers whose
    length ``--max-tokens`` decides in place of the source.
    """
    workload, output_limit = run.get("workload") or {}, run["config"].get("max_tokens")
    ok = samples.flags["ok"]
    counts = {name: samples.floats[name] for name in ("prompt_tokens", "prompt_tokens_planned", "output_tokens")}
    known = {name: values[~np.isnan(values) & (ok | (name != "output_tokens"))] for name, values in counts.items()}
    result: dict[str, Any] = {
        "name": workload.get("name"),
        "token_count_method": workload.get("token_count_method"),
        "warnings": list(workload.get("warnings") or ()),
        "filters": dict(workload.get("filters") or {}),
        "reference_n": None if reference is None else len(reference[0]),
        "output_limit": output_limit,
    }
    for name, values in known.items():
        is_output = name == "output_tokens"
        source = None if reference is None or (is_output and output_limit) else reference[is_output]
        result[name] = {
            "n": len(values),
            "mean": float(values.mean()) if len(values) else None,
            "source_mean": None if source is None or not len(source) else float(np.mean(source)),
            "ks_distance": None
            if source is None or not len(source) or not len(values)
            else ks_distance(values, source),
        }
    return result


def _coalesced_json(reading: Reading, shifts: Sequence[Shift]) -> dict[str, Any]:
    gaps = reading.total.gaps["chunk_gap"]
    return {
        "gaps": gaps.n,
        "gaps_touched": gaps.touched.n,
        "share_of_gaps": gaps.touched_share,
        "width_s": pooled_block(reading.total.widths),
        "shifts": [
            {
                "metric": shift.metric,
                "percentile": shift.percentile,
                "reported_s": seconds(shift.reported_ns),
                "lowest_s": seconds(shift.lowest_ns),
                "highest_s": seconds(shift.highest_ns),
            }
            for shift in shifts
        ],
    }
