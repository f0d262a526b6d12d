"""The few figures that stand first on the page of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_locust.report import figures

Json = Mapping[str, Any]


def headline(summary: Json) -> list[tuple[str, str, str]]:
    """Name, value and a remark, over the whole window. Latencies only of a single load: no percentile of several is one
    that anybody could meet.
    """
    total = summary["totals"]
    requests = total["requests"]
    not_ok = requests["attempted"] - requests["ok"]
    shown = [
        ("requests", figures.count(requests["attempted"]), f"in {figures.time(total['length_s'])}"),
        ("requests/s", figures.rate(total["requests_per_s"]), _offered(total)),
        ("output tokens/s", figures.rate(total["output_tokens_per_s"]), ""),
        ("not ok", figures.share(total["failed_fraction"]), f"{figures.count(not_ok)} requests"),
    ]
    if len(summary["stages"]) == 1:
        first, title = ("ttft", "TTFT")
        if total["ttft_from_schedule_s"]["n"]:
            first, title = ("ttft_from_schedule", "TTFT from schedule")
        shown += [_latency(title, total[f"{first}_s"], name) for name in ("p50", "p99")]
        shown += [_latency("TPOT", total["tpot_s"], "p50"), _latency("E2E", total["e2e_s"], "p99")]
    if total["goodput_rps"] is not None:
        shown.append(
            (
                "goodput/s",
                figures.rate(total["goodput_rps"]),
                f"{figures.share(total['good_fraction'])} good of those due",
            )
        )
    return shown


def _offered(total: Json) -> str:
    """Goodput beside it counts by when a request was due; this rate by when its last token came."""
    offered = "" if total["offered_rps"] is None else f"; {figures.rate(total['offered_rps'])}/s offered"
    return f"ended in the window{offered}"


def _latency(title: str, block: Json, name: str) -> tuple[str, str, str]:
    return f"{title} {name}", figures.percentile(block, name), ""
