"""Where the shipped locustfiles and workloads lie: beside the package in a checkout, inside it once installed."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Literal

from vllm_locust.errors import UsageError

KINDS: tuple[Literal["locustfiles", "workloads"], ...] = ("locustfiles", "workloads")


def shipped_directory(kind: Literal["locustfiles", "workloads"]) -> Path:
    package = Path(str(resources.files("vllm_locust")))
    installed = package / "data" / kind
    return installed if installed.is_dir() else package.parent / kind


def shipped_path(name: str) -> Path:
    """The file ``name``, such as ``chat.py`` or ``sharegpt.yaml``; ``chat`` alone is enough. Raises UsageError."""
    known = {}
    for kind in KINDS:
        for path in sorted(shipped_directory(kind).iterdir()):
            if path.is_file() and path.suffix in (".py", ".yaml"):
                known[path.name] = path
                known.setdefault(path.stem, path)
    if name not in known:
        raise UsageError(f"path {name}: nothing of that name is shipped; use one of {', '.join(sorted(known))}")
    return known[name]
