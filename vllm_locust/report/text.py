"""``report.txt``: the page that is printed at the end of a run, at most 100 columns wide for one stage."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from vllm_locust.metrics import CATALOGUE
from vllm_locust.report import figures
from vllm_locust.report.capacity_text import capacity_sentences, overloads, probe_lines, told_stages
from vllm_locust.report.diagnosis_text import not_judged, nothing_found, where
from vllm_locust.report.gpu_table import GPU_ROWS, gpu_remarks, has_gpu
from vllm_locust.report.host_table import has_hosts, host_rows
from vllm_locust.report.server_table import SERVER_ROWS, has_server, server_remarks
from vllm_locust.report.stage_table import is_open_loop, remarks, stage_lines, stage_title

WIDTH: Final = 100
COLUMNS: Final = ("mean", "p50", "p90", "p95", "p99", "p99_9", "max")
_ALWAYS: Final = ("ttft", "tpot", "itl", "e2e")
_OPEN_LOOP: Final = ("ttft", "ttft_from_schedule", "schedule_lag", "tpot", "itl", "e2e")
"""Side by side: what a request took, what that was after it had been due, and the difference."""
_WHEN_MEASURED: Final = ("ttft_answer", "chunk_gap", "done")
_LIKE: Final = {"ttft_answer": "ttft", "chunk_gap": "itl"}
"""Left out where it says the same as the other in every figure: no reasoning; one token in each chunk."""
_LABEL_COLUMN: Final = 26
_STAGE_COLUMN: Final = 12

_COLOURS: Final = {"valid": "\033[32m", "degraded": "\033[33m", "invalid": "\033[31m"}
_PLAIN: Final = "\033[0m"

Json = Mapping[str, Any]


def render_text(summary: Json, *, colour: bool = False) -> str:
    """The verdict first, then the numbers, then what they rest on."""
    capacity, (stages, which) = summary["capacity"], told_stages(summary["capacity"], summary["stages"])
    told = {**summary, "stages": stages}
    sections = [
        _verdict(summary, colour),
        _capacity(capacity, which),
        [
            *(stage_lines(stages, _stage_heading) if capacity is None else []),
            *_wrapped(f"- {printable(remark)}" for remark in all_remarks(told)),
        ],
        _diagnosis(summary["diagnosis"], summary["stages"]),
        *(_beside(part, "LOAD", _LOAD_ROWS) for part in _abreast(stages)),
        _latency(told),
        *(_beside(part, "SERVER", SERVER_ROWS) for part in _abreast(stages) if has_server(part)),
        *(_beside(part, "GPU", GPU_ROWS) for part in _abreast(stages) if has_gpu(part)),
        *(_beside(part, "HOSTS", host_rows(part)) for part in _abreast(stages) if has_hosts(part)),
        _slos(summary["slo"], with_stages=capacity is None),
        _errors(summary["errors"]),
        _health(summary["health"]["workers"], summary["coalesced"], summary["totals"]["all_phases"]),
        _workload(summary["workload"]),
        _notes(told),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def all_remarks(summary: Json) -> list[str]:
    stages = summary["stages"]
    return [*remarks(summary), *server_remarks(stages), *gpu_remarks(stages)]


def printable(text: str) -> str:
    """Text from outside in one line, without control characters that could move the cursor or reverse the line."""
    return "".join(" " if unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp", "Cs") else char for char in text)


def verdict_line(summary: Json) -> str:
    """``VALID``, or the status with its worst reason."""
    verdict = summary["verdict"]
    reasons = verdict["reasons"]
    if not reasons:
        return "VALID: the generator kept up; the numbers are the server's."
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return f"{verdict['status'].upper()}: {printable(reasons[0]['sentence'])}{more}"


def _verdict(summary: Json, colour: bool) -> list[str]:
    status = summary["verdict"]["status"]
    line = verdict_line(summary)
    if colour:
        line = f"{_COLOURS[status]}{line}{_PLAIN}"
    name = f" ({printable(summary['run_name'])})" if summary["run_name"] else ""
    others = [f"  - {printable(reason['sentence'])}" for reason in summary["verdict"]["reasons"][1:]]
    return [line, *_wrapped(others), f"Run {printable(summary['run_id'])}{name}"]


def _capacity(capacity: Json | None, which: str | None) -> list[str]:
    if capacity is None:
        return []
    sentences = [f"  {printable(sentence)}" for sentence in capacity_sentences(capacity)]
    ends = [f"  - {printable(sentence)}" for sentence in overloads(capacity)]
    ends += [f"  - {which}"] if which is not None else []
    return ["CAPACITY", *_wrapped(sentences), *probe_lines(capacity), *_wrapped(ends)]


def _diagnosis(diagnosis: Json, stages: Sequence[Json]) -> list[str]:
    lines: list[str] = []
    for finding in diagnosis["findings"]:
        title = f"- {finding['title']}{where(finding, stages)}: {finding['sentence']}"
        advice = f"    try: {finding['try']}", f"    confirmed where {finding['confirm']}"
        lines += [f"  {printable(title)}", *map(printable, advice)]
    nothing = nothing_found(diagnosis)
    lines += [] if nothing is None else [f"  {nothing}"]
    lines += [f"  not judged, {printable(missing)}" for missing in not_judged(diagnosis)]
    return ["LIMITS of the server", *_wrapped(lines)]


def _wrapped(lines: Iterable[str]) -> list[str]:
    wrapped: list[str] = []
    for line in lines:
        indent = len(line) - len(line.lstrip(" -"))
        rest = line
        while len(rest) > WIDTH:
            at = rest.rfind(" ", indent + 1, WIDTH + 1)
            at = at if at > indent else WIDTH
            wrapped.append(rest[:at])
            rest = " " * indent + rest[at:].lstrip()
        wrapped.append(rest)
    return wrapped


def _stage_heading(stage: Json) -> str:
    return printable(stage_title(stage))


def _column_width(stages: Sequence[Json]) -> int:
    """Of a stage as a column, with the space before it."""
    return 1 + max(_STAGE_COLUMN, *(len(_stage_heading(stage)) for stage in stages))


_YES_OR_NO: Final = {True: "yes", False: "no", None: figures.UNKNOWN}


def _gap_variation(stage: Json) -> str:
    delivery = stage["delivery"] or {}
    sent, planned = delivery.get("sent_gap_cv"), delivery.get("planned_gap_cv")
    return figures.UNKNOWN if sent is None or planned is None else f"{sent:.2f} ({planned:.2f})"


def _in_flight(stage: Json) -> str:
    in_flight = stage["in_flight"]
    return f"{figures.rate(in_flight['mean'])} ({figures.count(in_flight['max'])})"


Rows = tuple[tuple[str, Callable[[Json], str]], ...]
_LOAD_ROWS: Final[Rows] = (
    ("length", lambda s: figures.time(s["length_s"])),
    ("offered requests/s", lambda s: figures.rate(s["offered_rps"])),
    ("arrivals planned", lambda s: figures.count(s["planned_arrivals"])),
    ("achieved requests/s", lambda s: figures.rate(s["achieved_rps"])),
    ("gap variation (plan)", _gap_variation),
    ("requests attempted", lambda s: figures.count(s["requests"]["attempted"])),
    ("  ok", lambda s: figures.count(s["requests"]["ok"])),
    ("  failed", lambda s: figures.count(s["requests"]["failed"])),
    ("  unfinished (censored)", lambda s: figures.count(s["requests"]["censored"])),
    ("arrivals dropped or lost", lambda s: figures.count(_missed(s))),
    ("requests/s", lambda s: figures.rate(s["requests_per_s"])),
    ("input tokens/s", lambda s: figures.rate(s["input_tokens_per_s"])),
    ("output tokens/s", lambda s: figures.rate(s["output_tokens_per_s"])),
    ("total tokens/s", lambda s: figures.rate(s["total_tokens_per_s"])),
    ("tokens per chunk", lambda s: figures.plain(s["tokens_per_chunk"])),
    ("goodput requests/s", lambda s: figures.rate(s["goodput_rps"])),
    ("good fraction", lambda s: figures.share(s["good_fraction"])),
    ("in flight, mean (max)", _in_flight),
    ("steady", lambda s: _YES_OR_NO[s["steady"]]),
    ("overloaded", lambda s: _YES_OR_NO[s["overloaded"]]),
)


def _abreast(stages: Sequence[Json]) -> list[Sequence[Json]]:
    """Parts of the stages that fit beside each other."""
    abreast = max(1, (WIDTH - _LABEL_COLUMN) // _column_width(stages)) if stages else 1
    return [stages[first : first + abreast] for first in range(0, len(stages), abreast)]


def _missed(stage: Json) -> int:
    return int(stage["requests"]["dropped_arrivals"]) + int(stage["requests"]["lost_arrivals"])


def _beside(stages: Sequence[Json], title: str, rows: Rows) -> list[str]:
    """Stages as columns."""
    width = _column_width(stages)
    lines = [f"{title:<{_LABEL_COLUMN}}" + "".join(f"{_stage_heading(stage):>{width}}" for stage in stages)]
    for label, show in rows:
        lines.append(
            f"  {printable(label):<{_LABEL_COLUMN - 2}}" + "".join(f"{show(stage):>{width}}" for stage in stages)
        )
    return [line.rstrip() for line in lines]


def _latency(summary: Json) -> list[str]:
    lines: list[str] = []
    for stage in summary["stages"]:
        if lines:
            lines.append("")
        if len(summary["stages"]) > 1:
            lines.append(f"LATENCY of stage {printable(stage['name'])}, ok requests")
        else:
            lines.append("LATENCY, ok requests")
        heading = "".join(f"{name.replace('_', '.'):>9}" for name in COLUMNS)
        lines.append(f"  {'':<20}{'n':>9}{heading}")
        always = _OPEN_LOOP if is_open_loop(stage) else _ALWAYS
        shown = [*always, *(name for name in _WHEN_MEASURED if _tells_more(stage, name))]
        for name in shown:
            lines.append(_latency_line(CATALOGUE[name].title, stage[f"{name}_s"]))
            adjusted = stage.get(f"{name}_adjusted_s")
            if adjusted is not None and adjusted.get("failed") and name in always:
                lines.append(_latency_line("  with failures", adjusted))
    return lines


def _tells_more(stage: Json, name: str) -> bool:
    block = stage[f"{name}_s"]
    other = stage[f"{_LIKE[name]}_s"] if name in _LIKE else None
    return bool(block["n"]) and (other is None or any(block[key] != other[key] for key in ("n", *COLUMNS)))


def _latency_line(label: str, block: Json) -> str:
    values = "".join(f" {figures.percentile(block, name):>8}" for name in COLUMNS)
    return f"  {label:<20}{figures.count(block['n']):>9}{values}".rstrip()


def _slos(slo: Json, *, with_stages: bool) -> list[str]:
    lines = [f"  good request: {printable(text)}" for text in slo["per_request"]]
    for entry in slo["stages"] if with_stages else ():
        word = {True: "met", False: "MISSED", None: "not measured"}[entry["met"]]
        lines.append(
            f"  stage {printable(entry['stage_name'])}: {printable(entry['slo'])} {word} ({_slo_value(entry)})"
        )
    return ["SLO", *_wrapped(lines)] if lines else []


def _slo_value(entry: Json) -> str:
    if entry["value"] is None:
        return "it falls on a failed request" if entry["met"] is False else "no samples"
    return figures.time(entry["value"]) if "(" in entry["slo"] else figures.plain(entry["value"])


def _errors(errors: Sequence[Json]) -> list[str]:
    lines = []
    for error in errors:
        lines.append(f"  {error['outcome']:<22}{figures.count(error['count']):>9}")
        lines += [
            f"    {figures.count(example['count'])} × {printable(example['text'])}"[:WIDTH]
            for example in error["examples"]
        ]
    return ["NOT OK, over all phases", *lines] if lines else []


def _health(workers: Sequence[Json], coalesced: Json, everything: Json) -> list[str]:
    if not workers:
        return []
    heading = "cpu p95", "run delay", "loop p99", "recv p99", "sched max", "gc max", "rss"
    lines = ["GENERATOR", f"  {'worker':<26}" + "".join(f"{name:>10}" for name in heading)]
    for worker in workers:
        cells = (
            figures.share(worker["cpu_fraction_p95"]),
            figures.share(worker["run_delay_share"]),
            figures.time(worker["loop_lag_p99_s"]),
            figures.time(worker["receive_lag_p99_s"]),
            figures.time(worker["schedule_lag_max_s"]),
            figures.time(worker["gc_pause_max_s"]),
            figures.size(worker["rss_bytes_max"]),
        )
        lines.append(f"  {printable(worker['worker_id'])[:26]:<26}" + "".join(f"{cell:>10}" for cell in cells))
    stamps = ", ".join(f"{figures.count(n)} by {source}" for source, n in everything["stamp_sources"].items())
    lines.append(f"  requests stamped: {stamps or figures.UNKNOWN}")
    touched, width = coalesced["share_of_gaps"], coalesced["width_s"]
    if coalesced["gaps_touched"]:
        lines.append(
            f"  gaps next to a chunk without a stamp of its own: {figures.share(touched)}, "
            + ", ".join(f"{name} {figures.time(width[name])}" for name in ("p50", "p99", "max"))
            + " wide"
        )
    return lines


def _workload(workload: Json) -> list[str]:
    lines = []
    for name, label in (
        ("prompt_tokens", "prompt tokens"),
        ("prompt_tokens_planned", "prompt tokens, planned"),
        ("output_tokens", "output tokens"),
    ):
        part = workload[name]
        if part["n"]:
            lines.append(
                f"  {label:<24}{figures.count(part['n']):>9}{figures.plain(part['mean']):>10}"
                f"{figures.plain(part['source_mean']):>13}{figures.plain(part['ks_distance']):>13}"
            )
    heading = f"WORKLOAD{'':<18}{'n':>9}{'mean':>10}{'source mean':>13}{'KS distance':>13}"
    about = []
    if workload["name"] is not None:
        about.append(
            f"  {printable(workload['name'])}, planned lengths by {printable(str(workload['token_count_method']))}"
        )
    if workload["output_limit"] is not None:
        about.append(f"  output tokens: limited to --max-tokens {workload['output_limit']}, not by the source")
    dropped = ", ".join(f"{printable(name)} {figures.count(n)}" for name, n in workload["filters"].items() if n)
    about += [f"  rows left out: {dropped}"] if dropped else []
    about += [f"  warning: {printable(warning)}" for warning in workload["warnings"]]
    return [heading, *lines, *_wrapped(about)] if lines or about else []


def _notes(summary: Json) -> list[str]:
    """What a reader must know to read the table right, where it applies."""
    notes = []
    everything = summary["totals"]["all_phases"]
    blocks = [stage[f"{name}_s"] for stage in summary["stages"] for name in (*_OPEN_LOOP, *_WHEN_MEASURED)]
    if any(block["n"] and block["few_samples"] for block in blocks):
        notes.append("? fewer than 10 samples lie beyond this percentile")
    if any(stage["itl_s"]["n"] == 0 and stage["chunk_gap_s"]["n"] for stage in summary["stages"]):
        notes.append("ITL is not known: the server did not say how many tokens each chunk holds (--token-detail on)")
    if any(stage["tpot_reads_low"] for stage in summary["stages"]):
        reads_low = sum(stage["tpot_reads_low"] for stage in summary["stages"])
        notes.append(f"TPOT reads low: the first chunk of {reads_low} requests held several tokens")
    if everything["token_sources"]:
        counted = ", ".join(f"{source} {figures.count(n)}" for source, n in everything["token_sources"].items())
        notes.append(f"tokens counted by: {counted}")
    phases = ", ".join(f"{phase} {figures.count(n)}" for phase, n in everything["by_phase"].items())
    tokens = " and ".join(
        f"{figures.count(everything[f'{kind}_tokens'])} {kind} tokens" for kind in ("prompt", "output")
    )
    notes.append(f"all phases: {figures.count(everything['requests'])} requests ({phases}), {tokens}")
    return _wrapped(f"- {note}" for note in notes)
