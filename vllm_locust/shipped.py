"""What is shipped: locustfiles, workloads, shapes and the ACL, beside the package in a checkout, in it once installed;
and the library that draws.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Final, Literal

from vllm_locust.errors import UsageError

_Kind = Literal["locustfiles", "workloads", "k8s"]
_FILES: Final[tuple[tuple[_Kind, str], ...]] = (
    ("locustfiles", "*.py"),
    ("workloads", "*.yaml"),
    ("workloads", "shapes/*.yaml"),
    ("k8s", "secrets/redis.acl"),
)
"""What a user may name; a workload's data and the script that made it lie beside it."""


def shipped_directory(kind: _Kind) -> Path:
    package = Path(str(resources.files("vllm_locust")))
    installed = package / "data" / kind
    return installed if installed.is_dir() else package.parent / kind


def shipped_path(name: str) -> Path:
    """The file ``name``, such as ``chat.py`` or ``sharegpt.yaml``; ``chat`` alone is enough. Raises UsageError."""
    files = [path for kind, pattern in _FILES for path in sorted(shipped_directory(kind).glob(pattern))]
    for path in files:
        if name in (path.name, path.stem):
            return path
    names = ", ".join(path.name for path in files)
    raise UsageError(f"path {name}: nothing of that name is shipped; use one of {names}")


def chart_library() -> str:
    """Apache ECharts as one script, without ``</script`` or ``<!--`` in it, so that a page may hold it as it is."""
    return resources.files("vllm_locust").joinpath("report", "assets", "echarts.min.js").read_text(encoding="utf-8")
