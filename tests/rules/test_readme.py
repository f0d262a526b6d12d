"""The README keeps up with the product: it names what exists, and leaves nothing out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from vllm_locust.outcome import Outcome
from vllm_locust.store.finalize import REQUESTS_PARQUET_ORDER
from vllm_locust.verdict.judge import RULES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROSE = re.sub(r"<!-- metrics -->.*?<!-- /metrics -->", "", README, flags=re.DOTALL)
"""The table of metrics is generated, and compared with its source elsewhere."""

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
OF_OTHER_PROGRAMS = {
    "--tensor-parallel-size",  # vLLM
    "--data-parallel-size",  # vLLM
    "--enable-metrics",  # SGLang
    "--metrics",  # llama.cpp
    "--collect-interval",  # dcgm-exporter
    *("--aclfile", "--save", "--maxmemory", "--maxmemory-policy"),  # Valkey
    *("--tls-port", "--tls-cert-file", "--tls-key-file", "--tls-auth-clients"),  # Valkey
}
PARSERS = """
import argparse, inspect, json
from locust.argument_parser import get_empty_argument_parser, setup_parser_arguments
from vllm_locust.cli import _parser as command
from vllm_locust.run.capacity.command import _parser as capacity
from vllm_locust.run.flags import add_flags
from vllm_locust.simserver.settings import _parser as simserver

def options(parser):
    found = []
    for action in parser._actions:
        found += [option for option in action.option_strings if option.startswith("--")]
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                found += options(sub)
    return found

locust, own = get_empty_argument_parser(), argparse.ArgumentParser()
setup_parser_arguments(locust)

class Plain:
    def add_argument_group(self, name):
        return self
    def add_argument(self, *names, env_var=None, **settings):
        return own.add_argument(*names, **settings)

add_flags(Plain())
print(json.dumps({
    "own": options(own),
    "others": options(locust) + options(command()) + options(capacity()) + options(simserver()),
}))
"""


@cache
def flags() -> dict[str, set[str]]:
    """From a process of its own, since importing Locust patches the one that does it."""
    done = subprocess.run([sys.executable, "-c", PARSERS], capture_output=True, text=True, check=True)
    return {name: set(options) for name, options in json.loads(done.stdout).items()}


def section(title: str) -> str:
    """What stands under a heading, up to the next one of the same or a higher level."""
    found = re.search(rf"^(##+) {re.escape(title)}\n(.*?)(?=^##? |\Z)", README, re.DOTALL | re.MULTILINE)
    assert found is not None, f"the README has no section {title}"
    return found[2]


def first_cells(title: str) -> set[str]:
    """Every name in backquotes in the first column of a section's tables."""
    rows = re.findall(r"^\| (.*?) \|", section(title), re.MULTILINE)
    return {name for cell in rows for name in re.findall(r"`([^`]+)`", cell)}


def verdict_codes() -> set[str]:
    """Every first argument of a ``Reason`` in the rules."""
    modules = (ROOT / "vllm_locust" / name for name in ("verdict/judge.py", "verdict/delivered_load.py"))
    source = "".join(module.read_text(encoding="utf-8") for module in modules)
    codes = set(re.findall(r'Reason\(\s*"([a-z_]+)"', source))
    assert len(codes) >= len(RULES)
    return codes


def shipped(pattern: str) -> Iterable[str]:
    names = sorted(path.name for path in ROOT.glob(pattern))
    assert names, f"nothing is shipped as {pattern}"
    return names


def test_every_flag_in_the_readme_exists() -> None:
    named = set(FLAG.findall(PROSE))
    assert len(named) > 40
    assert named - flags()["own"] - flags()["others"] == OF_OTHER_PROGRAMS


def test_every_flag_of_the_package_is_in_the_table_of_flags() -> None:
    own = flags()["own"] - {"--help"}
    assert len(own) > 30
    assert {name for name in first_cells("Flags") if name.startswith("--")} == own


def test_every_outcome_is_explained() -> None:
    assert first_cells("Outcomes") == {str(outcome) for outcome in Outcome}


def test_every_reason_of_the_verdict_is_explained() -> None:
    assert first_cells("Reasons of the verdict") == verdict_codes()


def test_every_column_of_the_requests_is_explained() -> None:
    assert first_cells("Columns of requests.parquet") == set(REQUESTS_PARQUET_ORDER)


def test_every_workload_and_locustfile_is_named() -> None:
    assert {Path(name).stem for name in shipped("workloads/*.yaml")} <= first_cells("Workloads")
    for name in shipped("locustfiles/*.py"):
        assert f"locustfiles/{name}" in README


@pytest.mark.parametrize("place", sorted(set(re.findall(r"\]\((?!https?://)([^)\s]+)\)", README))))
def test_links_lead_somewhere(place: str) -> None:
    path, _, anchor = place.partition("#")
    assert (ROOT / path).exists(), f"{place} does not exist"
    if anchor:
        titles = re.findall(r"^#+ (.+)$", README, re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        assert anchor in anchors, f"{place} is no heading"
