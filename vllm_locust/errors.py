"""Every error that this package raises on purpose, as one tree. The exit code sits on the class.

VllmLocustError                exit 1
├── UsageError                 exit 2   a flag, a file or a combination of them cannot be used
│   ├── WorkloadError          exit 2   a workload or data set cannot be read, or holds nothing usable
│   └── TargetError            exit 2   the server refused the preflight: URL, key, model, stream options
├── RunFailed                  exit 1   nothing was measured, too many failures, workers or records lost
│   └── StoreError             exit 1   Redis, the spool or the run directory could not be used
├── InvalidMeasurement         exit 4   the generator's own error moved a reported number
└── SloMissed                  exit 3   a per-stage SLO was missed, or a regression was found
"""

from __future__ import annotations

from typing import ClassVar


class VllmLocustError(Exception):
    """Root of the tree. The message is one sentence that names the input, the reason and the fix."""

    exit_code: ClassVar[int] = 1

    @property
    def problems(self) -> tuple[str, ...]:
        """What to tell the user, a line each."""
        return (str(self),)


class UsageError(VllmLocustError):
    """Raised before any load is sent. ``problems`` holds every fault found, not only the first."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self._problems = problems

    @property
    def problems(self) -> tuple[str, ...]:
        return self._problems


class WorkloadError(UsageError):
    """A workload file cannot be read or has nothing usable in it. Correct the file or the name."""


class NoGpu(UsageError):
    """No GPU of this host can be read. The message says why; the fix is the caller's, who knows what was asked for."""


class TargetError(UsageError):
    """The server's answer to the preflight rules the run out. Correct the URL, the key or the model."""


class RunFailed(VllmLocustError):
    """The run ended, its files are written, and it failed. Read the reasons in ``summary.json``."""


class StoreError(RunFailed):
    """Records could not be kept where they belong. The message names where they are now."""


class InvalidMeasurement(VllmLocustError):
    """The run is complete, but its numbers must not be believed. Read the verdict's reasons."""

    exit_code = 4


class SloMissed(VllmLocustError):
    """The measurement is good and the server is not: a per-stage SLO was missed."""

    exit_code = 3


def one_line(error: Exception) -> str:
    """What a library says of a fault, without its line breaks and control characters."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in str(error)).split())
