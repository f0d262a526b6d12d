"""Where the files of a run are, and how they are written: whole or not at all, in JSON that every reader accepts."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from vllm_locust.errors import StoreError, UsageError
from vllm_locust.store.durable_file import GOOD_COPY, atomic_path
from vllm_locust.telemetry import TelemetryKind


@dataclass(frozen=True, slots=True)
class RunDirectory:
    path: Path
    is_new: bool = field(default=False, compare=False)
    """It was made for this run."""

    def refuse_name(self) -> None:
        """Raises ``UsageError`` where it is not UTF-8: Parquet files and the workers know their paths as such."""
        try:
            str(self.path.absolute()).encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"the run directory {str(self.path)!r}: its name, or one above it, is not UTF-8; give another one"
            ) from None

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """A new directory for a run. Raises ``UsageError`` where there is one with a run in it."""
        made = cls(path, is_new=not path.exists())
        made.refuse_name()
        made.refuse_run()
        made.make()
        return made

    def forget_start(self) -> None:
        """Remove what a start has left that was refused before any load was sent: it is no run, and the next start may
        have the same directory. What cannot be removed stays.
        """
        shutil.rmtree(self.parts, ignore_errors=True)
        with suppress(OSError):
            self.run_json.unlink(missing_ok=True)
        with suppress(OSError):  # not empty: it holds what is not of this start
            (self.path / "spool").rmdir()
        with suppress(OSError):
            if self.is_new:
                self.path.rmdir()

    def make(self) -> None:
        """Where there is none yet."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise StoreError(f"the run directory {self.path} cannot be made: {exc.strerror}") from exc

    @classmethod
    def create_next(cls, path: Path) -> RunDirectory:
        """The first of ``path``, ``path-2``, ``path-3`` … that holds no run yet."""
        numbered = (path if number == 1 else path.with_name(f"{path.name}-{number}") for number in count(1))
        return cls.create(next(candidate for candidate in numbered if not cls(candidate).holds_run))

    @property
    def holds_run(self) -> bool:
        return self.run_json.exists() or self.parts.exists()

    def refuse_run(self) -> None:
        if self.holds_run:
            raise UsageError(f"--run-dir {self.path}: the directory holds a run already; give another one")

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def summary_json(self) -> Path:
        return self.path / "summary.json"

    @property
    def capacity_json(self) -> Path:
        """There only where the capacity was searched for."""
        return self.path / "capacity.json"

    @property
    def report_html(self) -> Path:
        return self.path / "report.html"

    @property
    def report_txt(self) -> Path:
        return self.path / "report.txt"

    @property
    def requests_parquet(self) -> Path:
        return self.path / "requests.parquet"

    @property
    def arrivals_parquet(self) -> Path:
        return self.path / "arrivals.parquet"

    @property
    def workers_parquet(self) -> Path:
        return self.path / "workers.parquet"

    def telemetry_parquet(self, kind: TelemetryKind) -> Path:
        """There only where something was sampled."""
        return self.path / f"{kind.value}.parquet"

    @property
    def parts(self) -> Path:
        """What the recorder wrote while the run went on."""
        return self.path / "parts"

    @property
    def telemetry_parts(self) -> Path:
        return self.parts / "telemetry"

    @property
    def merge_lock(self) -> Path:
        return self.path / ".merge.lock"

    @property
    def recorder_json(self) -> Path:
        return self.parts / "recorder.json"

    @property
    def control_json(self) -> Path:
        """The run's control fields as the recorder last saw them."""
        return self.parts / "control.json"


def json_text(value: object) -> str:
    """Strict JSON: NaN and infinity are a ValueError, since no other reader has them."""
    return json.dumps(value, allow_nan=False, indent=2) + "\n"


def write_json(path: Path, value: object) -> None:
    """Raises StoreError where the value is no strict JSON."""
    try:
        text = json_text(value)
    except (TypeError, ValueError) as exc:
        raise StoreError(f"{path} cannot be written as JSON: {exc}") from exc
    write_text(path, text)


def write_text(path: Path, text: str) -> None:
    try:
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise StoreError(f"{path} cannot be written: {exc.strerror or exc}") from exc


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:40]} is no number of JSON")
    return number


def read_json(path: Path) -> Any:
    """Raises ``StoreError`` where it cannot be read, or is no JSON."""
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is no regular file")
        return json.loads(path.read_text(encoding="utf-8"), parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise StoreError(f"{path} cannot be read: it is nested too deeply; {GOOD_COPY}") from None
    except (OSError, ValueError) as exc:
        raise StoreError(f"{path} cannot be read: {exc}; {GOOD_COPY}") from exc


def read_json_object(path: Path) -> dict[str, Any]:
    """Raises ``StoreError`` where it holds something else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise StoreError(f"{path} is damaged: it holds no JSON object; {GOOD_COPY}")
    return value
