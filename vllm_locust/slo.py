"""Service level objectives: what makes one request good, and what a stage must reach.

Per request: ``ttft<=2s``. A request is good when it meets every one of them; that defines goodput. ``itl`` of one
request is its own mean, (last token − first) / tokens after the first chunk, as other tools' goodput takes it; a
stall is what ``p99(chunk_gap)`` of a stage is for.

Per stage: ``p99(e2e)<=10s``, ``good_fraction>=0.99``. These can be missed, and a miss is exit code 3. Percentiles are
the failure-adjusted ones: where failures are more than 1 %, no p99 is met.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vllm_locust.duration import UNIT_NS
from vllm_locust.metrics import CATALOGUE, DISTRIBUTIONS, SCALARS, Better, Per
from vllm_locust.statistics import PERCENTILES

REQUEST_METRICS: Final = (*(m.name for m in DISTRIBUTIONS if m.per is Per.REQUEST and m.adjusted), "itl")
STAGE_NUMBERS: Final = tuple(m.name for m in SCALARS if m.better is not Better.NEITHER and m.name != "dropped_arrivals")
NEED_REQUEST_SLO: Final = ("goodput_rps", "good_fraction")

_NS_PER_UNIT: Final = {**UNIT_NS, "µs": UNIT_NS["us"]}
_EXPRESSION = re.compile(
    r"(?:(?P<function>[a-z0-9._]+)\((?P<argument>\w+)\)|(?P<name>\w+))"
    r"(?P<operator><=|>=|==|=|<|>)(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>[a-zµ%]*)"
)


class SloKind(StrEnum):
    REQUEST = "request"
    STAGE = "stage"


@dataclass(frozen=True, slots=True)
class Slo:
    """``limit`` is in nanoseconds where ``is_duration``, else in the metric's unit. ``percentile`` is a key of a
    block.
    """

    text: str
    kind: SloKind
    metric: str
    percentile: str | None
    at_least: bool
    limit: float
    is_duration: bool


@dataclass(frozen=True, slots=True)
class StageJudgement:
    """``met`` is None where the stage has nothing to judge. ``value`` is in seconds or the metric's unit; None with
    ``met`` False means that the percentile falls on a failed request."""

    slo: Slo
    met: bool | None
    value: float | None


def parse_slo(text: str) -> Slo:
    """Raises ValueError with a sentence that names the text, the reason and the fix."""
    match = _EXPRESSION.fullmatch(re.sub(r"\s+", "", text))
    if match is None:
        reason = "it is not METRIC<=VALUE or pNN(METRIC)<=VALUE"
        raise _refusal(text, reason, "write for example ttft<=2s or p99(e2e)<=10s")
    number, unit = float(match["number"]), match["unit"]
    if match["function"] is not None:
        percentile = _percentile_key(text, match["function"])
        _check_metric(text, match["argument"], [m.name for m in DISTRIBUTIONS])
        return Slo(text, SloKind.STAGE, match["argument"], percentile, False, *_duration(text, match, number, unit))
    name = match["name"]
    if name in STAGE_NUMBERS:
        return _parse_number(text, match, number, unit)
    _check_metric(text, name, [*REQUEST_METRICS, *STAGE_NUMBERS])
    return Slo(text, SloKind.REQUEST, name, None, False, *_duration(text, match, number, unit))


def parse_slos(texts: Sequence[str]) -> list[Slo]:
    """All faults at once: the ValueError has one line for each."""
    slos, faults = [], []
    for text in texts:
        try:
            slos.append(parse_slo(text))
        except ValueError as error:
            faults.append(str(error))
    if not any(slo.kind is SloKind.REQUEST for slo in slos):
        faults += [
            str(_refusal(slo.text, "nothing says what a good request is", "add for example --slo 'ttft<=2s'"))
            for slo in slos
            if slo.metric in NEED_REQUEST_SLO
        ]
    if faults:
        raise ValueError("\n".join(faults))
    return slos


def _refusal(text: str, reason: str, fix: str) -> ValueError:
    return ValueError(f"SLO {text!r}: {reason}; {fix}")


def _percentile_key(text: str, function: str) -> str:
    key = function.replace(".", "_")
    if key not in PERCENTILES:
        known = ", ".join(name.replace("_", ".") for name in PERCENTILES)
        raise _refusal(text, f"{function!r} is not a percentile of the report", f"use one of {known}")
    return key


def _check_metric(text: str, name: str, known: Sequence[str]) -> None:
    if name in known:
        return
    if name == "chunk_gap":
        fix = "write itl<=… for its mean, or p99(chunk_gap)<=… for all"
        raise _refusal(text, "one request has many chunk gaps", fix)
    if name in {m.name for m in DISTRIBUTIONS}:
        raise _refusal(text, f"{name} says nothing about the server's answer to one request", f"write p99({name})<=…")
    raise _refusal(text, f"there is no metric {name!r}", f"use one of {', '.join(known)}")


def _duration(text: str, match: re.Match[str], number: float, unit: str) -> tuple[float, bool]:
    if match["operator"] != "<=":
        raise _refusal(text, "a time has an upper limit", "write <=")
    if unit not in _NS_PER_UNIT:
        raise _refusal(text, f"{unit!r} is not a unit of time", "use ns, us, ms, s, m or h; a plain number is seconds")
    return round(number * _NS_PER_UNIT[unit]), True


def _parse_number(text: str, match: re.Match[str], number: float, unit: str) -> Slo:
    metric = CATALOGUE[match["name"]]
    at_least = metric.better is Better.HIGHER
    if match["operator"] != (">=" if at_least else "<="):
        wanted, bound = (">=", "a lower") if at_least else ("<=", "an upper")
        raise _refusal(text, f"{metric.name} has {bound} limit", f"write {wanted}")
    if unit not in ("", "%" if metric.unit == "1" else ""):
        raise _refusal(text, f"{metric.name} has no unit {unit!r}", "write a plain number")
    limit = number / 100 if unit == "%" else number
    if metric.unit == "1" and limit > 1:
        raise _refusal(text, "a fraction is at most 1", "write for example 0.99 or 99%")
    return Slo(text, SloKind.STAGE, metric.name, None, at_least, limit, False)


def judge_request(slos: Sequence[Slo], ok: bool, values_ns: Mapping[str, float | None]) -> bool | None:
    """Whether one request is good. None: there is no per-request SLO, or none that applies to this request.

    An SLO on a value that the request does not have is not applicable, and the others decide. A request that is not ok
    is not good.
    """
    per_request = [slo for slo in slos if slo.kind is SloKind.REQUEST]
    if not per_request:
        return None
    if not ok:
        return False
    met = [value <= slo.limit for slo in per_request if (value := values_ns.get(slo.metric)) is not None]
    return all(met) if met else None


def judge_requests(
    slos: Sequence[Slo], ok: npt.NDArray[np.bool_], values_ns: Mapping[str, npt.NDArray[np.float64]]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """``judge_request`` for many: (good, decided). An unknown value is NaN in ``values_ns``; undecided rows are not
    good.
    """
    per_request = [slo for slo in slos if slo.kind is SloKind.REQUEST]
    if not per_request:
        return np.zeros(len(ok), dtype=np.bool_), np.zeros(len(ok), dtype=np.bool_)
    applicable, met = np.zeros(len(ok), dtype=np.bool_), np.ones(len(ok), dtype=np.bool_)
    for slo in per_request:
        values = values_ns[slo.metric]
        known = ~np.isnan(values)
        applicable |= known
        met &= ~known | (values <= slo.limit)
    return ok & applicable & met, ~ok | applicable


def judge_stage(slo: Slo, stage: Mapping[str, Any]) -> StageJudgement:
    """A per-stage SLO against a stage of ``summary.json``."""
    if slo.percentile is None:
        value = stage[slo.metric]
        if value is None:
            return StageJudgement(slo, None, None)
        return StageJudgement(slo, value >= slo.limit if slo.at_least else value <= slo.limit, value)
    block = stage[f"{slo.metric}_adjusted_s" if CATALOGUE[slo.metric].adjusted else f"{slo.metric}_s"]
    if not block["n"]:
        return StageJudgement(slo, None, None)
    value = block[slo.percentile]
    if value is None:
        return StageJudgement(slo, False, None)
    return StageJudgement(slo, round(value * 1e9, 3) <= slo.limit, value)
