"""Judgement on what the GPUs of a host tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_locust.checkup.check import Check, ok, warning


@dataclass(frozen=True, slots=True)
class GpuFacts:
    driver: str
    gpm: Mapping[str, bool]
    """For each GPU whether it tells SM, tensor-core and DRAM activity."""
    remarks: tuple[str, ...]
    """What a GPU does not tell, and why."""


def judge_gpus(facts: GpuFacts) -> Check:
    without = [gpu for gpu, supported in facts.gpm.items() if not supported]
    parts = [f"driver {facts.driver}", *facts.gpm]
    parts.append(
        "GPM (SM, tensor-core and DRAM activity) on " + (f"{len(facts.gpm) - len(without)} of {len(facts.gpm)}")
    )
    found = "; ".join((*parts, *facts.remarks))
    figures = {"driver": facts.driver, "gpm": dict(facts.gpm), "remarks": list(facts.remarks)}
    if without:
        fix = "before Hopper, or without the rights: read a DCGM exporter (--dcgm-url) for activity beyond utilization"
        return warning("GPUs", found, fix, **figures)
    return ok("GPUs", found, **figures)
