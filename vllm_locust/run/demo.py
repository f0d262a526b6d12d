"""``vllm-locust demo``: the simulated server, a master and two workers, a short ShareGPT load test, and its report."""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

from vllm_locust.duration import parse_duration_ns
from vllm_locust.errors import InvalidMeasurement, RunFailed, UsageError
from vllm_locust.shipped import shipped_path

WORKERS = 2
READY = "READY "


def run_demo(*, duration: str, users: int, run_dir: str | None) -> int:
    """Returns the exit code of the load test; 0 where the run was complete and this machine too busy to vouch for its
    numbers, since the demo shows the tool and not this machine.
    """
    try:
        parse_duration_ns(duration)
    except ValueError as error:
        raise UsageError(f"--duration: {error}") from None
    if users < 1:
        raise UsageError(f"--users: {users} is not a whole number of at least 1")
    simserver = subprocess.Popen(
        [sys.executable, "-m", "vllm_locust", "simserver", "--host", "127.0.0.1", "--port", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        return _run_load(_address(simserver), duration, users, run_dir)
    finally:
        simserver.terminate()
        simserver.wait(timeout=30)


def _address(simserver: subprocess.Popen[str]) -> str:
    assert simserver.stdout is not None
    for line in simserver.stdout:
        if line.startswith(READY):
            return line.split()[1]
    raise RunFailed("the simulated server ended before it was ready; see its messages above")


def _run_load(address: str, duration: str, users: int, run_dir: str | None) -> int:
    port = str(_free_port())
    before = _reports(run_dir)
    command = [
        *(sys.executable, "-m", "locust", "-f", str(shipped_path("chat.py"))),
        *("--host", address, "--headless", "--only-summary", "--processes", str(WORKERS)),
        *("--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--master-port", port),
        *("-u", str(users), "-r", str(users), "-t", duration, "--warmup-requests", str(users)),
        *("--slo", "ttft<=500ms", "--slo", "tpot<=50ms", "--run-name", "demo"),
    ]
    if run_dir is not None:
        command += ["--run-dir", run_dir]
    print("$", shlex.join(["locust", *command[3:]]), flush=True)
    code = _wait_for(subprocess.Popen(command, stdin=subprocess.DEVNULL))
    for report in sorted(_reports(run_dir) - before):
        print(f"Report: {report}")
    if code == InvalidMeasurement.exit_code:
        print(f"The demo itself is complete: its numbers are invalid, since this machine was too busy (code {code}).")
        return 0
    return code


def _free_port() -> int:
    """Locust's own default may be taken by another run on this machine."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _wait_for(locust: subprocess.Popen[bytes]) -> int:
    """Its exit code. Ctrl-C reaches it too; a SIGTERM to the demo alone is passed on: either way it ends its run
    first.
    """
    signal.signal(signal.SIGTERM, lambda *_: locust.terminate())
    while True:
        try:
            return locust.wait()
        except KeyboardInterrupt:
            continue


def _reports(run_dir: str | None) -> set[Path]:
    places = [Path(run_dir)] if run_dir is not None else Path("runs").glob("*/")
    return {report for place in places if (report := place / "report.html").is_file()}
