"""Compiles the two C programs into ``bin/``."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
BIN = HERE / "bin"


def program(name: str) -> Path:
    """The compiled program, made again when its source is newer. One rename, so that two builds at once do no harm."""
    source, target = HERE / f"{name}.c", BIN / name
    if target.exists() and target.stat().st_mtime >= source.stat().st_mtime:
        return target
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError(f"{source.name} needs a C compiler and none was found: install gcc or set CC")
    BIN.mkdir(exist_ok=True)
    fresh = BIN / f"{name}.{os.getpid()}"
    subprocess.run([compiler, "-O2", "-std=gnu11", "-Wall", "-Wextra", "-o", str(fresh), str(source)], check=True)
    fresh.replace(target)
    return target
