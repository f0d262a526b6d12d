"""``report.html``: one file that stands alone, with no script and nothing to fetch. Text from outside is escaped."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Any, Final

import jinja2

from vllm_locust.metrics import CATALOGUE, DISTRIBUTIONS
from vllm_locust.report import figures
from vllm_locust.report.capacity_text import capacity_sentences, overloads, probe_columns
from vllm_locust.report.diagnosis_text import not_judged, nothing_found, where
from vllm_locust.report.gpu_table import GPU_ROWS, has_gpu
from vllm_locust.report.server_table import SERVER_ROWS, has_server
from vllm_locust.report.stage_table import ttft_block
from vllm_locust.report.text import COLUMNS, all_remarks, printable, verdict_line

_TEMPLATE: Final = "report.html.j2"
_FIRST: Final = {name: place for place, name in enumerate(("ttft", "ttft_from_schedule", "schedule_lag"))}
"""Side by side: a queue before the server shows in the second and the third, and not in the first."""
_CARD_COLUMNS: Final = ("mean_s", "p50_s", "p90_s", "p99_s")


def render_html(summary: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """``run`` is ``run.json``: its configuration, versions, hosts and command are shown as they are."""
    source = resources.files("vllm_locust.report").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "time": figures.time,
        "rate": figures.rate,
        "share": figures.share,
        "count": figures.count,
        "plain": figures.plain,
        "size": figures.size,
        "date": _date,
        "json": _pretty,
        "printable": printable,
    }
    environment.globals["percentile"] = figures.percentile
    return environment.from_string(source).render(
        summary=summary,
        run=run,
        command=_command(run.get("command")),
        verdict_line=verdict_line(summary),
        columns=COLUMNS,
        card_columns=_CARD_COLUMNS,
        distributions=sorted(DISTRIBUTIONS, key=lambda metric: _FIRST.get(metric.name, len(_FIRST))),
        remarks=all_remarks(summary),
        capacity_sentences=capacity_sentences,
        probe_columns=probe_columns,
        overloads=overloads,
        where=where,
        nothing_found=nothing_found(summary["diagnosis"]),
        not_judged=not_judged(summary["diagnosis"]),
        gpu_rows=GPU_ROWS if has_gpu(summary["stages"]) else (),
        server_rows=SERVER_ROWS if has_server(summary["stages"]) else (),
        yes_or_no={True: "yes", False: "no", None: figures.UNKNOWN},
        ttft_block=ttft_block,
        catalogue=list(CATALOGUE.values()),
    )


def _command(command: str | Sequence[str] | None) -> str:
    if command is None:
        return "not recorded"
    return command if isinstance(command, str) else shlex.join(command)


def _date(unix_ns: int | None) -> str:
    if unix_ns is None:
        return figures.UNKNOWN
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _pretty(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
