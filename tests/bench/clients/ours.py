"""This package: one Locust worker process on the client's core; master, Valkey and recorder on the server's."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.bench.accuracy import Reported, ReportedRequest
from tests.bench.clients.client import Load, Session, end_tree
from tests.bench.placement import process_tree

REPOSITORY = Path(__file__).resolve().parents[3]
_COLUMNS = ["request_id", "sent_unix_ns", "ttft_ns", "chunk_ns", "chunk_width_ns", "stamp_source", "outcome"]


class VllmLocust:
    exit_codes = frozenset({0, 1, 3, 4})
    """Failed requests, a missed SLO and an invalid measurement are reports too."""
    alone = True

    def __init__(self, transport: str) -> None:
        self.name = f"vllm-locust {transport}"
        self._transport = transport

    def prepare(self) -> None:
        return

    def version(self) -> str:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True)
        return f"this checkout, {done.stdout.strip() or 'no git'}"

    def start(self, load: Load) -> Session:
        return _MasterAndWorker(load, self._flags(load))

    def _flags(self, load: Load) -> list[str]:
        workload = load.work / "prompts.jsonl"
        _write_prompts(workload, load)
        return [
            f"--host={load.url}",
            f"--transport={self._transport}",
            f"--workload={workload}",
            f"--max-tokens={load.schedule.tokens}",
            "--force-length",
            "--warmup-requests=0",
            f"--drain-timeout={load.schedule.request_s * 2 + 10:.0f}s",
            f"--run-dir={load.work / 'run'}",
        ]

    def read_report(self, load: Load) -> Reported:
        run = load.work / "run"
        summary = json.loads((run / "summary.json").read_text())
        requests, failed = [], 0
        for batch in pq.ParquetFile(run / "requests.parquet").iter_batches(columns=_COLUMNS):
            found = _requests(batch)
            requests += found
            failed += batch.num_rows - len(found)
        return Reported(requests, headline=_headline(summary), failed=failed)


class _MasterAndWorker:
    """Two processes of Locust, so that the worker's CPU is the worker's alone."""

    def __init__(self, load: Load, flags: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        locust = [sys.executable, "-m", "locust", "-f", str(REPOSITORY / "locustfiles" / "chat.py")]
        users = [f"--users={load.streams}", f"--spawn-rate={load.streams}", f"--run-time={load.seconds:.0f}s"]
        master = [
            "--master",
            "--headless",
            "--expect-workers=1",
            "--master-bind-host=127.0.0.1",
            f"--master-bind-port={port}",
        ]
        worker = ["--worker", "--master-host=127.0.0.1", f"--master-port={port}"]
        self.master = self._start(load, "master", load.placement.support_argv([*locust, *master, *users, *flags]))
        self.worker = self._start(load, "worker", load.placement.client_argv([*locust, *worker], alone=True))

    def _start(self, load: Load, name: str, argv: list[str]) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "PYTHONPATH": path}
        with (load.work / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                argv,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=load.work,
                env=env,
                start_new_session=True,
            )

    def measured_pids(self) -> list[int]:
        return process_tree(self.worker.pid)

    def exit_code(self) -> int | None:
        return self.master.poll()

    def stop(self) -> None:
        end_tree(self.master)
        end_tree(self.worker)


def _write_prompts(path: Path, load: Load) -> None:
    """Prompts of the wanted size in the ShareGPT layout, each different from its first word on."""
    rows = max(1000, load.streams) if load.prompt_bytes <= 4096 else 32
    with path.open("w") as out:
        for i in range(rows):
            prompt = f"{i:06d} asks: " + "tell me more about it " * (load.prompt_bytes // 22 + 1)
            turns = [
                {"from": "human", "value": prompt[: load.prompt_bytes]},
                {"from": "gpt", "value": "an answer of some words"},
            ]
            out.write(json.dumps({"id": f"bench{i}", "conversations": turns}) + "\n")


def _requests(batch: pa.RecordBatch) -> list[ReportedRequest]:
    columns = {name: batch.column(name).to_pylist() for name in _COLUMNS if name not in ("chunk_ns", "chunk_width_ns")}
    chunks, widths = batch.column("chunk_ns"), batch.column("chunk_width_ns")
    requests = []
    for i in range(batch.num_rows):
        if columns["outcome"][i] != "ok":
            continue
        arrivals = np.asarray(chunks[i].values, dtype=np.int64)
        own = np.full(len(arrivals), columns["stamp_source"][i] == "kernel")
        if widths[i].is_valid:
            own &= np.asarray(widths[i].values, dtype=np.int64) == 0
        requests.append(
            ReportedRequest(
                key=str(columns["request_id"][i]),
                ttft_ns=columns["ttft_ns"][i],
                gaps_ns=np.diff(arrivals),
                sent_unix_ns=columns["sent_unix_ns"][i],
                own_stamp=own,
            )
        )
    return requests


def _headline(summary: dict[str, Any]) -> dict[str, float | str | None]:
    stage = summary["stages"][0]

    def milliseconds(block: str, quantile: str) -> float | None:
        value = stage[block][quantile]
        return None if value is None else 1e3 * value

    return {
        "verdict": summary["verdict"]["status"],
        "reasons": ", ".join(str(reason["code"]) for reason in summary["verdict"]["reasons"]),
        "ttft_p50_ms": milliseconds("ttft_s", "p50"),
        "ttft_p99_ms": milliseconds("ttft_s", "p99"),
        "gap_p99_ms": milliseconds("chunk_gap_s", "p99"),
        "tokens_per_s": stage["output_tokens_per_s"],
    }
