"""``report.html``: one file that stands alone and fetches nothing. Text from outside is escaped, in the page and in the
data of its charts, and no script runs but the two that come with the report.
"""

from __future__ import annotations

import json
import shlex
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from importlib import resources
from typing import Any, Final

import jinja2
from markupsafe import Markup

from vllm_locust.metrics import CATALOGUE, DISTRIBUTIONS
from vllm_locust.report import figures
from vllm_locust.report.capacity_text import capacity_sentences, overloads, probe_columns
from vllm_locust.report.charts.curves import DRAWN
from vllm_locust.report.diagnosis_text import not_judged, nothing_found, where
from vllm_locust.report.gpu_table import GPU_ROWS, has_gpu
from vllm_locust.report.headline import headline
from vllm_locust.report.host_table import host_rows
from vllm_locust.report.server_table import SERVER_ROWS, has_server
from vllm_locust.report.stage_table import ttft_block
from vllm_locust.report.text import COLUMNS, all_remarks, printable, verdict_line
from vllm_locust.shipped import chart_library

_LONGEST_PART: Final = 20_000
"""Characters of a part of ``run.json``."""
_FIRST: Final = {name: place for place, name in enumerate(("ttft", "ttft_from_schedule", "schedule_lag"))}
"""Side by side: a queue before the server shows in the second and the third, and not in the first."""
_ALWAYS: Final = ("ttft", "tpot", "itl", "e2e")
"""Rows that say so where nothing was measured."""
_CARD_COLUMNS: Final = ("mean_s", "p50_s", "p90_s", "p99_s")


def render_html(summary: Mapping[str, Any], run: Mapping[str, Any], charts: Mapping[str, Any] | None = None) -> str:
    """``run`` is ``run.json``: its configuration, versions, hosts and command are shown as they are. ``charts`` is what
    ``chart_data`` gives: without it the page has tables only.
    """
    return (
        _environment()
        .from_string(_asset("report.html.j2"))
        .render(
            summary=summary,
            run=run,
            charts=charts,
            scripts=[chart_library(), _asset("assets", "report.js")] if charts else [],
            style=_asset("assets", "report.css"),
            headline=headline(summary),
            model=(run.get("config") or {}).get("model") or (run.get("server") or {}).get("model"),
            targets=_targets(run.get("config") or {}),
            always=_ALWAYS,
            drawn=DRAWN,
            described=list(_described(run)),
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
            host_rows=host_rows(summary["stages"]),
            server_rows=SERVER_ROWS if has_server(summary["stages"]) else (),
            yes_or_no={True: "yes", False: "no", None: figures.UNKNOWN},
            ttft_block=ttft_block,
            catalogue=list(CATALOGUE.values()),
        )
    )


def _asset(*path: str) -> str:
    return resources.files("vllm_locust").joinpath("report", *path).read_text(encoding="utf-8")


def _environment() -> jinja2.Environment:
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
        "printable": printable,
        "integrity": _integrity,
        "script_json": _script_json,
    }
    environment.globals["percentile"] = figures.percentile
    return environment


def _integrity(script: str) -> str:
    """For the page's Content-Security-Policy: only a script with this text may run."""
    return f"sha256-{b64encode(sha256(script.encode()).digest()).decode()}"


def _script_json(value: object) -> Markup:
    """JSON that cannot end the element that holds it, and is ASCII: no U+2028 either."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.translate({ord(char): f"\\u{ord(char):04x}" for char in "<>&"}))


def _targets(config: Mapping[str, Any]) -> list[str]:
    return [
        target["socket_path"] or f"{target['scheme']}://{target['host']}:{target['port']}{target['prefix']}"
        for target in config.get("targets") or ()
    ]


def _described(run: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """``run.json`` part by part, the configuration first, and whether a part is too long to be shown whole."""
    first = ("config", "server", "workload", "versions", "hosts")
    for key in (*first, *(key for key in run if key not in (*first, "command"))):
        if run.get(key):
            written = json.dumps(run[key], indent=2, ensure_ascii=False, allow_nan=False)
            text = "\n".join(printable(line) for line in written.split("\n"))
            yield key, text[:_LONGEST_PART], len(text) > _LONGEST_PART


def _command(command: str | Sequence[str] | None) -> str:
    if command is None:
        return "not recorded"
    return command if isinstance(command, str) else shlex.join(command)


def _date(unix_ns: int | None) -> str:
    if unix_ns is None:
        return figures.UNKNOWN
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
