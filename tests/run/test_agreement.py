"""Workers that would send another load than the master: the run ends before any is sent, and names each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.run.simulated import FAST, end_of, free_port, simserver, start_locust

pytestmark = pytest.mark.timeout(120)

OTHER_RELEASE = """
import vllm_locust.run.agreement as agreement
agreement.__version__ = "0.0.9"
from vllm_locust import ChatUser
from locust import task


class Reader(ChatUser):
    @task
    def read(self):
        self.ask(self.next_prompt())
"""


def write_workload(directory: Path, question: str) -> None:
    directory.mkdir(exist_ok=True)
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "Because."}]
    rows = [{"id": str(number), "conversations": turns} for number in range(20)]
    (directory / "load.json").write_text(json.dumps(rows))


def test_each_worker_that_differs_is_named_with_both_values_and_the_fix(tmp_path: Path) -> None:
    for name, question in (("m", "Why is the sky blue?"), ("flags", "Why is the sky blue?"), ("file", "Why?")):
        write_workload(tmp_path / name, question)
    (tmp_path / "other.py").write_text(OTHER_RELEASE)
    port = str(free_port())
    to_master = ("--worker", "--master-host", "127.0.0.1", "--master-port", port)
    with simserver(tmp_path, *FAST) as server:
        master = start_locust(
            tmp_path / "m",
            server.url,
            *("--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--expect-workers", "4"),
            *("--headless", "--only-summary", "--run-dir", "run", "-u", "4", "-r", "4", "-t", "2s"),
            *("--workload", "load.json", "--seed", "7", "--tag", "a=b"),
        )
        workers = [
            # The same flags as the master's, which agree.
            start_locust(tmp_path / "m", None, *to_master, "--seed", "7", "--workload", "load.json"),
            start_locust(
                tmp_path / "flags", None, *to_master, "--seed", "8", "--no-stream", VLLM_LOCUST_MAX_TOKENS="9"
            ),
            start_locust(tmp_path / "file", None, *to_master),
            start_locust(tmp_path / "m", None, *to_master, locustfile=str(tmp_path / "other.py")),
        ]
        run = end_of(master, tmp_path / "m")
        outputs = [end_of(worker, tmp_path, 30).output for worker in workers]
        assert server.truth() == []
    assert run.exit_code == 2, run.output
    lines = [line for line in run.output.splitlines() if "vllm-locust: worker " in line]
    assert len(lines) == 3, run.output
    (flags,) = [line for line in lines if "--seed" in line]
    assert "--seed: this worker was started with '8', the master with '7'; start the worker without it" in flags
    assert "--no-stream: this worker was started with 'True', the master with none" in flags
    assert "--max-tokens: this worker was started with '9', the master with none" in flags
    (file,) = [line for line in lines if "--workload" in line]
    assert "this worker's has the hash" in file
    assert "copy its file to the worker's host anew" in file
    (release,) = [line for line in lines if "0.0.9" in line]
    assert "this worker runs vllm-locust 0.0.9, the master 0." in release
    assert "install the same version" in release
    assert ["cannot take part in the run" in output for output in outputs] == [False, True, True, True]
