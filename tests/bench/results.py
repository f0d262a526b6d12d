"""The tables: on the terminal, as ``RESULTS.md`` and as JSON beside it."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.bench.accuracy import Quantiles
from tests.bench.cases import CEILING_ERROR_MS, Doubling, Row
from tests.bench.measure import Run
from tests.bench.scale import Claim
from tests.bench.scale import cells as claim_cells

_HEAD = (
    "client",
    "streams",
    "tokens/s",
    "CPU µs/token",
    "× C",
    "TTFT p50 / p99",
    "TTFT error p50 / p99 / p99.9 / max",
    "gap p99",
    "gap error p50 / p99 / p99.9 / max",
    "chunk error p50 / p99 / p99.9 / max",
    "note",
)

_CLAIM_HEAD = ("what", "bound", "measured", "CPU", "wall", "peak memory")
_TITLES = {
    "matrix": "Every client at every load",
    "ceiling": "The most that one worker process carries",
    "overload": "At twice that load",
    "hog": "With a busy neighbour on the client's core",
}

HOW_TO_READ = f"""All times in milliseconds. A closed loop: every stream begins a new request when its last one ended.
The truth server sends the first token 50 ms after it has read a request, then one every 20 ms (40 ms at 2,000 streams);
each event is one HTTP chunk and one `send()`, as vLLM writes it. It logs CLOCK_MONOTONIC right before and after each
send, and every request that a client reports is joined with that log. Only a steady window in the middle of each run
counts.

- **tokens/s**: tokens really sent in the window, by the server's log, and the share of what the schedule allows. Less
  than 100 % means that the client began its next requests late or did not read.
- **CPU µs/token**: user and system time of all the client's processes in the window per token; of `vllm-locust` the
  worker process (receive, parse, record, ship), whose master, Redis and recorder run on the server's core. **× C** is
  its ratio to the bare C epoll client in the same run.
- **TTFT, gap**: what the client reported for requests of the window; the truth is 50 ms and the gap of the schedule.
- **TTFT error**: |reported TTFT − (first token sent − request read)|: it holds the request's way to the server too.
- **gap error**: |reported gap − true gap| of each pair of successive tokens.
- **chunk error**: |arrival on the common clock − time right before the token's send()|, for clients that say when they
  sent. The way through the kernel, 2 to 7 µs, is in it.
- **run delay**, in the notes where above 1 %: share of the window in which the client's threads waited for their core.
  A run of a single-process client above that is repeated; the calmest is kept.
- AIPerf and GuideLLM print means per request where others print gaps; GuideLLM keeps no times per token.
- The ceiling is the most tokens/s really sent with a chunk error of at most {CEILING_ERROR_MS} ms at p99; the share of
  the schedule beside it says how far the closed loop lagged behind.
"""


@dataclass(slots=True)
class Results:
    date: str
    machine: str
    versions: dict[str, str]
    command: str
    rows: list[Row] = field(default_factory=list)
    limits: dict[str, float | None] = field(default_factory=dict)
    doublings: list[Doubling] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    live_views: list[dict[str, float]] = field(default_factory=list)
    """Of some numbers of workers: CPU ms of the master for each second, as ``live_view`` prints them."""

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print("    " + " · ".join(cells(row)), file=sys.stderr, flush=True)


def machine() -> str:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = (
        f"Linux {platform.release()}, Python {platform.python_version()}, load average {os.getloadavg()[0]:.1f} before"
    )
    return f"{model}, {os.cpu_count()} CPUs, {memory:.0f} GiB, {system}"


def _quantiles(q: Quantiles | None, *, tail: bool = True) -> str:
    if q is None:
        return "–"
    values = (q.p50, q.p99, q.p99_9, q.max) if tail else (q.p50, q.p99)
    return " / ".join(_milliseconds(v) for v in values)


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def cells(row: Row) -> list[str]:
    run = row.run
    if isinstance(run, str):
        return [row.client, f"{row.streams:,}", *["–"] * 8, f"no result: {run}"]
    a = run.accuracy
    cpu = run.cpu_us_per_token
    ratio = cpu / row.yardstick_us if cpu is not None and row.yardstick_us else None
    return [
        row.client,
        f"{row.streams:,}",
        f"{run.tokens_per_s:,.0f} ({run.tokens_per_s / run.offered_tokens_per_s:.0%})",
        "–" if cpu is None else f"{cpu:.1f}",
        "–" if ratio is None else f"{ratio:.1f}",
        _quantiles(a.ttft_reported, tail=False),
        _quantiles(a.ttft_error),
        _milliseconds(a.gap_reported.p99 if a.gap_reported else None),
        _quantiles(a.gap_error),
        _quantiles(a.chunk_error),
        "; ".join(_notes(row, run)),
    ]


def _notes(row: Row, run: Run) -> list[str]:
    notes = [row.note] if row.note else []
    a = run.accuracy
    if run.headline.get("verdict"):
        reasons = run.headline.get("reasons")
        notes.append(f"verdict {run.headline['verdict']}" + (f" ({reasons})" if reasons else ""))
    if row.case == "overload":
        notes.append(f"{run.rss_bytes / 2**20:,.0f} MiB")
        if a.own_stamp_share is not None and a.chunk_error_own_stamp is not None:
            notes.append(f"own stamp {a.own_stamp_share:.1%}, their error {_quantiles(a.chunk_error_own_stamp)}")
    for count, what in ((run.failed, "failed"), (a.missing, "not reported"), (a.miscounted, "with other chunk counts")):
        if count:
            notes.append(f"{count} {what}")
    if run.run_delay_share > 0.01:
        notes.append(f"run delay {run.run_delay_share:.0%}")
    if run.server_late is not None and run.server_late.p99 > 1.0:
        notes.append(f"server late p99 {run.server_late.p99:.1f}")
    return notes


def text_table(rows: Sequence[Row]) -> str:
    lines = [list(_HEAD), *(cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *body])


def doubling_lines(doublings: Sequence[Doubling]) -> list[list[str]]:
    def number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    return [
        [
            d.client,
            d.what,
            f"{number(d.cpu_us, ',.0f')} µs",
            f"{number(d.cpu_us_double, ',.0f')} µs",
            number(d.ratio, ".2f"),
        ]
        for d in doublings
    ]


LIVE_VIEW_HEAD: Final = ("workers", "snapshots read", "live view", "a viewer's JSON", "Locust's tab", "Prometheus")


def live_view_lines(views: Sequence[Mapping[str, float]]) -> list[list[str]]:
    parts = ("snapshots_read", "live_view", "first_viewer", "locust_tab", "prometheus")
    return [[f"{view['workers']:.0f}", *(f"{view[part] / 10:.2f} %" for part in parts)] for view in views]


def markdown(results: Results) -> str:
    versions = "\n".join(f"- {name}: {version}" for name, version in results.versions.items())
    parts = [
        "# Benchmark: who reads a stream of tokens how well",
        f"{results.date} · {results.machine}\n\nMade by `{results.command}`.\n\n{versions}",
        "## How to read it\n\n" + HOW_TO_READ.strip(),
    ]
    for case, title in _TITLES.items():
        rows = [row for row in results.rows if row.case == case]
        if rows:
            parts.append(f"## {title}\n\n" + _markdown_table(_HEAD, [cells(row) for row in rows]))
        if case == "ceiling" and results.limits:
            limits = (
                f"{name}: {'none found' if v is None else f'{v:,.0f} tokens/s'}" for name, v in results.limits.items()
            )
            parts.append("Highest load within 0.05 ms at p99: " + " · ".join(limits))
    late = _server_lateness(results.rows)
    if late:
        parts.append("## The truth server's own lateness\n\n" + late)
    if results.doublings:
        head = ("client", "what", "CPU", "CPU at twice the size", "ratio")
        table = _markdown_table(head, doubling_lines(results.doublings))
        note = "CPU per request, event or answer. Linear cost is a ratio of about 2 at most; quadratic would be 4."
        parts.append(f"## No quadratic cost\n\n{note}\n\n{table}")
    if results.claims:
        table = _markdown_table(_CLAIM_HEAD, [claim_cells(claim) for claim in results.claims])
        parts.append(f"## What a large run costs\n\n{table}")
    if results.live_views:
        table = _markdown_table(LIVE_VIEW_HEAD, live_view_lines(results.live_views))
        note = "Of one core, at one look a second; snapshots are read without a web UI too. Eight GPUs at 10 Hz."
        parts.append(f"## What the web UI's live view costs the master\n\n{note}\n\n{table}")
    return "\n\n".join(parts) + "\n"


def _server_lateness(rows: Sequence[Row]) -> str:
    lines = [
        [row.case, row.client, f"{row.streams:,}", f"{row.run.tokens_per_s:,.0f}", _quantiles(row.run.server_late)]
        for row in rows
        if isinstance(row.run, Run)
    ]
    head = ("case", "client", "streams", "tokens/s", "late p50 / p99 / p99.9 / max")
    return _markdown_table(head, lines) if lines else ""


def as_json(results: Results) -> str:
    def plain(value: Any) -> Any:
        return dict(value) if not isinstance(value, type) else str(value)

    return json.dumps(dataclasses.asdict(results), indent=1, default=plain, allow_nan=False, ensure_ascii=False) + "\n"
