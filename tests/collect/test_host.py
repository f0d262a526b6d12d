from __future__ import annotations

from pathlib import Path

import pytest

from vllm_locust.collect.host import HostLoad
from vllm_locust.collect.process_names import ProcessNames

STAT = "cpu  {user} 5 20 {idle} 10 1 4 {steal} 7 7\ncpu0 0 0 0 0\n"
MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\nHugePages_Total:       0\n"
NET = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 999 1 0 0 0 0 0 0 999 1 0 0 0 0 0 0
  eth0: {rx} 1 0 0 0 0 0 0 {tx} 1 0 0 0 0 0 0
docker0: 777 1 0 0 0 0 0 0 777 1 0 0 0 0 0 0
 ib0:{rx} 1 0 0 0 0 0 0 0 1 0 0 0 0 0 0
"""  # noqa: E501 - as the kernel writes it


def write(proc: Path, *, user: int, idle: int, steal: int, rx: int, tx: int) -> None:
    (proc / "net").mkdir(parents=True, exist_ok=True)
    (proc / "stat").write_text(STAT.format(user=user, idle=idle, steal=steal))
    (proc / "loadavg").write_text("1.50 0.90 0.80 1/200 777\n")
    (proc / "meminfo").write_text(MEMINFO)
    (proc / "net" / "dev").write_text(NET.format(rx=rx, tx=tx))


def test_the_load_since_the_last_reading(tmp_path: Path) -> None:
    now_ns = 0
    write(tmp_path, user=100, idle=1000, steal=0, rx=1_000, tx=500)
    load = HostLoad(tmp_path, monotonic_ns=lambda: now_ns)
    now_ns = 2_000_000_000
    # 60 ticks of work, 10 stolen, 130 idle.
    write(tmp_path, user=160, idle=1130, steal=10, rx=5_000, tx=2_500)
    assert load.read() == {
        "cpu_fraction": pytest.approx(0.35),
        "load_1m": 1.5,
        "memory_total_bytes": 1000 * 1024,
        "memory_used_bytes": 600 * 1024,
        "network_tx_bytes_per_s": 1_000.0,
        "network_rx_bytes_per_s": 2 * 2_000.0,
    }


def test_what_the_kernel_does_not_tell_is_left_out(tmp_path: Path) -> None:
    assert HostLoad(tmp_path).read() == {"cpu_fraction": None}


class NoDriver:
    class NVMLError(Exception):
        pass

    def nvmlSystemGetProcessName(self, pid: int) -> str:  # noqa: N802 - the binding's name
        if pid == 9:
            return "/opt/bin/trtllm-serve"
        raise self.NVMLError


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (b"VLLM::EngineCore\0\0\0", "VLLM::EngineCore"),
        (b"/usr/bin/python3\0-m\0vllm\0--api-key\0secret\0", "python3"),
        (b"python3 -m vllm --api-key secret\0", "python3"),
        (b"", None),
    ],
)
def test_a_process_is_named_without_its_arguments(tmp_path: Path, command: bytes, name: str | None) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes(command)
    assert ProcessNames(NoDriver(), tmp_path).name(7) == name


def test_a_process_of_another_container_is_known_to_the_driver(tmp_path: Path) -> None:
    names = ProcessNames(NoDriver(), tmp_path)
    assert names.name(9) == "trtllm-serve"
    assert names.name(8) is None


def test_a_number_that_was_given_again_is_looked_up_again(tmp_path: Path) -> None:
    now_ns = 0
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes(b"one\0")
    names = ProcessNames(NoDriver(), tmp_path, monotonic_ns=lambda: now_ns)
    assert names.name(7) == "one"
    (tmp_path / "7" / "cmdline").write_bytes(b"two\0")
    assert names.name(7) == "one"
    now_ns = 11_000_000_000
    assert names.name(7) == "two"
