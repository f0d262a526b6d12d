"""The demo's exit code. The demo itself is ``make demo``; here a process with a given exit code stands for its load."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys

import pytest

from vllm_locust.run import demo


@pytest.mark.parametrize(("locusts", "own"), [(0, 0), (4, 0), (3, 3), (2, 2), (1, 1), (-15, -15)])
def test_a_busy_machine_alone_does_not_fail_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], locusts: int, own: int
) -> None:
    class Ended:
        def __init__(self, command: list[str], **_: object) -> None:
            assert command[:3] == [sys.executable, "-m", "locust"]

        def wait(self) -> int:
            return locusts

    monkeypatch.setattr(subprocess, "Popen", Ended)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert demo._run_load("http://127.0.0.1:1/v1", "1s", 1, "nowhere") == own
    shown, *said = capsys.readouterr().out.splitlines()
    assert shlex.split(shown)[:2] == ["$", "locust"]
    assert "'ttft<=500ms'" in shown, "a shell would read from a file of that name"
    assert (len(said) == 1 and "too busy (code 4)" in said[0]) if locusts == 4 else said == []
