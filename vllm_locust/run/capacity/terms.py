"""What must be the same for the probes of one search to count in another, and the probes of an earlier one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_locust.capacity.record import RecordedProbe, SearchRecord, differences, judged_probes, search_of
from vllm_locust.capacity_options import CapacityOrder
from vllm_locust.config import RunConfig
from vllm_locust.errors import StoreError, UsageError
from vllm_locust.load.preflight import ServerFacts
from vllm_locust.store.rundir import RunDirectory, read_json
from vllm_locust.workload.workload import Workload


def terms_of(order: CapacityOrder, config: RunConfig, server: ServerFacts, workload: Workload) -> dict[str, Any]:
    return {
        "quantity": str(order.settings.quantity),
        "model": server.model,
        "slos": sorted(config.slos),
        "workload": workload.fingerprint,
        "arrival": {"process": str(config.arrival), "burstiness": config.burstiness},
        "answers": {
            "api": str(config.api),
            "stream": config.stream,
            "max_tokens": config.max_tokens,
            "force_length": config.force_length,
            "extra_body": dict(config.extra_body),
        },
    }


def check_search(
    order: CapacityOrder, config: RunConfig, server: ServerFacts, workload: Workload
) -> tuple[RecordedProbe, ...]:
    """The probes of the search that is gone on with. Raises UsageError where none can be made, or those do not fit."""
    if workload.replays_times:
        raise UsageError(
            f"--capacity: the workload {workload.name} is a trace, whose prompts are used up after one pass; give one "
            "without recorded times"
        )
    if order.resume is None:
        return ()
    probes = _earlier_probes(order.resume, terms_of(order, config, server, workload))
    search = search_of(order.settings, probes)
    if search.next_probe() is None:
        raise UsageError(
            f"--resume {order.resume}: that search is over ({search.result().why.rstrip('.')}); read its report, or "
            "give a larger --budget or --max-probes, or a smaller --precision"
        )
    return probes


def _earlier_probes(directory: str, terms: dict[str, Any]) -> tuple[RecordedProbe, ...]:
    path = RunDirectory(Path(directory)).capacity_json
    if not path.is_file():
        raise UsageError(f"--resume {directory}: there is no capacity.json; give the directory of a capacity search")
    try:
        content = read_json(path)
        record = SearchRecord.from_json(content)
        probes = judged_probes(content) or record.probes
        problems = differences(record.terms, terms)
    except (StoreError, ValueError) as error:
        raise UsageError(f"--resume {directory}: {path} cannot be used: {error}") from None
    if problems:
        raise UsageError(*(f"--resume {directory}: another search, by {problem}" for problem in problems))
    return tuple(
        RecordedProbe(run_id=probe.run_id, stage=None, result=probe.result)
        for probe in probes
        if probe.left_out is None
    )
