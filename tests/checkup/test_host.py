"""Where each judgement on a host tips over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_locust.checkup.check import Check, Status, as_json, has_failed, ok, skipped, table
from vllm_locust.checkup.host import (
    ClockFacts,
    CpuFacts,
    Descriptors,
    DiskFacts,
    StampFacts,
    judge_clock,
    judge_cpu,
    judge_descriptors,
    judge_disk,
    judge_ports,
    judge_stamps,
)

CPU = CpuFacts(cores=4, quota_cores=None, load_1m=0.5, steal_fraction=0.0)
CLOCK = ClockFacts(synchronized=True, max_error_ns=200_000, source="tsc", moved_ns=0)
DISK = DiskFacts("/runs", 50 << 30, 2_000_000)


@pytest.mark.parametrize(
    ("soft", "hard", "users", "processes", "status"),
    [
        (1024, 1024, 928, 1, Status.OK),
        (1024, 1024, 929, 1, Status.FAILED),
        (1024, 1024, 1857, 2, Status.FAILED),
        (1024, 1024, 1856, 2, Status.OK),
        (100, 1_000_000, 50_000, 1, Status.OK),
        (None, None, 10**9, 1, Status.OK),
    ],
)
def test_descriptors(soft: int | None, hard: int | None, users: int, processes: int, status: Status) -> None:
    check = judge_descriptors(Descriptors(soft, hard), users=users, processes=processes, spare=96)
    assert check.status is status
    assert (check.fix is not None) == (status is Status.FAILED)
    assert check.figures["needed"] == -(-users // processes) + 96


@pytest.mark.parametrize(
    ("ports", "users", "status"),
    [
        (1000, 800, Status.OK),
        (1000, 801, Status.WARNING),
        (1000, 1000, Status.WARNING),
        (1000, 1001, Status.FAILED),
        (None, 1, Status.SKIPPED),
    ],
)
def test_ports(ports: int | None, users: int, status: Status) -> None:
    assert judge_ports(ports, users=users).status is status


@pytest.mark.parametrize(
    ("cpu", "processes", "words"),
    [
        (CPU, 4, None),
        (CPU, 5, "use at most 4 processes"),
        (replace(CPU, load_1m=2.01), 1, "what else runs here"),
        (replace(CPU, steal_fraction=0.011), 1, "not shared with others"),
        (replace(CPU, quota_cores=2.0), 1, "drop the CPU limit"),
        (replace(CPU, load_1m=None, steal_fraction=None), 1, None),
    ],
)
def test_cpu(cpu: CpuFacts, processes: int, words: str | None) -> None:
    check = judge_cpu(cpu, processes=processes)
    assert check.status is (Status.OK if words is None else Status.WARNING)
    assert words is None or words in (check.fix or "")


@pytest.mark.parametrize(
    ("clock", "words"),
    [
        (CLOCK, None),
        (replace(CLOCK, synchronized=None, max_error_ns=None, source=None), None),
        (replace(CLOCK, synchronized=False), "start chrony"),
        (replace(CLOCK, max_error_ns=10_000_001), "nearer time server"),
        (replace(CLOCK, source="hpet"), "hpet is slow"),
        (replace(CLOCK, moved_ns=-1_000_001), "no longer steps"),
    ],
)
def test_clock(clock: ClockFacts, words: str | None) -> None:
    check = judge_clock(clock)
    assert check.status is (Status.OK if words is None else Status.WARNING)
    assert words is None or words in (check.fix or "")


@pytest.mark.parametrize(
    ("stamps", "status"),
    [
        (StampFacts(200, 200, 15_000, 90_000), Status.OK),
        (StampFacts(200, 199, 15_000, 90_000), Status.WARNING),
        (StampFacts(200, 0, None, None), Status.WARNING),
        (StampFacts(200, 200, 1_000_001, 2_000_000), Status.WARNING),
    ],
)
def test_stamps(stamps: StampFacts, status: Status) -> None:
    assert judge_stamps(stamps).status is status


@pytest.mark.parametrize(
    ("disk", "status"),
    [
        (DISK, Status.OK),
        (replace(DISK, free_bytes=(2 << 30) - 1), Status.WARNING),
        (replace(DISK, free_bytes=(100 << 20) - 1), Status.FAILED),
        (replace(DISK, fsync_ns=100_000_001), Status.WARNING),
    ],
)
def test_disk(disk: DiskFacts, status: Status) -> None:
    assert judge_disk("spool", disk).status is status


def test_the_table_and_the_json_say_the_same() -> None:
    checks = [ok("clock", "fine", offset_s=0.5), skipped("server", "no address", "give --host")]
    assert table(checks).splitlines() == [
        "ok       clock   fine",
        "skipped  server  no address",
        "                 -> give --host",
        "1 ok, 1 skipped",
    ]
    told = as_json(checks, host="h", role="worker")
    assert (told["failed"], told["role"], told["checks"][0]["figures"]) == (False, "worker", {"offset_s": 0.5})
    assert not has_failed(checks)
    assert has_failed([*checks, Check("x", Status.FAILED, "broken", "mend it")])
