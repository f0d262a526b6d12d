from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_locust import clock
from vllm_locust.clock import BentClock

SECOND = 1_000_000_000


def test_distance_puts_the_wall_on_the_monotonic_axis() -> None:
    distance_ns = clock.unix_minus_monotonic_ns()
    assert abs(clock.unix_ns() - distance_ns - clock.monotonic_ns()) < SECOND // 10


def test_utc_stamp() -> None:
    assert clock.utc_stamp(0) == "19700101-000000"
    assert clock.utc_stamp(86_399_999_999_999) == "19700101-235959"


def test_bent_clock() -> None:
    bent = BentClock("offset=5s,step=-2s@10s,drift=100ppm", started_ns=SECOND)
    assert bent.shift_ns(SECOND) == 5 * SECOND
    assert bent.shift_ns(11 * SECOND) == 3 * SECOND + 1_000_000
    assert bent.shift_ns(11 * SECOND - 1) == 5 * SECOND + 1_000_000


def test_a_step_that_waits_for_a_file(tmp_path: Path) -> None:
    bent = BentClock(f"step=3s@{tmp_path / 'now'}", started_ns=clock.monotonic_ns() - SECOND)
    before_ns = clock.monotonic_ns()
    assert bent.shift_ns(before_ns) == 0
    (tmp_path / "now").touch()
    clock.sleep(0.02)
    assert bent.shift_ns(clock.monotonic_ns() + SECOND) == 3 * SECOND
    assert bent.shift_ns(before_ns) == 0, "stamps from before are not moved"


@pytest.mark.parametrize("spec", ["offset=5", "step=1s", "drift=1", "x=1s"])
def test_what_bends_no_clock(spec: str) -> None:
    with pytest.raises(ValueError, match=r"not|unpack"):
        BentClock(spec, 0)


def test_the_seam_bends_wall_and_stamps_alike_in_its_own_process() -> None:
    program = (
        "from vllm_locust import clock; import time;"
        "assert clock.bend_stamp is not None;"
        "now = time.time_ns();"
        "print(round((clock.unix_ns() - now) / 1e9), round((clock.bend_stamp(now) - now) / 1e9),"
        " round((clock.unix_minus_monotonic_ns() - (now - time.monotonic_ns())) / 1e9))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"VLLM_LOCUST_TEST_CLOCK": "offset=5s"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["5", "5", "5"]
