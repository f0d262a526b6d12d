"""The ``vllm-locust`` command: what needs no run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_locust import __version__
from vllm_locust.cli import main
from vllm_locust.standard_streams import READER_GONE


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"vllm-locust {__version__}\n"


def test_flags_shows_what_locust_help_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flags"]) == 0
    shown = capsys.readouterr().out
    assert "--workload" in shown
    assert "VLLM_LOCUST_MAX_TOKENS" in shown


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """As in ``vllm-locust flags | head``."""
    command = [sys.executable, "-m", "vllm_locust", "flags"]
    shown = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert shown.stdout is not None
    shown.stdout.close()
    assert shown.stderr is not None
    assert shown.stderr.read() == b""
    shown.stderr.close()
    assert shown.wait(timeout=30) == READER_GONE


@pytest.mark.parametrize(
    "arguments", ["path chat.py", "flags", "--version", "simserver --help"], ids=lambda text: text.split()[0]
)
@pytest.mark.parametrize(
    ("output", "reason"), [("> /dev/full", "No space left on device"), (">&-", "Bad file descriptor")]
)
def test_an_output_that_takes_nothing_is_one_line_and_exit_1(arguments: str, output: str, reason: str) -> None:
    command = f"exec {sys.executable} -m vllm_locust {arguments} {output}"
    ended = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=30, check=False)
    assert ended.stderr == (
        f"vllm-locust: standard output cannot be written: {reason}; send it elsewhere, or make room there\n"
    )
    assert ended.returncode == 1


def test_what_needs_no_output_needs_no_open_streams() -> None:
    command = f"exec {sys.executable} -m vllm_locust path nothing.yaml <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], timeout=30, check=False).returncode == 2


@pytest.mark.parametrize("name", ["chat.py", "sharegpt.yaml", "redis.acl"])
def test_path(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["path", name]) == 0
    assert capsys.readouterr().out.strip().endswith(name)


def test_an_unknown_path_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["path", "nothing.yaml"]) == 2
    assert capsys.readouterr().err.startswith("vllm-locust: path nothing.yaml: nothing of that name is shipped")


@pytest.mark.parametrize(("flag", "value"), [("--duration", "xx"), ("--users", "0")])
def test_the_demo_refuses_before_it_starts_anything(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", flag, value]) == 2
    assert flag in capsys.readouterr().err
