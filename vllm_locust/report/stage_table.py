"""Stages beneath each other in one table, and in words what was not in order with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from vllm_locust.report import figures

Json = Mapping[str, Any]

_NAME_WIDTH: Final = 13
_LONGEST_NAME: Final = 40
_WORDS: Final = {True: "yes", False: "NO", None: figures.UNKNOWN}
_OVERLOADED: Final = {True: "YES", False: "no", None: figures.UNKNOWN}


def ttft_block(stage: Json) -> Json:
    """From the schedule where there is one: it holds the wait for a free slot, which the time from sent does not."""
    block: Json = stage["ttft_from_schedule_s"]
    return block if block["n"] else stage["ttft_s"]


def is_open_loop(stage: Json) -> bool:
    return stage["delivery"] is not None


COLUMNS: Final[tuple[tuple[str, int, Callable[[Json], str]], ...]] = (
    ("offered", 7, lambda s: figures.rate(s["offered_rps"])),
    ("sent/s", 6, lambda s: figures.rate(s["achieved_rps"])),
    ("done/s", 6, lambda s: figures.rate(s["requests_per_s"])),
    ("tokens/s", 8, lambda s: figures.rate(s["output_tokens_per_s"])),
    ("TTFT p50", 8, lambda s: figures.percentile(ttft_block(s), "p50")),
    ("TTFT p99", 8, lambda s: figures.percentile(ttft_block(s), "p99")),
    ("TPOT p50", 8, lambda s: figures.percentile(s["tpot_s"], "p50")),
    ("good/s", 6, lambda s: figures.rate(s["goodput_rps"])),
    ("in flight", 9, lambda s: figures.rate(s["in_flight"]["mean"])),
    ("steady", 6, lambda s: _WORDS[s["steady"]]),
    ("over", 4, lambda s: _OVERLOADED[s["overloaded"]]),
)
"""Heading, width and value. Rates are per second; ``over`` is short for overloaded."""


def stage_title(stage: Json) -> str:
    """Its name, with the number of users where the name does not tell it: that of a ramp of users does."""
    name, users = str(stage["name"]), stage["users"]
    title = name if users is None or name.partition(" #")[0].endswith(" users") else f"{name} {users}u"
    return title if len(title) <= _LONGEST_NAME else f"{title[: _LONGEST_NAME - 1]}…"


def stage_lines(stages: Sequence[Json], name_of: Callable[[Json], str]) -> list[str]:
    """One line a stage; nothing where there is only one."""
    if len(stages) < 2:
        return []
    names = [f"  {name_of(stage)}" for stage in stages]
    name_width = max(_NAME_WIDTH, *map(len, names))
    heading = f"{'STAGES':<{name_width}}" + "".join(f" {name:>{width}}" for name, width, _ in COLUMNS)
    rows = (
        f"{name:<{name_width}}" + "".join(f" {show(stage):>{width}}" for _, width, show in COLUMNS)
        for name, stage in zip(names, stages, strict=True)
    )
    return [heading, *(row.rstrip() for row in rows)]


def remarks(summary: Json) -> Iterator[str]:
    """Sentences on stages that were no steady state, on a queue that one of two TTFTs hides, and on requests that were
    tried again.
    """
    stages = summary["stages"]
    for stage in stages:
        name = f"stage {stage['name']}" if len(stages) > 1 else "the window"
        if stage["overloaded"]:
            yield f"{name} is overloaded: {stage['overload']}"
        elif stage["steady"] is False:
            yield f"{name} is no steady state: {' and '.join(_trends(stage['trend']))}"
        queue = _queue(stage)
        if queue is not None:
            yield f"{name}: {queue}"
    if len(stages) > 1 and any(map(is_open_loop, stages)):
        yield "TTFT in the table of stages counts from the schedule"
    retried = summary["totals"]["all_phases"]["retried"]
    if retried:
        noun = "request" if retried == 1 else "requests"
        yield (
            f"{figures.count(retried)} {noun} needed more than one attempt: TTFT and E2E count from the first and "
            "hold the waits between them"
        )


def _trends(trend: Json) -> Iterator[str]:
    in_system, latency = trend["in_system"], trend["latency_s"]
    if in_system["matters"]:
        yield (
            f"requests in flight or waiting {_direction(in_system)} by {figures.rate(abs(in_system['change']))} "
            f"around {figures.rate(in_system['mean'])}"
        )
    if latency is not None and latency["matters"]:
        yield (
            f"the time to the first token {_direction(latency)} by {figures.time(abs(latency['change']))} "
            f"around {figures.time(latency['mean'])}"
        )


def _direction(trend: Json) -> str:
    return "rose" if trend["change"] > 0 else "fell"


def _queue(stage: Json) -> str | None:
    """What a TTFT from sent leaves out, where it is more than half as much again."""
    from_sent, from_schedule, lag = (
        stage[f"{name}_s"]["p99"] for name in ("ttft", "ttft_from_schedule", "schedule_lag")
    )
    if from_sent is None or from_schedule is None or lag is None or from_schedule <= 1.5 * from_sent:
        return None
    return (
        f"requests waited up to {figures.time(lag)} (p99) before they were sent; TTFT from schedule "
        f"({figures.time(from_schedule)}) has that wait in it, TTFT ({figures.time(from_sent)}) has not"
    )
