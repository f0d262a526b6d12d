"""AIPerf. Its record export names each request's X-Request-ID, TTFT and chunk gaps."""

from __future__ import annotations

import json

import numpy as np

from tests.bench.accuracy import Reported, ReportedRequest
from tests.bench.clients.client import Load, OneProcess, Session
from tests.bench.tokenizer_dir import tokenizer_dir
from tests.bench.venvs import distribution_version, python_of


class AIPerf:
    name = "AIPerf"
    exit_codes = frozenset({0})
    alone = False

    def prepare(self) -> None:
        self._python = python_of("aiperf", "AIPERF_PYTHON", ["aiperf"])

    def version(self) -> str:
        return distribution_version(self._python, "aiperf")

    def start(self, load: Load) -> Session:
        argv = [
            str(self._python),
            str(self._python.parent / "aiperf"),
            *("profile", "--model=bench", f"--url={load.url}", "--endpoint-type=chat", "--streaming"),
            f"--tokenizer={tokenizer_dir(load.work)}",
            f"--concurrency={load.streams}",
            f"--request-count={load.requests}",
            f"--isl={load.prompt_bytes // 4}",
            f"--osl={load.schedule.tokens}",
            *("--use-server-token-count", "--export-level=records", "--ui-type=none"),
            f"--artifact-dir={load.work / 'aiperf'}",
        ]
        # Offline, it looks for the tokenizer in the hub's cache, and not in the directory that it is given.
        return OneProcess(argv, load, alone=self.alone, without=("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))

    def read_report(self, load: Load) -> Reported:
        requests, failed = [], 0
        for line in (load.work / "aiperf" / "profile_export.jsonl").read_text().splitlines():
            row = json.loads(line)
            metrics = row["metrics"]
            if row.get("error") or "time_to_first_token" not in metrics:
                failed += 1
                continue
            gaps = (
                np.array(metrics["inter_chunk_latency"]["value"]) if "inter_chunk_latency" in metrics else np.empty(0)
            )
            requests.append(
                ReportedRequest(
                    key=row["metadata"]["x_request_id"],
                    ttft_ns=round(metrics["time_to_first_token"]["value"] * 1e6),
                    gaps_ns=np.rint(gaps * 1e6).astype(np.int64),
                )
            )
        summary = json.loads((load.work / "aiperf" / "profile_export_aiperf.json").read_text())
        return Reported(
            requests,
            headline={
                "ttft_p50_ms": summary["time_to_first_token"]["p50"],
                "ttft_p99_ms": summary["time_to_first_token"]["p99"],
                "gap_p99_ms": summary["inter_token_latency"]["p99"],
                "gap_p99_of": "request means",
                "tokens_per_s": summary["output_token_throughput"]["avg"],
            },
            failed=failed,
        )
