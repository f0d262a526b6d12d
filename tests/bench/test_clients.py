"""What the harness hands to a client."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.bench.clients.aiperf import AIPerf
from tests.bench.clients.client import Load, OneProcess
from tests.bench.placement import default_placement
from tests.bench.truth import Schedule

NOTES_ITS_ENVIRONMENT = """
import json, os, pathlib
pathlib.Path("environment.json").write_text(json.dumps(dict(os.environ)))
"""


def test_aiperf_may_look_at_a_local_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses to where it is told to stay offline."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    python.with_name("aiperf").write_text(NOTES_ITS_ENVIRONMENT)
    monkeypatch.setenv("AIPERF_PYTHON", str(python))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HOME"):
        monkeypatch.setenv(name, "1")
    load = Load("http://127.0.0.1:1", 1, 1, 1.0, Schedule(), tmp_path, default_placement(False))
    client = AIPerf()
    client.prepare()
    session = client.start(load)
    assert isinstance(session, OneProcess)
    assert session.process.wait(30) == 0, (tmp_path / "client.log").read_text()
    seen = json.loads((tmp_path / "environment.json").read_text())
    assert seen["HF_HOME"] == "1"
    assert not {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"} & seen.keys()
