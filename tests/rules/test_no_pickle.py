"""Nothing that comes off a network or a disk is turned into code: no pickle, by whatever name, and no eval."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml

from tests.rules.test_imports import PACKAGE, imports, modules
from vllm_locust.workload import spec_reader

ROOT = PACKAGE.parent
UNPICKLERS = {
    "pickle",
    "_pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "jsonpickle",
    "xmlrpc",
}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {"unsafe_load", "full_load", "load_all", "read_pickle", "to_pickle", "deserialize"}
ALL = [*modules(), *sorted((ROOT / "locustfiles").glob("*.py")), *sorted((ROOT / "workloads").glob("*.py"))]


def unsafe(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append("allow_pickle")
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in CALLS:
                found.append(called.id)
            if isinstance(called, ast.Attribute):
                place = ast.unparse(called.value)
                loader = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "Loader"]
                is_load = (place, called.attr) == ("yaml", "load") and loader != ["_StrictLoader"]
                if called.attr in METHODS or is_load:
                    found.append(f"{place}.{called.attr}")
    return found


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_unpickled(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & UNPICKLERS
    assert not unsafe(path.read_text(encoding="utf-8"))


def test_the_loader_of_workloads_makes_plain_values_only() -> None:
    assert issubclass(spec_reader._StrictLoader, yaml.SafeLoader)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("numpy.load(f, allow_pickle=True)", ["allow_pickle"]),
        ("eval('1')", ["eval"]),
        ("yaml.load(f, Loader)", ["yaml.load"]),
        ("pa.deserialize(b)", ["pa.deserialize"]),
        ("json.loads(t); re.compile(p); yaml.safe_load(f)", []),
    ],
)
def test_the_search_finds_it(source: str, found: list[str]) -> None:
    assert unsafe(source) == found
