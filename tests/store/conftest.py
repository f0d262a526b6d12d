from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.servers import Server
from vllm_locust.store.rundir import RunDirectory


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    """For tests that do not hurt it; each uses a run id of its own."""
    server = Server()
    yield server
    server.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")
