"""``vllm-locust compare``: runs of one setting against runs of another, and scaling curves over many."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Self

from vllm_locust.comparison.likeness import Differing, differing, known_names, settings, unexpected
from vllm_locust.comparison.limit import Limit
from vllm_locust.comparison.result import FAILED, UNDECIDED, Result, StageKey, hold_against, stage_keys, stage_text
from vllm_locust.comparison.scaling import best_stage, scaling_curve
from vllm_locust.comparison.series import StageSeries
from vllm_locust.errors import InvalidMeasurement, SloMissed, UsageError
from vllm_locust.report.comparison_junit import render_junit
from vllm_locust.report.comparison_markdown import render_markdown, render_scaling_markdown
from vllm_locust.report.comparison_text import render_comparison, render_scaling
from vllm_locust.report.run_facts import RunFacts
from vllm_locust.report.stage_series import read_stage_series
from vllm_locust.store.rundir import RunDirectory, read_json, write_json, write_text

SCHEMA = 1
STDOUT = "-"


@dataclass(frozen=True, slots=True)
class ComparedRun:
    path: Path
    run: Mapping[str, Any]
    summary: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Self:
        directory = RunDirectory(path)
        for needed in (directory.run_json, directory.summary_json, directory.requests_parquet):
            if not needed.is_file():
                raise UsageError(f"{path}: {needed.name} is missing; give the directory of a run that was merged")
        return cls(path, read_json(directory.run_json), read_json(directory.summary_json))

    @property
    def settings(self) -> dict[str, Any]:
        return settings(self.run, self.summary)

    @property
    def plan(self) -> tuple[Any, ...] | None:
        """What tells that the same requests were planned at the same times; None in a closed loop."""
        schedule = self.run["schedule"]
        if schedule is None:
            return None
        return schedule["fingerprint"], self.run["workload"]["fingerprint"], self.run["config"]["seed"]

    def stage_series(self) -> dict[StageKey, StageSeries]:
        series = read_stage_series(self.run, RunDirectory(self.path).requests_parquet)
        stages = RunFacts.from_run(self.run).stages
        keys = stage_keys([stage.name for stage in stages])
        return {key: series[stage.index] for key, stage in zip(keys, stages, strict=True) if stage.index in series}

    def as_json(self) -> dict[str, Any]:
        return {
            "run_dir": str(self.path),
            "run_id": self.summary["run_id"],
            "run_name": self.summary["run_name"],
            "verdict": self.summary["verdict"]["status"],
        }


@dataclass(frozen=True, slots=True)
class Setting:
    """One or more runs of the same setting."""

    label: str
    runs: tuple[ComparedRun, ...]

    @classmethod
    def read(cls, text: str) -> Self:
        """``DIR`` or ``DIR,DIR,…``. A directory whose name has a comma is taken as one."""
        paths = [text] if Path(text).is_dir() else [part for part in text.split(",") if part]
        resolved = [Path(path).resolve() for path in paths]
        if len(set(resolved)) < len(resolved):
            raise UsageError(f"{text}: a run is named twice; a repeated run is another run of the same setting")
        return cls(text, tuple(ComparedRun.read(Path(path)) for path in paths))

    def as_json(self) -> dict[str, Any]:
        return {"label": self.label, "runs": [run.as_json() for run in self.runs]}


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
        expected = [name.strip() for name in expect_different.split(",") if name.strip()]
        return cls(base=base, news=news, limits=limits, expect_different=expected, allow_invalid=allow_invalid)


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files, ``-`` for the standard output; None: not asked for."""

    markdown: str | None = None
    junit: str | None = None
    json: str | None = None

    def write(self, result: Mapping[str, Any], text: str, markdown: Callable[[], str]) -> None:
        """The text goes to the standard output unless something else does."""
        if self.markdown == STDOUT:
            sys.stdout.write(markdown())
        else:
            sys.stdout.write(text)
            if self.markdown is not None:
                write_text(Path(self.markdown), markdown())
        if self.junit is not None:
            write_text(Path(self.junit), render_junit(result))
        if self.json is not None:
            write_json(Path(self.json), result)


def compare_runs(order: CompareOrder, outputs: Outputs) -> int:
    """Print and write what was found. Raises SloMissed on a regression, InvalidMeasurement where a run must not be
    believed or a limit cannot be decided, UsageError where runs are not alike.
    """
    base = Setting.read(order.base)
    news = [Setting.read(text) for text in order.news]
    _refuse_invalid([base, *news], allowed=order.allow_invalid)
    _refuse_unknown_names(order.expect_different, [base, *news])
    differences = [_checked_differences(base, new, order.expect_different) for new in news]
    base_series = [run.stage_series() for run in base.runs]
    comparisons = []
    for new, found in zip(news, differences, strict=True):
        series = [run.stage_series() for run in new.runs]
        same_schedule = base.runs[0].plan is not None and base.runs[0].plan == new.runs[0].plan
        result = hold_against(base_series, series, order.limits, same_schedule=same_schedule)
        _refuse_empty(result, base, new)
        remarks = [*_remarks(base, new, found, order.expect_different, result), *_unmatched(base_series + series)]
        comparisons.append(_comparison_json(new, found, remarks, result))
    written = {"schema": SCHEMA, "base": base.as_json(), "comparisons": comparisons}
    outputs.write(written, render_comparison(written), lambda: render_markdown(written))
    return _verdict([gate for one in comparisons for gate in one["gates"]])


def _verdict(gates: Sequence[Mapping[str, Any]]) -> int:
    failed, undecided = ([gate for gate in gates if gate["status"] == status] for status in (FAILED, UNDECIDED))
    if failed:
        raise SloMissed(f"a regression: {'; '.join(_gate_words(failed))}")
    if undecided:
        raise InvalidMeasurement(
            f"a limit cannot be decided: {'; '.join(_gate_words(undecided))}; measure longer, or limit another quantity"
        )
    return 0


def _gate_words(gates: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for gate in gates:
        reason = f" ({gate['undecided']})" if gate["undecided"] else ""
        yield f"{gate['fail_if']} in stage {gate['stage']}{reason}"


def _refuse_invalid(sides: Sequence[Setting], *, allowed: bool) -> None:
    invalid = [run for side in sides for run in side.runs if run.summary["verdict"]["status"] == "invalid"]
    if invalid and not allowed:
        run = invalid[0]
        reason = next(iter(run.summary["verdict"]["reasons"]), {"sentence": "no reason is given"})["sentence"]
        raise InvalidMeasurement(
            f"{run.path}: the measurement is invalid ({reason}); repeat the run, or give --allow-invalid"
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
            f"--fail-if {limit.text!r}: stage {stage_text(stage)} of {base.label} or {new.label} has no "
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
            codes = ", ".join(reason["code"] for reason in run.summary["verdict"]["reasons"])
            yield f"{run.path} is {run.summary['verdict']['status']} ({codes})"
    if any(run.summary["totals"]["failed_fraction"] for run in (*base.runs, *new.runs)):
        yield "some requests failed: in percentiles they are slower than everything"


def _unmatched(runs: Sequence[Mapping[StageKey, StageSeries]]) -> Iterator[str]:
    alone = dict.fromkeys(key for run in runs for key in run if any(key not in other for other in runs))
    if alone:
        yield f"not in every run, and so not compared: stage {', '.join(stage_text(key) for key in alone)}"


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


def scaling(paths: Sequence[str], tag: str, *, allow_invalid: bool, outputs: Outputs) -> int:
    """Speed-up and efficiency over runs tagged ``TAG=NUMBER``."""
    sides = [Setting.read(path) for path in paths]
    _refuse_invalid(sides, allowed=allow_invalid)
    runs = [run for side in sides for run in side.runs]
    sized = []
    for run in runs:
        text = run.run["tags"].get(tag, "")
        if not (text.isascii() and text.isdecimal() and int(text) > 0):
            raise UsageError(f"{run.path}: it has no tag {tag}=NUMBER; run with --tag {tag}=1 and so on")
        one = best_stage(run.summary, size=int(text), label=str(run.path))
        if one is None:
            raise UsageError(f"{run.path}: no stage of a steady load has output tokens; give another run")
        sized.append(one)
    if len({one.size for one in sized}) < 2:
        raise UsageError(f"--scaling {tag}: all runs have the same {tag}; give runs of two sizes at least")
    for other in runs[1:]:
        wrong = [one for one in differing(runs[0].settings, other.settings) if one.must_agree]
        wrong = [one for one in wrong if one.name not in ("load", "users")]
        if wrong:
            said = "; ".join(one.text for one in wrong)
            raise UsageError(f"{other.path} is not like {runs[0].path}: {said}; repeat the run with the same settings")
    points = scaling_curve(sized, tag)
    written = {"schema": SCHEMA, "tag": tag, "points": [point.as_json() for point in points]}
    outputs.write(written, render_scaling(written), lambda: render_scaling_markdown(written))
    return 0
