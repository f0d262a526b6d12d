"""Servers and SLOs whose true capacity is known from the study (RESULTS.md)."""

from __future__ import annotations

from typing import Final

from tests.simulation.offline_server import Lengths
from tests.simulation.probing import Case
from vllm_locust.load_profile import Quantity
from vllm_locust.simserver.engine import EngineConfig

MS: Final = 1_000_000

FEW_SEQUENCES: Final = EngineConfig(
    max_num_seqs=16,
    step_base_ns=20 * MS,
    decode_ns_per_seq=1 * MS,
    prefill_ns_per_token=50_000,
    kv_ns_per_token=0,
    enable_prefix_caching=False,
)
LARGE_BATCH: Final = EngineConfig(
    max_num_seqs=128,
    step_base_ns=10 * MS,
    decode_ns_per_seq=500_000,
    prefill_ns_per_token=25_000,
    enable_prefix_caching=False,
)
SMALL_CACHE: Final = EngineConfig(
    max_num_seqs=64,
    num_gpu_blocks=400,
    max_model_len=6000,
    step_base_ns=20 * MS,
    decode_ns_per_seq=300_000,
    prefill_ns_per_token=25_000,
    enable_prefix_caching=False,
)
LONG_PROMPTS: Final = EngineConfig(
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    step_base_ns=10 * MS,
    decode_ns_per_seq=300_000,
    prefill_ns_per_token=50_000,
    enable_prefix_caching=False,
)
CHAT: Final = Lengths(prompt_mean=200, output_mean=40, spread=0.7, at_most=4000)
SHORT_CHAT: Final = Lengths(prompt_mean=200, output_mean=30, spread=0.7, at_most=4000)
CONTEXT: Final = Lengths(prompt_mean=300, output_mean=40, spread=0.5, at_most=1500)
DOCUMENTS: Final = Lengths(prompt_mean=1500, output_mean=8, spread=0.5, at_most=6000)

CASES: Final = (
    Case("max_num_seqs, p99(ttft)", FEW_SEQUENCES, CHAT, ("p99(ttft)<=1s",), 7.835),
    Case("max_num_seqs, p90(ttft)", FEW_SEQUENCES, CHAT, ("p90(ttft)<=1s",), 8.898),
    Case("decoding, goodput", LARGE_BATCH, SHORT_CHAT, ("ttft<=500ms", "tpot<=40ms", "good_fraction>=0.95"), 32.67),
    Case("decoding, p99(e2e)", LARGE_BATCH, SHORT_CHAT, ("p99(e2e)<=4s",), 34.03),
    Case("KV cache, p99(ttft)", SMALL_CACHE, CONTEXT, ("p99(ttft)<=600ms",), 11.94),
    Case("prefill, p99(ttft)", LONG_PROMPTS, DOCUMENTS, ("p99(ttft)<=1500ms",), 9.833),
    Case("two SLOs", LARGE_BATCH, CHAT, ("p99(ttft)<=90ms", "p95(tpot)<=50ms"), 25.63),
    Case("users, p95(tpot)", LARGE_BATCH, CHAT, ("p95(tpot)<=40ms",), 45.35, Quantity.USERS),
)
