"""What came of a capacity search, with each probe of the run judged again by every request of its stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import numpy as np

from vllm_locust.capacity.probe import ProbeResult, SloCount, count_slo
from vllm_locust.capacity.record import RecordedProbe, SearchRecord, search_of
from vllm_locust.capacity.search import Capacity, CapacitySearch, Status
from vllm_locust.load_profile import Quantity
from vllm_locust.outcome import Outcome
from vllm_locust.report.run_facts import RunFacts
from vllm_locust.report.stage_samples import POOLED, StageSamples
from vllm_locust.slo import Slo, SloKind, judge_stage
from vllm_locust.verdict.reason import THRESHOLDS, percent_text, time_text

Json = Mapping[str, Any]
UNCONNECTED: Final = (Outcome.CONNECT_ERROR, Outcome.TIMEOUT_CONNECT)
SLO_MISSED: Final = "slo_missed"
"""Key of the numbers: whether no load was found at which the SLOs are met."""


def capacity_numbers(
    content: Json, facts: RunFacts, stages: Sequence[Json], samples: Mapping[int, StageSamples]
) -> dict[str, Any]:
    """``content`` is ``capacity.json``."""
    record = SearchRecord.from_json(content)
    by_number = {stage["stage"]: stage for stage in stages}
    judged = [
        probe
        if probe.stage is None or probe.run_id != facts.run_id or probe.stage not in by_number
        else _by_every_request(probe, by_number[probe.stage], samples[probe.stage], facts)
        for probe in record.probes
    ]
    counted = [probe.result for probe in judged if probe.left_out is None]
    search = search_of(record.settings, judged)
    result = _explained(search, facts, record.ended)
    held = [probe.held for probe in counted]
    return {
        "settings": asdict(record.settings),
        "unit": "requests/s" if record.settings.quantity is Quantity.RATE else "users",
        **asdict(result),
        "ended": record.ended,
        "notes": [*record.notes, *result.notes, *_left_out(judged)],
        SLO_MISSED: result.status is Status.BELOW_MINIMUM or (False in held and True not in held),
        "probes": [
            probe.to_json()
            | {"held": probe.result.held, "overload": probe.result.overloaded or _overload(probe, facts, by_number)}
            for probe in judged
        ],
    }


def _overload(probe: RecordedProbe, facts: RunFacts, stages: Mapping[int, Json]) -> str | None:
    """Found by looking back at the whole stage: nothing that the result hangs on."""
    stage = stages.get(probe.stage) if probe.stage is not None and probe.run_id == facts.run_id else None
    return None if stage is None else stage["overload"]


def _explained(search: CapacitySearch, facts: RunFacts, given_up: str | None) -> Capacity:
    """The search ended when the histograms said so; every request may say a little less."""
    result = search.result(given_up)
    if facts.stopped_early is not None or given_up is not None or not search.probes or search.next_probe() is None:
        return result
    if result.low is None or result.high is None or result.load is None:
        return replace(result, why="Counted by every request, the probes do not decide what they seemed to.")
    width = percent_text((result.high - result.low) / result.load)
    return replace(result, why=f"The interval is {width} wide when every request is counted.")


def _left_out(probes: Sequence[RecordedProbe]) -> list[str]:
    return [f"The probe at {one.result.load:g} does not count: {one.left_out}." for one in probes if one.left_out]


def _by_every_request(probe: RecordedProbe, stage: Json, samples: StageSamples, facts: RunFacts) -> RecordedProbe:
    live = {slo.slo: slo for slo in probe.result.slos}
    missed = stage["requests"]["dropped_arrivals"] + stage["requests"]["lost_arrivals"]
    slos = tuple(_count(slo, stage, samples, missed, live) for slo in facts.slos if slo.kind is SloKind.STAGE)
    gpu, server = stage["gpu"], stage["server"]
    waiting = None if server is None else server["requests_waiting"]
    result = replace(
        probe.result,
        achieved=probe.result.load if stage["achieved_rps"] is None or stage["users"] else stage["achieved_rps"],
        requests=samples.attempted + missed,
        completed_rps=stage["requests_per_s"],
        latency_s=stage["e2e_s"]["p50"],
        slos=slos,
        figures={
            "output_tokens_per_s": stage["output_tokens_per_s"],
            "goodput_rps": stage["goodput_rps"],
            "in_flight": stage["in_flight"]["mean"],
            "requests_waiting": None if waiting is None else waiting["mean"],
            "gpu_utilization": None if gpu is None else gpu["mean"]["utilization"],
        },
    )
    return replace(probe, result=result, left_out=probe.left_out or _fault(stage, samples, result))


def _count(slo: Slo, stage: Json, samples: StageSamples, missed: int, live: Mapping[str, SloCount]) -> SloCount:
    """Gaps are counted as while the probe ran, by their order in time, which pooled samples do not have."""
    value = judge_stage(slo, stage).value
    if slo.metric in POOLED:
        return replace(live[slo.text], value=value)
    if slo.percentile is not None:
        beyond = samples.adjusted(slo.metric) > slo.limit
    elif slo.metric == "good_fraction":
        beyond = ~samples.flags["good"][samples.flags["decided"]]
    else:
        beyond = ~samples.flags["ok"]
    return count_slo(slo, np.concatenate((beyond, np.ones(missed, dtype=np.bool_))), value=value)


def _fault(stage: Json, samples: StageSamples, result: ProbeResult) -> str | None:
    """Why the stage was not the load that was asked for, by the verdict's own limits for a run that is invalid."""
    delivery, lag_ns, wait_ns = stage["delivery"], samples.generator_lag_p99_ns, samples.slot_wait_p99_ns
    lost, dropped = (stage["requests"][name] for name in ("lost_arrivals", "dropped_arrivals"))
    if lost:
        return f"{lost} of its arrivals are lost"
    # Once a queue was seen to grow at the server, full slots are what came of that.
    slots_matter = result.overloaded is None
    if dropped and slots_matter:
        return f"every slot was busy, and {dropped} arrivals were dropped; raise -u"
    if delivery is None or lag_ns is None or wait_ns is None:
        return None
    matters_ns, invalid_ns = THRESHOLDS.schedule_lag_p99_ns
    if lag_ns > invalid_ns:
        return f"its requests were sent up to {time_text(lag_ns)} (p99) after they were due; add workers"
    if wait_ns > invalid_ns and slots_matter:
        return f"every slot was busy, and requests waited up to {time_text(wait_ns)} (p99) for one; raise -u"
    full = wait_ns > matters_ns or dropped
    deviation = abs(delivery["sent"] - delivery["planned"])
    if delivery["sent"] < delivery["planned"]:
        # That the server took no connection is the server's doing.
        deviation = max(0, deviation - sum(stage["requests"]["failed_by_outcome"].get(name, 0) for name in UNCONNECTED))
    beyond_floor = deviation > THRESHOLDS.stage_deviation_floor
    if not full and beyond_floor and deviation > THRESHOLDS.stage_deviation[1] * delivery["planned"]:
        return f"{delivery['sent']} requests were sent where {delivery['planned']} were planned"
    return None
