"""The capacity that was searched for, in words and as a table of probes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from vllm_locust.report import figures

Json = Mapping[str, Any]
_SHOWN_SLOS: Final = 3
_HELD: Final = {True: "met", False: "MISSED", None: figures.UNKNOWN}
Column = tuple[str, int, Callable[[Json], str]]


def capacity_sentences(capacity: Json) -> list[str]:
    """The result first."""
    return [_result(capacity), *_details(capacity), *capacity["notes"]]


def _result(capacity: Json) -> str:
    unit, low, load, high = (capacity[name] for name in ("unit", "low", "load", "high"))
    if unit == "users":
        # The search knows a place between two whole numbers.
        low, load, high = (None if value is None else math.floor(value) for value in (low, load, high))
    if load is not None and low is not None and high is not None:
        limiting = f", limited by {capacity['limiting_slo']}" if capacity["limiting_slo"] else ""
        return (
            f"{_load(load)} {unit} within the SLOs (95 % interval {_load(low)} to {_load(high)}){limiting}. "
            f"{capacity['why']}"
        )
    if low is not None:
        return f"At least {_load(low)} {unit}. {capacity['why']}"
    if high is not None:
        return f"Less than {_load(high)} {unit}. {capacity['why']}"
    return f"Not known. {capacity['why']}"


def _load(load: float) -> str:
    return figures.count(round(load)) if load >= 1000 else f"{load:.4g}"


def _details(capacity: Json) -> Iterator[str]:
    unit, knee = capacity["unit"], capacity["knee"]
    if capacity["operating_load"] is not None:
        yield f"Recommended: {_load(capacity['operating_load'])} {unit}: {capacity['operating_why']}."
    if knee is not None:
        yield (
            f"Knee of the throughput-latency curve: {_load(knee['load'])} {unit} (between {_load(knee['after'])} and "
            f"{_load(knee['before'])}), where E2E was {figures.time(knee['latency_s'])} (p50)."
        )


def probe_columns(capacity: Json) -> list[Column]:
    """Heading, width and value."""
    slos = [slo["slo"] for slo in capacity["probes"][0]["slos"][:_SHOWN_SLOS]] if capacity["probes"] else []
    columns: list[Column] = [
        ("load", 7, lambda probe: _load(probe["load"])),
        ("window", 7, lambda probe: figures.time(probe["window_s"])),
        ("done/s", 7, lambda probe: figures.rate(probe["completed_rps"])),
        ("tokens/s", 8, _figure("output_tokens_per_s", figures.rate)),
        *(_slo_column(index, text) for index, text in enumerate(slos)),
        ("good/s", 6, _figure("goodput_rps", figures.rate)),
        ("in flight", 9, _figure("in_flight", figures.rate)),
        ("waiting", 7, _figure("requests_waiting", figures.rate)),
        ("GPU", 6, _figure("gpu_utilization", figures.share)),
        ("SLO", 7, lambda probe: "left out" if probe["left_out"] else _HELD[probe["held"]]),
        ("over", 4, lambda probe: "YES" if probe["overload"] else "no"),
    ]
    unknown = ("good/s", "waiting", "GPU")
    return [
        column
        for column in columns
        if column[0] not in unknown or any(column[2](probe) != figures.UNKNOWN for probe in capacity["probes"])
    ]


def _figure(name: str, show: Callable[[float | None], str]) -> Callable[[Json], str]:
    return lambda probe: show(probe["figures"].get(name))


def _slo_column(index: int, text: str) -> Column:
    heading = text.partition("<")[0].partition(">")[0].strip()

    def show(probe: Json) -> str:
        slo = probe["slos"][index]
        if slo["value"] is None:
            return figures.BEYOND if sum(slo["samples"]) else figures.UNKNOWN
        return figures.time(slo["value"]) if "(" in text else figures.share(slo["value"])

    return heading, max(9, len(heading)), show


def probe_lines(capacity: Json) -> list[str]:
    probes: Sequence[Json] = capacity["probes"]
    if not probes:
        return []
    columns = probe_columns(capacity)
    heading = "  probe" + "".join(f" {name:>{width}}" for name, width, _ in columns)
    rows = (
        f"  {number:>5}" + "".join(f" {show(probe):>{width}}" for _, width, show in columns)
        for number, probe in enumerate(probes, start=1)
    )
    return [heading, *(row.rstrip() for row in rows)]


def overloads(capacity: Json) -> list[str]:
    return [
        f"probe {number} {'was ended early' if probe['ended_early'] else 'was overloaded'}: {probe['overload']}"
        for number, probe in enumerate(capacity["probes"], start=1)
        if probe["overload"]
    ]


def told_stages(capacity: Json | None, stages: Sequence[Json]) -> tuple[Sequence[Json], str | None]:
    """The stages that the page tells in full, and why only those: of a search the probes on both sides of the capacity,
    since the table of probes has the rest.
    """
    if capacity is None or len(stages) <= 2:
        return stages, None
    mine = [(number, probe) for number, probe in enumerate(capacity["probes"], start=1) if probe["stage"] is not None]
    held = [one for one in mine if not one[1]["left_out"] and one[1]["held"] is True]
    missed = [one for one in mine if not one[1]["left_out"] and one[1]["held"] is False]
    sides = [
        (max(held, key=lambda one: float(one[1]["load"]), default=None), "the highest load that met the SLOs"),
        (min(missed, key=lambda one: float(one[1]["load"]), default=None), "the lowest that did not"),
    ]
    known = [(*one, why) for one, why in sides if one is not None] or [(*mine[-1], "the last")]
    numbers = {probe["stage"] for _, probe, _ in known}
    words = ", and ".join(f"probe {number}, {why}" for number, _, why in known)
    return [stage for stage in stages if stage["stage"] in numbers], f"below: {words}; summary.json has them all"
