"""What the servers told of themselves, stage beside stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from vllm_locust.report import figures

Json = Mapping[str, Any]


def has_server(stages: Sequence[Json]) -> bool:
    return any(stage["server"] is not None for stage in stages)


def _row(show: Callable[[Json], str]) -> Callable[[Json], str]:
    return lambda stage: figures.UNKNOWN if stage["server"] is None else show(stage["server"])


def _mean_and_max(block: Json | None) -> str:
    return figures.UNKNOWN if block is None else f"{figures.rate(block['mean'])} ({figures.rate(block['max'])})"


def _first_and_last(block: Json | None) -> str:
    if block is None:
        return figures.UNKNOWN
    return f"{figures.rate(block['first'])} → {figures.rate(block['last'])}"


def _share(block: Json | None) -> str:
    return figures.UNKNOWN if block is None else figures.share(block["max"])


SERVER_ROWS: Final[tuple[tuple[str, Callable[[Json], str]], ...]] = (
    ("running, mean (max)", _row(lambda s: _mean_and_max(s["requests_running"]))),
    ("waiting, mean (max)", _row(lambda s: _mean_and_max(s["requests_waiting"]))),
    ("waiting, first → last", _row(lambda s: _first_and_last(s["requests_waiting"]))),
    ("KV cache, fullest", _row(lambda s: _share(s["kv_cache_usage"]))),
    ("prompt tokens/s", _row(lambda s: figures.rate(s["prompt_tokens_per_s"]))),
    ("generation tokens/s", _row(lambda s: figures.rate(s["generation_tokens_per_s"]))),
    ("prefix-cache hits", _row(lambda s: figures.share(s["prefix_cache_hit_rate"]))),
    ("preemptions", _row(lambda s: figures.rate(s["preemptions"]))),
    ("TTFT there, mean", _row(lambda s: figures.time(s["ttft_s"]["mean"]))),
    ("  queue", _row(lambda s: figures.time(s["ttft_s"]["queue"]))),
    ("  prefill", _row(lambda s: figures.time(s["ttft_s"]["prefill"]))),
    ("  front end", _row(lambda s: figures.time(s["ttft_s"]["front_end"]))),
    ("network, beyond it", _row(lambda s: figures.time(s["ttft_s"]["network"]))),
)
"""Label and value. ``network`` is what the client's own mean is more than the server's."""


def server_remarks(stages: Sequence[Json]) -> Iterator[str]:
    for stage in stages:
        server = stage["server"]
        if server is None:
            continue
        name = f"stage {stage['name']}" if len(stages) > 1 else "the window"
        waiting = server["requests_waiting"]
        if waiting is not None and waiting["grows"]:
            first, last = figures.rate(waiting["first"]), figures.rate(waiting["last"])
            yield f"{name}: the server's queue grew from {first} to {last} waiting requests"
        if server["restarts"]:
            times = "once" if server["restarts"] == 1 else f"{server['restarts']} times"
            yield f"{name}: a server was started anew {times}"
        if server["pages_failed"]:
            yield (
                f"{name}: {server['pages_failed']} of {server['pages_failed'] + server['pages_read']} attempts to read "
                "a server's metrics failed"
            )
