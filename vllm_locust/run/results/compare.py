"""``vllm-locust compare``: runs of one setting against runs of another, and scaling curves over many."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Self

from vllm_locust.comparison.likeness import Differing, differing, known_names, unexpected
from vllm_locust.comparison.limit import Limit
from vllm_locust.comparison.result import FAILED, UNDECIDED, Result, hold_against
from vllm_locust.comparison.scaling import best_stage, scaling_curve
from vllm_locust.comparison.series import StageSeries
from vllm_locust.errors import InvalidMeasurement, SloMissed, UsageError
from vllm_locust.report.comparison_junit import render_junit
from vllm_locust.report.comparison_markdown import render_markdown, render_scaling_markdown
from vllm_locust.report.comparison_text import render_comparison, render_scaling
from vllm_locust.run.results.compared_run import Setting, shown
from vllm_locust.store.rundir import json_text, write_text

SCHEMA = 1
STDOUT = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOrder:
    base: str
    news: Sequence[str]
    limits: Sequence[Limit]
    expect_different: Sequence[str]
    allow_invalid: bool

    @classmethod
    def parse(
        cls, base: str, news: Sequence[str], *, fail_if: Sequence[str], expect_different: str, allow_invalid: bool
    ) -> Self:
        """Raises UsageError with every fault of the limits."""
        if not news:
            raise UsageError("compare: there is nothing to compare with BASE; give one NEW or more")
        limits, faults = [], []
        for text in fail_if:
            try:
                limits.append(Limit.parse(text))
            except ValueError as error:
                faults.append(f"--fail-if {error}")
        if faults:
            raise UsageError(*faults)
        return cls(
            base=base,
            news=news,
            limits=limits,
            expect_different=_names(expect_different),
            allow_invalid=allow_invalid,
        )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files, ``-`` for the standard output; None: not asked for."""

    markdown: str | None = None
    junit: str | None = None
    json: str | None = None

    def __post_init__(self) -> None:
        on_stdout = [f"--{name}" for name in ("markdown", "junit", "json") if getattr(self, name) == STDOUT]
        if len(on_stdout) > 1:
            raise UsageError(f"{' and '.join(on_stdout)}: only one of them can be {STDOUT}; give the others a file")

    def write(self, result: Mapping[str, Any], text: str, markdown: Callable[[], str]) -> None:
        """The text goes to the standard output unless something else does."""
        if STDOUT not in (self.markdown, self.junit, self.json):
            sys.stdout.write(text)
        if self.markdown is not None:
            _write(self.markdown, markdown())
        if self.junit is not None:
            _write(self.junit, render_junit(result))
        if self.json is not None:
            _write(self.json, json_text(result))


def _write(where: str, text: str) -> None:
    if where == STDOUT:
        sys.stdout.write(text)
    else:
        write_text(Path(where), text)


def compare_runs(order: CompareOrder, outputs: Outputs) -> int:
    """Print and write what was found. Raises SloMissed on a regression, InvalidMeasurement where a run must not be
    believed or a limit cannot be decided, UsageError where runs are not alike.
    """
    base = Setting.read(order.base)
    news = [Setting.read(text) for text in order.news]
    for new in news:
        _refuse_the_same(base, new)
    _refuse_invalid([base, *news], allowed=order.allow_invalid)
    _refuse_unknown_names(order.expect_different, [base, *news])
    differences = [_checked_differences(base, new, order.expect_different) for new in news]
    base_series = [run.stage_series() for run in base.runs]
    comparisons = []
    for new, found in zip(news, differences, strict=True):
        series = [run.stage_series() for run in new.runs]
        same_schedule = base.runs[0].plan is not None and base.runs[0].plan == new.runs[0].plan
        same_stages = not {"load", "users"} & set(order.expect_different)
        result = hold_against(base_series, series, order.limits, same_schedule=same_schedule, same_stages=same_stages)
        _refuse_empty(result, base, new)
        remarks = [*_remarks(base, new, found, order.expect_different, result), *_unmatched(base_series + series)]
        comparisons.append(_comparison_json(new, found, remarks, result))
    written = {"schema": SCHEMA, "base": base.as_json(), "comparisons": comparisons}
    outputs.write(written, render_comparison(written), lambda: render_markdown(written))
    return _verdict([gate for one in comparisons for gate in one["gates"]])


def _verdict(gates: Sequence[Mapping[str, Any]]) -> int:
    failed, undecided = ([gate for gate in gates if gate["status"] == status] for status in (FAILED, UNDECIDED))
    regression = f"a regression: {'; '.join(_gate_words(failed))}"
    if undecided:
        raise InvalidMeasurement(
            f"a limit cannot be decided: {'; '.join(_gate_words(undecided))}; measure longer, or limit another quantity"
            + (f". Beside it {regression}" if failed else "")
        )
    if failed:
        raise SloMissed(regression)
    return 0


def _gate_words(gates: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for gate in gates:
        reason = f" ({gate['undecided']})" if gate["undecided"] else ""
        yield f"{gate['fail_if']} in stage {gate['stage']}{reason}"


def _refuse_the_same(base: Setting, new: Setting) -> None:
    if same := {run.run_id for run in base.runs} & {run.run_id for run in new.runs}:
        raise UsageError(
            f"{new.label} against {base.label}: run {min(same)} is on both sides; give a run of its own to each"
        )


def _refuse_invalid(sides: Sequence[Setting], *, allowed: bool) -> None:
    invalid = [run for side in sides for run in side.runs if run.summary["verdict"]["status"] == "invalid"]
    if invalid and not allowed:
        run = invalid[0]
        reason = next(iter(run.summary["verdict"]["reasons"]), {"sentence": "no reason is given"})["sentence"]
        raise InvalidMeasurement(
            f"{shown(run.path)}: the measurement is invalid ({reason}); repeat the run, or give --allow-invalid"
        )


def _refuse_unknown_names(names: Sequence[str], sides: Sequence[Setting]) -> None:
    known = known_names(*(run.settings for side in sides for run in side.runs))
    for name in names:
        if name not in known:
            plain = ", ".join(sorted(name for name in known if " " not in name))
            raise UsageError(f"--expect-different {name}: there is no such setting; use one of {plain}")


def _checked_differences(base: Setting, new: Setting, expected: Sequence[str]) -> list[Differing]:
    """Between the two settings. Repeated runs of one setting must agree in all that they must agree in."""
    for side in (base, new):
        for one, other in combinations(side.runs, 2):
            wrong = [found for found in differing(one.settings, other.settings) if found.must_agree]
            if wrong:
                said = "; ".join(found.text for found in wrong)
                raise UsageError(f"{side.label}: repeated runs must be of one setting, and they differ in {said}")
    found = differing(base.runs[0].settings, new.runs[0].settings)
    unlike = [one for one in unexpected(found, expected) if one.must_agree]
    if unlike:
        said = "; ".join(one.text for one in unlike)
        names = ",".join(one.name for one in unlike)
        raise UsageError(
            f"{new.label} is not like {base.label}: {said}; repeat the run with the same settings, or give "
            f"--expect-different {names} if that is what you compare"
        )
    return found


def _refuse_empty(result: Result, base: Setting, new: Setting) -> None:
    if not result.differences:
        raise UsageError(
            f"{new.label} and {base.label} have no stage of the same load with requests; measure the same stages"
        )
    if result.missing:
        limit, stage = result.missing[0]
        raise UsageError(
            f"--fail-if {limit.text!r}: stage {stage} of {base.label} or {new.label} has no "
            f"{limit.quantity.metric}; limit another quantity"
        )


def _remarks(
    base: Setting, new: Setting, found: Sequence[Differing], expected: Sequence[str], result: Result
) -> Iterator[str]:
    surprising = [one.name for one in unexpected(found, expected)]
    if len(found) > 1 and surprising:
        yield (
            f"{len(found)} settings differ, so no difference can be put down to one of them; change one at a time, or "
            f"name those that belong together with --expect-different (not named: {', '.join(surprising)})"
        )
    if min(len(base.runs), len(new.runs)) == 1:
        yield (
            "one run on a side: how much runs differ from each other (a restart, another node, the time of day) is "
            "not in the intervals; repeat runs, and give them with commas"
        )
    if result.paired:
        yield "the same arrivals were sent in both: each request is compared with its own counterpart"
    for run in (*base.runs, *new.runs):
        if run.summary["verdict"]["status"] != "valid":
            yield f"{shown(run.path)} is {run.summary['verdict']['status']} ({', '.join(run.codes)})"
    if any(run.failed_fraction for run in (*base.runs, *new.runs)):
        yield "some requests failed: in percentiles they are slower than everything"


def _unmatched(runs: Sequence[Mapping[str, StageSeries]]) -> Iterator[str]:
    alone = dict.fromkeys(key for run in runs for key in run if any(key not in other for other in runs))
    if alone:
        yield f"not in every run, and so not compared: stage {', '.join(alone)}"


def _comparison_json(
    new: Setting, found: Sequence[Differing], remarks: Sequence[str], result: Result
) -> dict[str, Any]:
    return {
        "new": new.as_json(),
        "paired": result.paired,
        "differing": [one.as_json() | {"text": one.text} for one in found],
        "remarks": list(remarks),
        "stages": result.stages_json(),
        "gates": [gate.as_json() for gate in result.gates],
    }


def scaling(paths: Sequence[str], tag: str, *, expect_different: str, allow_invalid: bool, outputs: Outputs) -> int:
    """Speed-up and efficiency over runs tagged ``TAG=NUMBER``."""
    sides = [Setting.read(path) for path in paths]
    for one_side, other_side in combinations(sides, 2):
        _refuse_the_same(one_side, other_side)
    _refuse_invalid(sides, allowed=allow_invalid)
    expected = _names(expect_different)
    _refuse_unknown_names(expected, sides)
    runs = [run for side in sides for run in side.runs]
    sized = []
    for run in runs:
        text = run.run["tags"].get(tag, "")
        if not (text.isascii() and text.isdecimal() and int(text) > 0):
            raise UsageError(f"{shown(run.path)}: it has no tag {tag}=NUMBER; run with --tag {tag}=1 and so on")
        one = best_stage(run.summary, size=int(text), label=shown(run.path))
        if one is None:
            raise UsageError(f"{shown(run.path)}: no stage of a steady load has output tokens; give another run")
        sized.append(one)
    if len({one.size for one in sized}) < 2:
        raise UsageError(f"--scaling {tag}: all runs have the same {tag}; give runs of two sizes at least")
    for other in runs[1:]:
        found = unexpected(differing(runs[0].settings, other.settings), ("load", "users", *expected))
        wrong = [one for one in found if one.must_agree]
        if wrong:
            said = "; ".join(one.text for one in wrong)
            raise UsageError(
                f"{shown(other.path)} is not like {shown(runs[0].path)}: {said}; repeat the run with the same settings"
            )
    points = scaling_curve(sized, tag)
    written = {"schema": SCHEMA, "tag": tag, "points": [point.as_json() for point in points]}
    outputs.write(written, render_scaling(written), lambda: render_scaling_markdown(written))
    return 0
