"""What the package promises about itself: version, changelog, licence, top level, public names."""

from __future__ import annotations

import re
import subprocess
import tomllib
import zipfile
from hashlib import sha256
from pathlib import Path

import vllm_locust
from vllm_locust.metrics import markdown_table
from vllm_locust.shipped import chart_library

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

ECHARTS = {
    "echarts.min.js": "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0",
    "echarts.LICENSE": "634293835b43a6dd2094fa39182a3d9a6b9ca43b7fdb9ac354e8037af2a3093a",
    "echarts.LICENSE-d3": "e1211892da0b0e0585b7aebe8f98c1274fba15bafe47fa1f4ee8a7a502c06304",
    "echarts.NOTICE": "d491d358344f842685c1b1585970999db65fe30ecf7ef3867af8814f4016c016",
}
"""As npm's package echarts 6.1.0 has them (dist/echarts.min.js, LICENSE, licenses/LICENSE-d3, NOTICE)."""


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


def test_the_library_that_draws_is_the_published_one() -> None:
    assets = ROOT / "vllm_locust" / "report" / "assets"
    assert {path.name: sha256(path.read_bytes()).hexdigest() for path in assets.glob("echarts*")} == ECHARTS
    assert "</script" not in chart_library().lower()
    assert "<!--" not in chart_library()


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
    assert "vllm_locust/data/k8s/secrets/redis.acl" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("report.html.j2") for name in names)
    assert {f"vllm_locust/report/assets/{name}" for name in (*ECHARTS, "report.js", "report.css")} <= names
    assert not any(name.startswith("tests/") for name in names)
