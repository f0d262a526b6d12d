"""The runs that ``vllm-locust compare`` is given, as they were written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from vllm_locust.comparison.likeness import settings
from vllm_locust.comparison.series import StageSeries
from vllm_locust.errors import StoreError, UsageError
from vllm_locust.report.run_facts import RunFacts
from vllm_locust.report.stage_series import read_stage_series
from vllm_locust.report.summary import SCHEMA as SUMMARY_SCHEMA
from vllm_locust.store.rundir import RunDirectory, read_json


def shown(path: Path | str) -> str:
    """As text that can be written, also where a name is no UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


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
                raise UsageError(
                    f"{shown(path)}: {needed.name} is missing; give the directory of a run that was merged"
                )
        try:
            read = cls(path, read_json(directory.run_json), read_json(directory.summary_json))
            read.check()
        except StoreError as error:
            raise UsageError(f"{error}; report the run anew, or give another one") from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UsageError(
                f"{shown(path)}: run.json or summary.json is not that of a merged run ({type(error).__name__}: "
                f"{error}); report the run anew, or give another one"
            ) from error
        return read

    def check(self) -> None:
        """Raises KeyError, TypeError, AttributeError or ValueError where what is looked at later is not there."""
        if self.summary["schema"] != SUMMARY_SCHEMA:
            raise ValueError(f"schema {self.summary['schema']!r}")
        RunFacts.from_run(self.run)
        _ = self.settings, self.plan, self.as_json(), self.codes, self.failed_fraction, self.summary["stages"]

    @property
    def codes(self) -> list[str]:
        return [reason["code"] for reason in self.summary["verdict"]["reasons"]]

    @property
    def failed_fraction(self) -> float | None:
        fraction: float | None = self.summary["totals"]["failed_fraction"]
        return fraction

    @property
    def run_id(self) -> str:
        return str(self.run["run_id"])

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

    def stage_series(self) -> dict[str, StageSeries]:
        path = RunDirectory(self.path).requests_parquet
        try:
            series = read_stage_series(self.run, path)
        except StoreError as error:
            raise UsageError(f"{error}, or give another one") from error
        except (pa.ArrowException, OSError, KeyError) as error:
            raise UsageError(
                f"{shown(path)} cannot be read ({error}); merge the run anew, or give another one"
            ) from error
        stages = RunFacts.from_run(self.run).stages
        return {stage.name: series[stage.index] for stage in stages if stage.index in series}

    def as_json(self) -> dict[str, Any]:
        return {
            "run_dir": shown(self.path),
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
        if not paths:
            raise UsageError(f"{text!r} names no run; give a run directory, or several with commas")
        runs = tuple(ComparedRun.read(Path(path)) for path in paths)
        if len({run.run_id for run in runs}) < len(runs):
            raise UsageError(f"{shown(text)}: a run is named twice; a repeated run is another run of the same setting")
        return cls(shown(text), runs)

    def as_json(self) -> dict[str, Any]:
        return {"label": self.label, "runs": [run.as_json() for run in self.runs]}
