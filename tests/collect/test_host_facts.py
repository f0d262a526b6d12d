from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_locust.collect.host_facts import Timex, clock_facts, cpu_facts


def test_of_this_host() -> None:
    facts = cpu_facts(0.05)
    assert facts.cores >= 1
    assert facts.load_1m is not None
    assert facts.load_1m >= 0
    clock = clock_facts(5)
    assert clock.moved_ns == 5
    assert clock.source == Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()


def test_stolen_time_is_measured(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  100 0 100 800 0 0 0 10 0 0\n")
    later = threading.Timer(0.1, (tmp_path / "stat").write_text, ["cpu  150 0 100 840 0 0 0 20 0 0\n"])
    later.start()
    facts = cpu_facts(0.5, proc=tmp_path, cgroup=tmp_path)
    later.join()
    assert (facts.steal_fraction, facts.load_1m, facts.quota_cores) == (0.1, None, None)


@pytest.mark.parametrize(
    ("files", "groups", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, "0::/\n", 1.5),
        ({"pod/cpu.max": "200000 100000\n"}, "0::/pod\n", 2.0),
        ({"cpu.max": "max 100000\n"}, "0::/\n", None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:cpu,cpuacct:/x\n", 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:cpu:/\n", None),
        ({}, "", None),
    ],
)
def test_a_quota_of_either_version_of_control_groups(
    tmp_path: Path, files: dict[str, str], groups: str, quota: float | None
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_facts(0.0, proc=tmp_path, cgroup=tmp_path).quota_cores == quota


def _kernel(status: int, answer: int = 0) -> Callable[[Any], int]:
    def ask(timex: Timex) -> int:
        timex.status, timex.maxerror = status, 1_234
        return answer

    return ask


@pytest.mark.parametrize(
    ("ask", "synchronized", "error_ns"),
    [
        (_kernel(0x2001), True, 1_234_000),
        (_kernel(0x0040, answer=5), False, 1_234_000),
        (_kernel(0, answer=-1), None, None),
    ],
)
def test_what_the_kernel_says_of_the_clock(
    ask: Callable[[Any], int], synchronized: bool | None, error_ns: int | None
) -> None:
    facts = clock_facts(0, ask=ask)
    assert (facts.synchronized, facts.max_error_ns) == (synchronized, error_ns)


def test_the_structure_is_the_kernels() -> None:
    """Its time is the wall clock's, which only a right layout gives."""
    timex = Timex()
    from vllm_locust.collect.host_facts import ask_kernel_clock

    before_s = time.time()
    assert ask_kernel_clock(timex) >= 0
    assert before_s - 1 <= timex.tv_sec <= time.time() + 1
    assert 9_000 <= timex.tick <= 11_000
