"""What the package promises about itself: version, changelog, licence, top level, public names."""

from __future__ import annotations

import re
import subprocess
import tomllib
import zipfile
from pathlib import Path

import vllm_locust
from vllm_locust.metrics import markdown_table

ROOT = Path(__file__).parents[2]
TOP_LEVEL = {
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "k8s",
    "locustfiles",
    "pyproject.toml",
    "tests",
    "vllm_locust",
    "workloads",
}


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def test_top_level_holds_nothing_else() -> None:
    names = {name.split("/")[0] for name in tracked()}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL


def test_changelog_starts_with_the_version_or_what_is_unreleased() -> None:
    first = re.search(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert first is not None
    assert first[1] in ("Unreleased", vllm_locust.__version__)


def test_licence_is_the_one_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_readme_shows_the_catalogue_of_metrics() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- metrics -->\n(.*?)\n<!-- /metrics -->", readme, re.DOTALL)
    assert shown is not None
    assert shown[1].strip() == markdown_table().strip()


def test_readme_names_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make demo" in readme
    assert "make test" in readme


def test_public_names_exist() -> None:
    for name in vllm_locust.__all__:
        if "User" not in name:  # importing Locust patches the process: the run tests import it in one of their own
            assert getattr(vllm_locust, name)


def test_wheel_carries_its_data(tmp_path: Path) -> None:
    import sys

    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("vllm_locust-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "vllm_locust/py.typed" in names
    assert "vllm_locust/data/locustfiles/chat.py" in names
    assert "vllm_locust/data/workloads/sharegpt.yaml" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("report.html.j2") for name in names)
    assert not any(name.startswith("tests/") for name in names)
