"""GuideLLM. It keeps no time per token: only TTFT is compared request by request, by the response's id."""

from __future__ import annotations

import json

from tests.bench.accuracy import Reported, ReportedRequest
from tests.bench.clients.client import Load, OneProcess, Session
from tests.bench.tokenizer_dir import tokenizer_dir
from tests.bench.venvs import distribution_version, python_of


class GuideLLM:
    name = "GuideLLM"
    exit_codes = frozenset({0})
    alone = False

    def prepare(self) -> None:
        self._python = python_of("guidellm", "GUIDELLM_PYTHON", ["guidellm"])

    def version(self) -> str:
        return distribution_version(self._python, "guidellm")

    def start(self, load: Load) -> Session:
        argv = [
            str(self._python),
            str(self._python.parent / "guidellm"),
            "run",
            f"--backend=kind=openai_http,target={load.url},model=bench,request_format=/v1/chat/completions",
            f"--profile=kind=concurrent,streams={load.streams}",
            f"--constraint=kind=max_requests,count={load.requests}",
            f"--tokenizer=kind=huggingface_auto,model={tokenizer_dir(load.work)}",
            f"--data=kind=synthetic_text,prompt_tokens={load.prompt_bytes // 4},output_tokens={load.schedule.tokens}",
            f"--output=kind=json,path={load.work / 'guidellm.json'}",
            "--disable-console",
        ]
        return OneProcess(argv, load, {"HF_HUB_OFFLINE": "1"}, alone=self.alone)

    def read_report(self, load: Load) -> Reported:
        benchmark = json.loads((load.work / "guidellm.json").read_text())["benchmarks"][0]
        done = benchmark["requests"]["successful"]
        requests = [
            ReportedRequest(
                key=str(row["response_id"]).removeprefix("chatcmpl-"),
                ttft_ns=round(row["time_to_first_token_ms"] * 1e6),
                gaps_ns=None,
            )
            for row in done
        ]
        ttft = benchmark["metrics"]["time_to_first_token_ms"]["successful"]["percentiles"]
        itl = benchmark["metrics"]["inter_token_latency_ms"]["successful"]["percentiles"]
        tokens = sum(row["output_tokens"] for row in done)
        return Reported(
            requests,
            headline={
                "ttft_p50_ms": ttft["p50"],
                "ttft_p99_ms": ttft["p99"],
                "gap_p99_ms": itl["p99"],
                "gap_p99_of": "request means",
                "tokens_per_s": tokens / benchmark["duration"],
            },
            failed=len(benchmark["requests"]["errored"] or []),
        )
