"""Throw-away environments for the peers, from the package index. An environment variable may name one that exists."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / ".bench-venvs"


def python_of(tool: str, variable: str, requirements: list[str]) -> Path:
    """The interpreter that has the tool. The index is asked once; pip's own settings (PIP_CONSTRAINT …) are obeyed."""
    given = os.environ.get(variable)
    if given:
        if not Path(given).exists():
            raise RuntimeError(f"{variable}={given} does not exist: name a Python interpreter that has {tool}")
        return Path(given)
    home = ROOT / tool
    python, stamp = home / "bin" / "python", home / "installed.txt"
    wanted = "\n".join(requirements)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    if not python.exists():
        venv.EnvBuilder(with_pip=True).create(home)
    print(f"installing {tool} into {home} …", file=sys.stderr)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{tool} could not be installed ({last}): set {variable} to an interpreter that has it")
    stamp.write_text(wanted)
    return python


def distribution_version(python: Path, *names: str) -> str:
    """The first of these distributions that the interpreter has."""
    code = (
        "import sys, importlib.metadata as m\n"
        "for n in sys.argv[1:]:\n"
        "    try: print(n, m.version(n)); break\n"
        "    except m.PackageNotFoundError: pass\n"
    )
    return subprocess.run([str(python), "-c", code, *names], capture_output=True, text=True).stdout.strip() or "unknown"
