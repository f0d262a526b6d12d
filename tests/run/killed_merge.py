"""``python -m tests.run.killed_merge DIR STEP``: a merge that is killed right before its STEP-th file gets its name.

It ends by itself where the merge has fewer steps.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from vllm_locust.cli import main

_replace = Path.replace


def kill_at(step: int) -> None:
    done = 0

    def replace(self: Path, target: Path) -> Path:
        nonlocal done
        done += 1
        if done == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return _replace(self, target)

    Path.replace = replace  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    kill_at(int(sys.argv[2]))
    sys.exit(main(["merge", sys.argv[1]]))
