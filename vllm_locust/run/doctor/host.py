"""The checks of ``vllm-locust doctor`` that look at the host itself."""

from __future__ import annotations

import platform
import re
import socket
from collections.abc import Callable, Iterator
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any, Final

from vllm_locust import __version__
from vllm_locust.checkup import host as judge
from vllm_locust.checkup.check import Check, failed, ok, skipped
from vllm_locust.checkup.gpu import judge_gpus
from vllm_locust.collect.gpu_probe import gpu_facts
from vllm_locust.collect.host_facts import clock_facts, cpu_facts
from vllm_locust.errors import UsageError
from vllm_locust.load.limits import SPARE_DESCRIPTORS, descriptor_limits, local_ports
from vllm_locust.load.stamp_probe import measure_stamps
from vllm_locust.store.disk_probe import disk_facts

_STEAL_WATCH_S: Final = 1.0
_OPEN_BEFORE_USERS: Final = 32
"""What a worker process has open when its users start."""


def check_versions() -> Check:
    locust = version("locust")
    found = f"vllm-locust {__version__}, Locust {locust}, Python {platform.python_version()}, {platform.release()}"
    figures = {
        "vllm_locust": __version__,
        "locust": locust,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    wanted = next((text for text in requires("vllm-locust") or () if re.match(r"locust\b", text)), "")
    minor = re.search(r">=(\d+\.\d+)", wanted)
    if minor is not None and not f"{locust}.".startswith(f"{minor[1]}."):
        return failed("versions", found, f"install the Locust that this package needs: {wanted}", **figures)
    return ok("versions", found, **figures)


def check_cpu(processes: int) -> Check:
    return judge.judge_cpu(cpu_facts(_STEAL_WATCH_S), processes=processes)


def check_limits(users: int, processes: int) -> Iterator[Check]:
    spare = SPARE_DESCRIPTORS + _OPEN_BEFORE_USERS
    soft, hard = descriptor_limits()
    yield judge.judge_descriptors(judge.Descriptors(soft, hard), users=users, processes=processes, spare=spare)
    yield judge.judge_ports(local_ports(), users=users)


def check_stamps() -> Check:
    try:
        return judge.judge_stamps(measure_stamps())
    except OSError as error:
        fix = "bring the loopback interface up: ip link set lo up"
        return failed("kernel stamps", f"the loopback interface cannot be used: {error}", fix)


def check_disk(name: str, directory: Path) -> Check:
    try:
        return judge.judge_disk(name, disk_facts(directory))
    except OSError as error:
        found = f"{directory.absolute()} cannot be written: {error.strerror or error}"
        return failed(name, found, "give a --run-dir that can be written to, or free its disk")


def check_clock(moved_ns: int) -> Check:
    return judge.judge_clock(clock_facts(moved_ns))


def check_gpus(open_driver: Callable[[], Any], *, required: bool) -> Check:
    try:
        return judge_gpus(gpu_facts(socket.gethostname(), open_driver=open_driver))
    except UsageError as error:
        found, _, fix = str(error).partition("; ")
        if required:
            return failed("GPUs", found, fix or "run it on the GPU host (in a container: with the NVIDIA runtime)")
        return skipped("GPUs", "there is no NVIDIA GPU here", "run doctor --role gpu on the GPU host, if it is another")
