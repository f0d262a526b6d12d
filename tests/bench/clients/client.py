"""What the harness asks of a client."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.bench.accuracy import Reported
from tests.bench.placement import Placement, process_tree
from tests.bench.truth import Schedule


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of ``streams`` users that begin new requests for ``seconds``."""

    url: str
    port: int
    streams: int
    seconds: float
    schedule: Schedule
    work: Path
    placement: Placement
    prompt_bytes: int = 512

    @property
    def requests(self) -> int:
        """For clients that count requests instead of time."""
        rounds = max(2, round(self.seconds / self.schedule.request_s))
        return self.streams * rounds


class Session(Protocol):
    """One client at work."""

    def measured_pids(self) -> list[int]:
        """The processes whose CPU is the client's."""
        ...

    def exit_code(self) -> int | None: ...

    def stop(self) -> None:
        """Ends everything that is still there."""
        ...


class Client(Protocol):
    name: str
    exit_codes: frozenset[int]
    """Exit codes after which the report counts."""
    alone: bool
    """The client is one process: run-queue delay then comes from neighbours, and a disturbed run is repeated."""

    def prepare(self) -> None:
        """Installs what it needs. Raises RuntimeError with the reason where it cannot."""
        ...

    def version(self) -> str: ...

    def start(self, load: Load) -> Session: ...

    def read_report(self, load: Load) -> Reported: ...


class OneProcess:
    """A session of one command, with whatever it starts, on the client's core. Output goes to ``client.log``."""

    def __init__(
        self,
        argv: Sequence[str],
        load: Load,
        env: Mapping[str, str] | None = None,
        *,
        alone: bool,
        without: Collection[str] = (),
    ) -> None:
        """``without``: variables that the command must not see."""
        inherited = {name: value for name, value in os.environ.items() if name not in without}
        with (load.work / "client.log").open("wb") as log:
            self.process = subprocess.Popen(
                load.placement.client_argv(list(argv), alone=alone),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=load.work,
                env={**inherited, **(env or {})},
                start_new_session=True,
            )

    def measured_pids(self) -> list[int]:
        return process_tree(self.process.pid)

    def exit_code(self) -> int | None:
        return self.process.poll()

    def stop(self) -> None:
        end_tree(self.process)


def end_tree(process: subprocess.Popen[bytes], patience_s: float = 5.0) -> None:
    """SIGTERM to the process, then SIGKILL to all that it started: nothing that spins may stay on a core."""
    with contextlib.ExitStack() as handles:
        started = []
        for pid in process_tree(process.pid)[1:]:
            with contextlib.suppress(ProcessLookupError):
                started.append(os.pidfd_open(pid))
                handles.callback(os.close, started[-1])
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
        for handle in started:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
