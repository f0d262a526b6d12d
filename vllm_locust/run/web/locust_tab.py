"""Tables in Locust's own UI, through its extension points: tabs, rows beside its statistics, links for download."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson
from flask import Response, request

from vllm_locust.statistics import PERCENTILES

_Rows = list[dict[str, str]]
_Column = tuple[str, str]

_LATENCY: Final[tuple[_Column, ...]] = (
    ("metric", "Metric (ms)"),
    ("n", "Samples"),
    ("mean", "Mean"),
    *((label, label.replace("_", ".")) for label in PERCENTILES),
    ("max", "Max"),
)
_TOTALS: Final[tuple[_Column, ...]] = (("figure", "Figure"), ("value", "Value"))
_WORKERS: Final[tuple[_Column, ...]] = (
    ("worker", "Worker"),
    ("state", "State"),
    ("sent", "Sent"),
    ("inflight", "In flight"),
    ("finished", "Finished"),
    ("failed", "Failed"),
    ("tokens", "Output tokens"),
    ("ttft", "TTFT p99 (ms)"),
    ("lag", "Schedule lag p99 (ms)"),
    ("receive", "Receive lag p99 (ms)"),
    ("cpu", "CPU (% of a core)"),
    ("loop", "Loop lag (ms)"),
)
_TABLES: Final = {
    "llm": ("LLM latency", _LATENCY),
    "llm-totals": ("LLM totals", _TOTALS),
    "llm-workers": ("LLM workers", _WORKERS),
}
_FIGURES: Final = (
    ("offered_rps", "Offered rate (requests/s)"),
    ("achieved_rps", "Achieved rate (requests/s, last 5 s)"),
    ("requests_per_s", "Ok requests/s (last 5 s)"),
    ("input_tokens_per_s", "Input tokens/s (last 5 s)"),
    ("output_tokens_per_s", "Output tokens/s (last 5 s)"),
    ("goodput_rps", "Goodput (requests/s, last 5 s)"),
)
_COUNTS: Final = (
    ("sent", "Sent"),
    ("in_flight", "In flight"),
    ("waiting_arrivals", "Arrivals without a free slot"),
    ("dropped_arrivals", "Arrivals dropped"),
    ("finished", "Finished"),
    ("failed", "Failed"),
    ("output_tokens", "Output tokens"),
)
_LINK: Final = (
    b'<a id="llm-link" href="./llm" style="position:fixed;right:12px;bottom:12px;z-index:2000;padding:6px 14px;'
    b'border-radius:16px;background:#0b5cad;color:#fff;font:600 13px sans-serif;text-decoration:none">'
    b"LLM dashboard</a></body>"
)


def template_keys() -> dict[str, Any]:
    """What Locust's page is given to show the tabs."""
    return {
        "extended_tabs": [{"key": key, "title": title} for key, (title, _) in _TABLES.items()],
        "extended_tables": [
            {"key": key, "structure": [{"key": name, "title": head} for name, head in columns]}
            for key, (_, columns) in _TABLES.items()
        ],
        "extended_csv_files": [
            {"href": "./llm", "title": "Open the LLM dashboard"},
            {"href": "./llm/results.zip", "title": "Download the LLM results of the last finished run"},
        ],
    }


def add_tables(stats: Callable[[], Mapping[str, Any]]) -> Callable[[Response], Response]:
    """For ``app.after_request``: fills the tables, and links Locust's page to the dashboard."""

    def after(response: Response) -> Response:
        if request.endpoint == "locust.request_stats" and response.is_json and response.status_code == 200:
            content = orjson.loads(response.get_data())
            content["extended_stats"] = tables(stats())
            response.set_data(orjson.dumps(content))
        elif request.endpoint == "locust.index" and response.mimetype == "text/html":
            page = response.get_data()
            head, end, tail = page.rpartition(b"</body>")
            if end and b'id="llm-link"' not in page:
                response.set_data(head + _LINK + tail)
        return response

    return after


def tables(stats: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of texts, since Locust's table shows a missing value as nothing and a number with all its digits."""
    if stats["run"] is None:
        return [{"key": key, "data": []} for key in _TABLES]
    latency = [_latency_row(row) for row in stats["latency"]]
    rows: dict[str, _Rows] = {
        "llm": latency,
        "llm-totals": _totals(stats),
        "llm-workers": [_worker_row(row) for row in stats["workers"]],
    }
    return [{"key": key, "data": data} for key, data in rows.items()]


def _latency_row(row: Mapping[str, Any]) -> dict[str, str]:
    times = {label: _ms(row[f"{label}_s"]) for label in ("mean", *PERCENTILES, "max")}
    return {"metric": row["title"], "n": _number(row["n"])} | {_camel(label): text for label, text in times.items()}


def _camel(label: str) -> str:
    """Locust's page asks for a column by its key in camel case, and leaves the rows' keys as they are."""
    first, *rest = label.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _totals(stats: Mapping[str, Any]) -> _Rows:
    now, totals, verdict = stats["now"], stats["totals"], stats["verdict"]
    lines = [("Run", stats["run"]["run_id"]), ("Model", stats["run"]["model"]), ("State", stats["state"])]
    over = stats["state"] in ("ready", "preparing")
    lines.append(("Phase", "over" if over else str(now.get("phase", "–"))))
    if over:
        lines.append(("Verdict", verdict["status"] or "none: the run has no results"))
    else:
        lines.append(("Verdict so far", verdict["status"] or "nothing measured yet"))
    lines += [("Reason", reason["sentence"]) for reason in verdict["reasons"]]
    lines += [(text, _number(now.get(name))) for name, text in _FIGURES]
    lines += [(text, _number(totals[name])) for name, text in _COUNTS]
    fraction = totals["good_fraction"]
    lines.append(("Good fraction", "–" if fraction is None else f"{fraction * 100:.2f} %"))
    lines += [(f"Outcome {name}", _number(count)) for name, count in stats["outcomes"].items()]
    lines += [(f"Could not start: {number}", text) for number, text in enumerate(stats["problems"], 1)]
    return [{"figure": figure, "value": value} for figure, value in lines]


def _worker_row(row: Mapping[str, Any]) -> dict[str, str]:
    cpu = row["cpu_fraction"]
    return {
        "worker": row["worker_id"],
        "state": row["state"],
        "sent": _number(row["sent"]),
        "inflight": _number(row["in_flight"]),
        "finished": _number(row["finished"]),
        "failed": _number(row["failed"]),
        "tokens": _number(row["output_tokens"]),
        "ttft": _ms(row["ttft_p99_s"]),
        "lag": _ms(row["schedule_lag_p99_s"]),
        "receive": _ms(row["receive_lag_p99_s"]),
        "cpu": "–" if cpu is None else f"{cpu * 100:.0f}",
        "loop": _ms(row["loop_lag_s"]),
    }


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:,.2f}"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def without_secrets(options: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Locust's start form with the values of secret options left out: it would have them in clear in its page."""
    return {
        name: {**option, "default_value": ""} if option.get("is_secret") else dict(option)
        for name, option in options.items()
    }


def secret_names(options: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    return frozenset(name for name, option in options.items() if option.get("is_secret"))
