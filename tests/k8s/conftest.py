from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.k8s.directories import K8S
from tests.k8s.kustomize import Resource, render

SECRET_FILES = ("master", "worker", "collector", "users.acl", "api-key")


@pytest.fixture(scope="package")
def secrets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``k8s/secrets`` with the files that its script makes."""
    directory = tmp_path_factory.mktemp("k8s") / "secrets"
    shutil.copytree(K8S / "secrets", directory, ignore=shutil.ignore_patterns(*SECRET_FILES))
    subprocess.run([directory / "make.sh"], check=True, env=os.environ | {"OPENAI_API_KEY": "sk-of-the-test"})
    return directory


@pytest.fixture(scope="package")
def secrets(secrets_dir: Path) -> list[Resource]:
    return render(secrets_dir)
