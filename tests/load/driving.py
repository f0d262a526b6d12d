"""The tests' side of ``drive``: calls in, facts out. One process per transport serves all tests."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

Facts = dict[str, Any]

_PROCESSES: dict[str, subprocess.Popen[str]] = {}


def drive(
    transport: str,
    *rounds: list[list[Facts]],
    tls: dict[str, Any] | None = None,
    proxy: str | None = None,
    open_files: int | None = None,
    environment: dict[str, str] | None = None,
) -> dict[str, Facts]:
    """Facts by the calls' names. Rounds follow one another; the sequences of a round run at the same time, each call by
    call."""
    plan = {
        "transport": transport,
        "rounds": rounds,
        "tls": tls or {},
        "proxy": proxy,
        "open_files": open_files,
        "environment": environment or {},
    }
    process = _process(transport)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(plan) + "\n")
    process.stdin.flush()
    facts: dict[str, Facts] = {}
    for line in process.stdout:
        if line == "end\n":
            break
        if not line.startswith("{"):
            # It would go on waiting for the next plan, and whoever reads to the end for it.
            process.kill()
            raise AssertionError(line + process.stdout.read())
        entry = json.loads(line)
        facts[entry["name"]] = entry
    assert len(facts) == sum(len(sequence) for sequences in rounds for sequence in sequences)
    return facts


def _process(transport: str) -> subprocess.Popen[str]:
    process = _PROCESSES.get(transport)
    if process is None or process.poll() is not None:
        process = _PROCESSES[transport] = subprocess.Popen(
            [sys.executable, "-m", "tests.load.drive"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    return process


def close_drivers() -> None:
    for process in _PROCESSES.values():
        process.communicate(timeout=10)
    _PROCESSES.clear()


def call(name: str, url: str, *, streamed: bool = True, **more: Any) -> Facts:
    return {"name": name, "url": url, "streamed": streamed, **more}
