"""Starting vLLM servers of our own, with the flags that a test needs.

``VLLM_LOCUST_TEST_VLLM_SERVE`` names a script that is called as ``SCRIPT --detach FLAG…``. It starts ``vllm serve``
with the further flags and a small model on the port ``PORT`` of 127.0.0.1, in a process group of its own whose id it
writes to ``server.pid`` in the directory ``RUN_DIR``, and returns when the server answers. ``SCRIPT --stop`` ends it.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.run.simulated import environment, free_port

START_TIMEOUT_S = 240


@dataclass(frozen=True)
class VllmServer:
    url: str
    process_group: int

    def kill(self) -> None:
        """As a crash or the kernel's out-of-memory killer would: no goodbye on any connection."""
        with suppress(ProcessLookupError):
            os.killpg(self.process_group, signal.SIGKILL)


@contextmanager
def vllm_server(
    script: str, directory: Path, *flags: str, port: int | None = None, **settings: str
) -> Iterator[VllmServer]:
    port = free_port() if port is None else port
    env = environment(PORT=str(port), HOST="127.0.0.1", RUN_DIR=str(directory), **settings)
    output = directory / "start.txt"
    with output.open("w") as file:
        started = subprocess.run(
            [script, "--detach", *flags], env=env, stdout=file, stderr=file, timeout=START_TIMEOUT_S, check=False
        )
    assert started.returncode == 0, output.read_text()
    server = VllmServer(f"http://127.0.0.1:{port}", int((directory / "server.pid").read_text()))
    try:
        yield server
    finally:
        subprocess.run([script, "--stop"], env=env, stdout=subprocess.DEVNULL, timeout=60, check=False)
        server.kill()
