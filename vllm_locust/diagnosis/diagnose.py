"""What limits the server: rules over the figures of a run's stages, each with its evidence.

No rule fires without its data: one that lacks them is listed with what it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from vllm_locust.diagnosis.figures import RunFigures
from vllm_locust.diagnosis.finding import THRESHOLDS, TITLES, Answer, Finding, Need, Rule, Thresholds
from vllm_locust.diagnosis.gpu import GPU_RULES
from vllm_locust.diagnosis.server import SERVER_RULES
from vllm_locust.diagnosis.stream import STREAM_RULES

RULES: Final[tuple[tuple[str, Rule], ...]] = (*SERVER_RULES, *GPU_RULES, *STREAM_RULES)
_OF_THE_RUN: Final = frozenset(("cold_start", "client_bound"))
"""They do not look at a stage."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    findings: tuple[Finding, ...]
    """The heaviest first."""
    not_found: tuple[str, ...]
    """Codes of the rules that had their data and found nothing."""
    not_judged: tuple[tuple[str, Need], ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "findings": [finding.as_json() for finding in self.findings],
            "not_found": list(self.not_found),
            "not_judged": [{"code": code, "title": TITLES[code], "needs": str(need)} for code, need in self.not_judged],
        }


def diagnose(run: RunFigures, thresholds: Thresholds = THRESHOLDS) -> Diagnosis:
    """Of a run with one stage at least."""
    order = list(TITLES)
    findings: list[Finding] = []
    not_found: list[str] = []
    not_judged: list[tuple[str, Need]] = []
    for code, rule in sorted(RULES, key=lambda named: order.index(named[0])):
        answer = _over_stages(code, rule, run, thresholds)
        if isinstance(answer, Finding):
            findings.append(answer)
        elif answer is None:
            not_found.append(code)
        else:
            not_judged.append((code, answer))
    # Sorting is stable: what is of equal weight keeps the order of the titles.
    findings.sort(key=lambda finding: -finding.weight)
    return Diagnosis(tuple(findings), tuple(not_found), tuple(not_judged))


def _over_stages(code: str, rule: Rule, run: RunFigures, thresholds: Thresholds) -> Answer:
    """The heaviest finding of all stages. A rule is judged where one stage has its data."""
    stages = run.stages[:1] if code in _OF_THE_RUN else run.stages
    answers = [(stage.name, rule(stage, run, thresholds)) for stage in stages]
    found = [(name, answer) for name, answer in answers if isinstance(answer, Finding)]
    if found:
        return _heaviest(found, of_run=code in _OF_THE_RUN)
    if any(answer is None for _, answer in answers):
        return None
    return answers[0][1]


def _heaviest(found: Sequence[tuple[str, Finding]], *, of_run: bool) -> Finding:
    ordered = sorted(found, key=lambda named: -named[1].weight)
    return replace(ordered[0][1], stages=() if of_run else tuple(name for name, _ in ordered))
