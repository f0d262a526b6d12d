"""Whole runs against servers that are limited by one thing: the report names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.run.simulated import OPEN_LOOP, LocustRun, run_locust, simserver

pytestmark = pytest.mark.timeout(120)

ALL = {"VLLM_LOCUST_METRICS_URL": ""}
"""The flag's own default: the server's metrics are read."""


def findings(run: LocustRun) -> dict[str, Any]:
    assert run.exit_code in (0, 4), run.output
    return {finding["code"]: finding for finding in run.summary["diagnosis"]["findings"]}


def test_a_small_kv_cache(tmp_path: Path) -> None:
    """128 blocks of 16 tokens, for 24 users with some 200 tokens each."""
    small = (
        "--num-gpu-blocks-override",
        "129",
        "--max-model-len",
        "2048",
        "--step-base-ms",
        "10",
        "--frontend-ms",
        "0",
    )
    flags = ("-u", "24", "-r", "24", "-t", "5s", "--warmup-requests", "0", "--max-tokens", "80", "--force-length")
    with simserver(tmp_path, *small) as server:
        run = run_locust(tmp_path, server.url, *flags, **ALL)
    found = findings(run)
    pressure = found["kv_cache_pressure"]
    assert pressure["figures"]["kv_cache_max"] > 0.9
    assert pressure["figures"]["preemptions"] > 5
    assert "running requests were preempted" in pressure["sentence"]
    if "queueing" in found:
        assert found["queueing"]["try"].startswith("first what helps against KV-cache pressure")
        assert list(found).index("kv_cache_pressure") < list(found).index("queueing")
    assert "- KV-cache pressure: the KV cache was up to" in run.output


def test_too_few_places(tmp_path: Path) -> None:
    """Four at a time, each of 25 steps of 10 ms: 16 requests/s."""
    slow = (
        *("--max-num-seqs", "4", "--step-base-ms", "10", "--frontend-ms", "0", "--prefill-us-per-token", "0"),
        *("--decode-us-per-seq", "0", "--kv-us-per-token", "0"),
    )
    flags = (
        "--rate-stages",
        "8:3s,28:5s",
        "--warmup-requests",
        "0",
        "--max-tokens",
        "25",
        "--force-length",
        "--seed",
        "1",
    )
    with simserver(tmp_path, *slow) as server:
        run = run_locust(tmp_path, server.url, *flags, locustfile=OPEN_LOOP, **ALL)
    found = findings(run)
    queueing = found["queueing"]
    assert queueing["stages"][0] == "28/s"
    assert queueing["figures"]["running_max"] == 4
    assert queueing["figures"]["waiting_last"] > queueing["figures"]["waiting_first"]
    assert queueing["figures"]["queue_share"] > 0.5
    assert queueing["try"].startswith("a higher --max-num-seqs (the KV cache was at most")
    assert not {"kv_cache_pressure", "network_bound", "buffered_stream"} & set(found)
    assert "- queueing (stage 28/s" in run.output


PREFIXES = """
kind: shared_prefix
groups: 2
prefix_tokens: 400
prompt_tokens: {distribution: uniform, min: 40, max: 40}
output_tokens: {distribution: uniform, min: 8, max: 8}
conversations_per_group: 50
"""


@pytest.mark.parametrize("caching", ["--enable-prefix-caching", "--no-enable-prefix-caching"])
def test_prompts_that_begin_alike(tmp_path: Path, caching: str) -> None:
    (tmp_path / "prefixes.yaml").write_text(PREFIXES, encoding="utf-8")
    flags = ("-u", "2", "-r", "2", "-t", "3s", "--warmup-requests", "4", "--workload", "prefixes.yaml")
    with simserver(tmp_path, "--step-base-ms", "10", "--frontend-ms", "0", caching) as server:
        run = run_locust(tmp_path, server.url, *flags, **ALL)
    found = findings(run)
    assert run.json("run.json")["workload"]["shared_prefix"] == {"groups": 2, "tokens": 400}
    if caching == "--enable-prefix-caching":
        assert run.summary["stages"][0]["server"]["prefix_cache_hit_rate"] > 0.5
        assert "prefix_cache_unused" in run.summary["diagnosis"]["not_found"]
    else:
        unused = found["prefix_cache_unused"]
        assert unused["figures"]["shared_prefix"] > 0.6
        assert "are a beginning that an earlier prompt had, and the prefix cache was never asked." in unused["sentence"]
