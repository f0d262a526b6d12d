"""The settings and the headline figures of a run as flat names and values, for a table with a line for each run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from vllm_locust.comparison.quantity import DISTRIBUTIONS, SCALARS

Json = Mapping[str, Any]
Figures = dict[str, float | None]

STATISTICS: Final = ("mean", "p50", "p90", "p99")
_RATES: Final = ("offered_rps", "achieved_rps", "input_tokens_per_s")


def settings(run: Json, summary: Json) -> dict[str, Any]:
    """``run.json`` and ``summary.json``. None where a setting was not given; no secrets, since neither has any."""
    config, server = run["config"], run["server"]
    verdict = summary["verdict"]
    return {
        "run_id": run["run_id"],
        "run_name": run["run_name"],
        "started": datetime.fromtimestamp(run["started_unix_ns"] / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "verdict": verdict["status"],
        "reasons": " ".join(reason["code"] for reason in verdict["reasons"]) or None,
        "exit_code": summary["exit_code"],
        "tags": json.dumps(run["tags"], ensure_ascii=False, sort_keys=True) if run["tags"] else None,
        "model": server["model"],
        "server_version": server["version"],
        "targets": len(config["targets"]),
        "gpus": len((run.get("telemetry") or {}).get("gpus") or ()) or None,
        "api": config["api"],
        "stream": config["stream"],
        "workload": run["workload"]["name"],
        "workload_fingerprint": run["workload"]["fingerprint"],
        "max_tokens": config["max_tokens"],
        "load": _load(run),
        "users": run.get("users"),
        "arrival": config["arrival"] if run.get("schedule") else None,
        "seed": config["seed"],
        "transport": config["transport"],
        "token_source": " ".join(sorted(summary["totals"]["all_phases"]["token_sources"])) or None,
        "slos": " ".join(config["slos"]) or None,
        "window_s": summary["totals"]["length_s"],
        "vllm_locust": run["versions"]["vllm_locust"],
    }


def _load(run: Json) -> str | None:
    return " ".join(stage["name"] for stage in run["stages"]) or None


def figures(stage: Json) -> Figures:
    """Of a stage or of the totals of ``summary.json``; seconds, None where unknown."""
    found: Figures = {"requests": stage["requests"]["attempted"], "failed": stage["requests"]["failed"]}
    found |= {name: stage[name] for name in (*_RATES, *SCALARS)}
    for metric in DISTRIBUTIONS:
        found |= {f"{metric}_{name}_s": stage[f"{metric}_s"][name] for name in STATISTICS}
    gpu, server = stage["gpu"], stage["server"]
    found["gpu_utilization"] = None if gpu is None else gpu["mean"]["utilization"]
    found["energy_per_output_token_j"] = None if gpu is None else gpu["energy_per_output_token_j"]
    cache = None if server is None else server["kv_cache_usage"]
    found["kv_cache_usage_max"] = None if cache is None else cache["max"]
    return found


def few_samples(stage: Json) -> list[tuple[str, str]]:
    """Metric and statistic of the percentiles that too few samples lie beyond: the report marks them with ``?``."""
    return [
        (metric, name)
        for metric in DISTRIBUTIONS
        for name in STATISTICS
        if name in stage[f"{metric}_s"]["few_samples"] and stage[f"{metric}_s"][name] is not None
    ]


def few_samples_text(stage: Json) -> str | None:
    return " ".join(f"{metric}_{name}_s" for metric, name in few_samples(stage)) or None


def experiment(run: Json, summary: Json) -> dict[str, Any]:
    """The line of ``experiments.csv``: the figures are of the whole window; the capacity where it was searched for."""
    capacity = summary["capacity"]
    return {
        **settings(run, summary),
        **figures(summary["totals"]),
        "few_samples": few_samples_text(summary["totals"]),
        "capacity": None if capacity is None else capacity["load"],
        "capacity_unit": None if capacity is None else capacity["unit"],
    }
