"""``experiments.csv`` beside the run directories: a line for each, brought up to date when it is merged again."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from vllm_locust import clock
from vllm_locust.errors import StoreError
from vllm_locust.export.headline import experiment
from vllm_locust.export.spreadsheet import with_row
from vllm_locust.store.lock_file import try_lock
from vllm_locust.store.rundir import RunDirectory, write_text

NAME: Final = "experiments.csv"
_LOCK: Final = f".{NAME}.lock"
_WAIT_NS: Final = 30_000_000_000


def record_experiment(run_dir: RunDirectory, run: Mapping[str, Any], summary: Mapping[str, Any]) -> Path:
    """Put the run's line into the table, under a lock, whole or not at all. Raises StoreError where that is not
    possible: a table that cannot be read is left as it is. A run that was merged into another directory as well,
    perhaps from fewer records, has a line for each.
    """
    row = experiment(run, summary) | {"run_dir": run_dir.path.resolve().name}
    directory = run_dir.path.resolve().parent
    path = directory / NAME
    lock = _locked(directory / _LOCK)
    try:
        for leftover in directory.glob(f".{NAME}.*.tmp"):  # of a merge that was killed
            leftover.unlink()
        # A spreadsheet saves it with a byte order mark.
        text = path.read_text(encoding="utf-8-sig") if path.exists() else ""
        write_text(path, with_row(text, row, ("run_id", "run_dir")))
    except (OSError, UnicodeDecodeError, ValueError, csv.Error) as error:
        raise StoreError(
            f"{path} cannot take the run's line: {error}; move it away, and report the run anew"
        ) from error
    finally:
        os.close(lock)
    return path


def _locked(path: Path) -> int:
    deadline_ns = clock.monotonic_ns() + _WAIT_NS
    while (lock := try_lock(path)) is None:
        if clock.monotonic_ns() > deadline_ns:
            raise StoreError(f"{path} is held by another process for 30 s; end it, and report the run again")
        clock.sleep(0.05)
    return lock
