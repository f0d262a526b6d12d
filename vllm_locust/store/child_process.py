"""How this package starts a process of its own: by exec, deaf to the terminal's Ctrl-C, with its orders on standard
input.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import vllm_locust

_NOT_FOR_CHILDREN: Final = ("OPENAI_API_KEY",)
"""Whoever needs it is told it in its orders."""
_PACKAGE_PARENT = str(Path(vllm_locust.__file__).parent.parent)


def start_module(module: str, first_line: str) -> subprocess.Popen[bytes]:
    """Run ``python -m module``. Its standard input stays open, and the end of it tells that the parent is gone."""
    path = os.pathsep.join(filter(None, (_PACKAGE_PARENT, os.environ.get("PYTHONPATH"))))
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_CHILDREN}
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=kept | {"PYTHONPATH": path},
        start_new_session=True,
    )
    send_line(process, first_line)
    return process


def send_line(process: subprocess.Popen[bytes], line: str) -> None:
    """Write one line of orders; a child that has ended does not get it."""
    assert process.stdin is not None
    try:
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
    except (BrokenPipeError, ValueError):
        return
