"""What a worker may open is known before the load: checked in a process of its own, whose limits can be set."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from vllm_locust.config import Target
from vllm_locust.load import limits

_PROGRAM = """
import json, resource, sys
from vllm_locust.config import Target
from vllm_locust.load import limits
soft, hard, users = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
found = limits.problems(users, [Target.parse("unix:///s")])
print(json.dumps([found, resource.getrlimit(resource.RLIMIT_NOFILE)]))
"""
HTTP = Target.parse("http://h:8000")
OTHER = Target.parse("http://h:8001")
UNIX = Target.parse("unix:///s")


def _descriptors(soft: int, hard: int, users: int) -> tuple[list[str], list[int]]:
    argv = [sys.executable, "-c", _PROGRAM, str(soft), str(hard), str(users)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    faults, limit = json.loads(done.stdout)
    return faults, limit


def test_enough_descriptors_are_left_as_they_are() -> None:
    assert _descriptors(400, 800, 200) == ([], [400, 800])


def test_the_soft_limit_is_raised_where_it_is_too_low() -> None:
    assert _descriptors(128, 800, 200) == ([], [800, 800])


def test_too_few_descriptors_are_one_sentence_with_the_numbers_and_the_fix() -> None:
    faults, _ = _descriptors(128, 256, 200)
    assert len(faults) == 1
    assert faults[0].startswith("-u: 200 users of this worker need ")
    assert "it may have 256" in faults[0]
    needed = int(faults[0].partition("ulimit -n ")[2].split()[0])
    assert 200 + limits.SPARE_DESCRIPTORS < needed < 200 + limits.SPARE_DESCRIPTORS + 100


def test_users_just_within_the_limit_are_none_too_many() -> None:
    faults, _ = _descriptors(128, 256, 200)
    open_now = int(faults[0].partition("among")[0].split(", ")[1].split()[0])
    most = 256 - limits.SPARE_DESCRIPTORS - open_now
    assert _descriptors(128, 256, most)[0] == []
    assert len(_descriptors(128, 256, most + 1)[0]) == 1


@pytest.mark.parametrize(
    ("users", "targets", "proxy", "places"),
    [
        (100, [HTTP], None, []),
        (101, [HTTP], None, ["101 users of this worker connect to h:8000"]),
        (200, [HTTP, OTHER], None, []),
        (202, [HTTP, OTHER], None, ["connect to h:8000", "connect to h:8001"]),
        (101, [HTTP, HTTP], None, ["connect to h:8000"]),
        (101, [HTTP, OTHER], "http://p:3128", ["101 users of this worker connect to p:3128"]),
        (101, [HTTP, OTHER], "http://p", ["connect to p:80"]),
        (1000, [UNIX], None, []),
        (1000, [UNIX], "http://p", []),
    ],
)
def test_each_address_has_its_own_local_ports(
    monkeypatch: pytest.MonkeyPatch, users: int, targets: list[Target], proxy: str | None, places: list[str]
) -> None:
    monkeypatch.setattr(limits, "local_ports", lambda: 100)
    monkeypatch.setattr(limits, "open_fds", lambda: None)
    faults = limits.problems(users, targets, proxy)
    assert len(faults) == len(places)
    for fault, place in zip(faults, places, strict=True):
        assert place in fault
        assert "has 100 local ports" in fault
        assert "net.ipv4.ip_local_port_range" in fault


def test_local_ports_are_counted_as_the_kernel_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    file = tmp_path / "range"
    file.write_text("32768\t60999\n")
    monkeypatch.setattr(limits, "_PORT_RANGE", str(file))
    assert limits.local_ports() == 28_232
    file.write_text("nothing\n")
    assert limits.local_ports() is None
    file.unlink()
    monkeypatch.setattr(limits, "open_fds", lambda: None)
    assert limits.problems(1_000_000, [HTTP]) == []


def test_what_the_system_does_not_tell_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "open_fds", lambda: None)
    assert limits.problems(10_000_000, [UNIX]) == []
