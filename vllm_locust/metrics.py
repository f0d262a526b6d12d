"""The catalogue of every number in ``summary.json``: what it is called, what it means, which way is better, how it
merges.

How tokens come into a rate. A rate of tokens or of requests in a stretch of time counts what *arrived* in that
stretch on the common clock, whoever asked for it: tokens of requests sent before the stretch count as far as they
arrive in it, tokens of its own requests that arrive later do not, and tokens of requests that failed in the end were
delivered all the same. Numerator and denominator then speak of the same seconds, with no bias from the edges. (Others
divide the tokens of finished requests by a time that includes ramp or drain, or trim one and not the other.) A
prompt's tokens count when its first token arrives, since the prompt has been processed then. A latency, the good
fraction and goodput go by belonging instead: a request belongs to a stage by the time it was due.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Better(StrEnum):
    LOWER = "lower"
    HIGHER = "higher"
    NEITHER = "neither"


class Merge(StrEnum):
    """How values from several workers become one. A percentile never merges: it is computed again from what does."""

    HISTOGRAM = "histogram"
    """Raw values in the result; live, bucket counts add."""
    SUM = "sum"
    RECOMPUTED = "recomputed"
    """From sums and samples that have been merged."""


class Per(StrEnum):
    """What one sample of a metric is."""

    REQUEST = "request"
    GAP = "gap"
    TOKEN = "token"
    STAGE = "stage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    name: str
    title: str
    unit: str
    formula: str
    better: Better
    merge: Merge
    per: Per
    adjusted: bool = False
    """A failed request is slower than every success: there is an ``<name>_adjusted_s`` block beside ``<name>_s``."""
    of_every_request: bool = False
    """Measured on failed requests as well (what it measures happens before a request can fail)."""


def _latency(name: str, title: str, formula: str, per: Per = Per.REQUEST) -> Metric:
    return Metric(
        name=name,
        title=title,
        unit="s",
        formula=formula,
        better=Better.LOWER,
        merge=Merge.HISTOGRAM,
        per=per,
        adjusted=True,
    )


def _lag(name: str, title: str, formula: str) -> Metric:
    return Metric(
        name=name,
        title=title,
        unit="s",
        formula=formula,
        better=Better.LOWER,
        merge=Merge.HISTOGRAM,
        per=Per.REQUEST,
        of_every_request=True,
    )


def _number(name: str, title: str, unit: str, formula: str, better: Better, merge: Merge = Merge.RECOMPUTED) -> Metric:
    return Metric(name=name, title=title, unit=unit, formula=formula, better=better, merge=merge, per=Per.STAGE)


DISTRIBUTIONS: Final = (
    _latency("ttft", "TTFT", "first token-bearing chunk − sent"),
    _latency(
        "ttft_from_schedule",
        "TTFT from schedule",
        "first token-bearing chunk − scheduled; free of coordinated omission; null in a closed loop",
    ),
    _latency("ttft_answer", "answer TTFT", "first non-reasoning token-bearing chunk − sent"),
    _latency(
        "tpot",
        "TPOT",
        "(last token-bearing chunk − first) / (output tokens − 1); null below two tokens or when all came in one chunk",
    ),
    _latency(
        "itl",
        "ITL",
        "a chunk of k tokens after a gap g is k samples of g/k, pooled over requests; "
        "null where tokens per chunk are unknown",
        Per.TOKEN,
    ),
    _latency("chunk_gap", "chunk gap", "gap between successive token-bearing chunks, pooled over requests", Per.GAP),
    _latency("e2e", "E2E", "last token-bearing chunk − sent, of a request that is ok"),
    _latency("done", "done", "the [DONE] event, or the end of the body where there is none, − sent"),
    _lag("schedule_lag", "schedule lag", "sent − scheduled"),
    _lag("receive_lag", "receive lag", "the longest (user-space read − kernel stamp) of the request"),
    _lag("connect", "connect", "time to open the connection, before sent; only where one was opened"),
)

SCALARS: Final = (
    _number(
        "offered_rps",
        "offered rate",
        "requests/s",
        "what was asked for: the rate of a hold, the mean rate of a ramp, in the whole window the mean of its stages; "
        "a random process brings more or fewer (planned_arrivals); null in a closed loop",
        Better.NEITHER,
    ),
    _number(
        "achieved_rps",
        "achieved rate",
        "requests/s",
        "requests really sent within the stage / its length",
        Better.NEITHER,
    ),
    _number(
        "requests_per_s",
        "requests/s",
        "requests/s",
        "ok requests whose last token arrived within the stage / its length",
        Better.HIGHER,
    ),
    _number(
        "output_tokens_per_s",
        "output tokens/s",
        "tokens/s",
        "output tokens that arrived within the stage / its length",
        Better.HIGHER,
    ),
    _number(
        "input_tokens_per_s",
        "input tokens/s",
        "tokens/s",
        "prompt tokens of requests whose first token arrived within the stage / its length",
        Better.HIGHER,
    ),
    _number("total_tokens_per_s", "total tokens/s", "tokens/s", "input + output tokens/s", Better.HIGHER),
    _number(
        "goodput_rps",
        "goodput",
        "requests/s",
        "requests of the stage that meet every per-request SLO / its length",
        Better.HIGHER,
    ),
    _number(
        "good_fraction",
        "good fraction",
        "1",
        "good / (good + not good); failed, cut and unfinished requests are not good; "
        "undecidable ones are on neither side",
        Better.HIGHER,
    ),
    _number(
        "failed_fraction",
        "failed fraction",
        "1",
        "requests of the stage that are not ok, censored ones included / attempted",
        Better.LOWER,
    ),
    _number(
        "tokens_per_chunk",
        "tokens per chunk",
        "tokens",
        "output tokens / token-bearing chunks, of ok requests",
        Better.NEITHER,
    ),
    _number(
        "dropped_arrivals",
        "dropped arrivals",
        "requests",
        "arrivals that were due while every slot was busy, and were never sent",
        Better.LOWER,
        Merge.SUM,
    ),
)

CATALOGUE: Final = MappingProxyType({metric.name: metric for metric in (*DISTRIBUTIONS, *SCALARS)})


def markdown_table() -> str:
    """The README's table of metrics, without a newline at its end."""
    lines = [
        "| name | meaning | unit | one sample per | better | merges by |",
        "|---|---|---|---|---|---|",
    ]
    for metric in CATALOGUE.values():
        key = f"{metric.name}_s" if metric.unit == "s" else metric.name
        names = f"`{key}`, `{metric.name}_adjusted_s`" if metric.adjusted else f"`{key}`"
        cells = (names, f"**{metric.title}**: {metric.formula}", metric.unit, metric.per, metric.better, metric.merge)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
