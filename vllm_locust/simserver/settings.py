"""The flags of ``vllm-locust simserver``: vLLM's own names where vLLM has one."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_locust.errors import UsageError
from vllm_locust.simserver.engine import EngineConfig
from vllm_locust.simserver.faults import Fault, parse_fault_share

_NS_PER_MS = 1_000_000
_NS_PER_US = 1_000


@dataclass(frozen=True, slots=True)
class Settings:
    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    model: str = "sim"
    api_key: str | None = None
    seed: int = 0
    first_token_ns: int | None = None
    """Set together with ``token_interval_ns``: a fixed script instead of the engine."""
    token_interval_ns: int | None = None
    frontend_ns: int = 30 * _NS_PER_MS
    stream_interval: int = 1
    eos_mean: float | None = None
    empty_text_share: float = 0.02
    reasoning_share: float = 0.0
    reasoning_field: str = "reasoning"
    enable_prompt_tokens_details: bool = False
    max_num_queued_reqs: int | None = None
    reject_status_share: float = 0.1
    sse_keep_alive_interval_s: float | None = None
    faults: tuple[tuple[Fault, float], ...] = ()
    truth_log: str | None = None


def _parser() -> argparse.ArgumentParser:
    engine = EngineConfig()
    parser = argparse.ArgumentParser(
        prog="vllm-locust simserver",
        description="A simulated vLLM server: continuous batching, its API and metrics, scripted faults, a truth log.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    listen = parser.add_argument_group("listening")
    listen.add_argument("--host", default="127.0.0.1")
    listen.add_argument("--port", type=int, default=8000, help="0: any free port; the line READY says which")
    listen.add_argument("--uds", metavar="PATH", help="listen on this unix socket too")
    listen.add_argument("--ssl-certfile", metavar="FILE")
    listen.add_argument("--ssl-keyfile", metavar="FILE")
    listen.add_argument("--api-key", metavar="KEY", help="better in VLLM_API_KEY: arguments are visible to everyone")
    model = parser.add_argument_group("model")
    model.add_argument("--served-model-name", default="sim", metavar="NAME")
    model.add_argument("--max-model-len", type=int, default=engine.max_model_len)
    model.add_argument(
        "--eos-mean", type=float, metavar="TOKENS", help="mean length of answers that stop by themselves"
    )
    model.add_argument("--empty-text-share", type=float, default=0.02, help="tokens without text")
    model.add_argument("--reasoning-share", type=float, default=0.0, help="share of a chat answer that is reasoning")
    model.add_argument("--reasoning-field", choices=("reasoning", "reasoning_content"), default="reasoning")
    model.add_argument("--seed", type=int, default=0)
    batching = parser.add_argument_group("engine")
    batching.add_argument("--max-num-seqs", type=int, default=engine.max_num_seqs)
    batching.add_argument("--max-num-batched-tokens", type=int, default=engine.max_num_batched_tokens)
    batching.add_argument("--num-gpu-blocks-override", type=int, default=engine.num_gpu_blocks)
    batching.add_argument("--block-size", type=int, default=engine.block_size)
    batching.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    batching.add_argument("--max-num-queued-reqs", type=int, help="requests in flight, running or waiting")
    batching.add_argument("--reject-status-share", type=float, default=0.1, help="rejected streams that get a 503")
    batching.add_argument("--stream-interval", type=int, default=1, metavar="TOKENS")
    batching.add_argument("--sse-keep-alive-interval", type=float, metavar="SECONDS")
    batching.add_argument("--enable-prompt-tokens-details", action="store_true")
    cost = parser.add_argument_group("time", "a step costs base + prefill tokens + decoding requests + their context")
    cost.add_argument("--step-base-ms", type=float, default=engine.step_base_ns / _NS_PER_MS)
    cost.add_argument("--prefill-us-per-token", type=float, default=engine.prefill_ns_per_token / _NS_PER_US)
    cost.add_argument("--decode-us-per-seq", type=float, default=engine.decode_ns_per_seq / _NS_PER_US)
    cost.add_argument("--kv-us-per-token", type=float, default=engine.kv_ns_per_token / _NS_PER_US)
    cost.add_argument("--frontend-ms", type=float, default=30.0, help="from the request to the engine's queue")
    cost.add_argument("--first-token-ms", type=float, help="with --token-interval-ms: a fixed script, no batching")
    cost.add_argument("--token-interval-ms", type=float)
    test = parser.add_argument_group("faults and truth")
    test.add_argument("--fault", action="append", default=[], metavar="NAME:share=0.05,…", help="repeatable")
    test.add_argument("--truth-log", metavar="FILE", help="JSON lines: what was really sent, and when")
    return parser


def parse_settings(argv: Sequence[str]) -> Settings:
    """Raises UsageError with every problem found; ``--help`` and unknown flags leave through argparse."""
    args = _parser().parse_args(argv)
    problems = _problems(args)
    faults: list[tuple[Fault, float]] = []
    for text in args.fault:
        try:
            faults.append(parse_fault_share(text))
        except UsageError as error:
            problems += error.problems
    if problems:
        raise UsageError(*problems)
    engine = EngineConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_gpu_blocks=args.num_gpu_blocks_override,
        block_size=args.block_size,
        enable_prefix_caching=args.enable_prefix_caching,
        max_model_len=args.max_model_len,
        step_base_ns=round(args.step_base_ms * _NS_PER_MS),
        prefill_ns_per_token=round(args.prefill_us_per_token * _NS_PER_US),
        decode_ns_per_seq=round(args.decode_us_per_seq * _NS_PER_US),
        kv_ns_per_token=round(args.kv_us_per_token * _NS_PER_US),
    )
    fixed = args.first_token_ms is not None
    return Settings(
        engine=engine,
        host=args.host,
        port=args.port,
        uds=args.uds,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        model=args.served_model_name,
        api_key=args.api_key or os.environ.get("VLLM_API_KEY") or None,
        seed=args.seed,
        first_token_ns=round(args.first_token_ms * _NS_PER_MS) if fixed else None,
        token_interval_ns=round(args.token_interval_ms * _NS_PER_MS) if fixed else None,
        frontend_ns=round(args.frontend_ms * _NS_PER_MS),
        stream_interval=args.stream_interval,
        eos_mean=args.eos_mean,
        empty_text_share=args.empty_text_share,
        reasoning_share=args.reasoning_share,
        reasoning_field=args.reasoning_field,
        enable_prompt_tokens_details=args.enable_prompt_tokens_details,
        max_num_queued_reqs=args.max_num_queued_reqs,
        reject_status_share=args.reject_status_share,
        sse_keep_alive_interval_s=args.sse_keep_alive_interval,
        faults=tuple(faults),
        truth_log=args.truth_log,
    )


def _problems(args: argparse.Namespace) -> list[str]:
    problems: list[str] = []
    if (args.first_token_ms is None) != (args.token_interval_ms is None):
        problems.append("--first-token-ms and --token-interval-ms belong together: give both or neither")
    if args.ssl_keyfile is not None and args.ssl_certfile is None:
        problems.append("--ssl-keyfile needs --ssl-certfile")
    if not 0 <= args.port <= 65535:
        problems.append(f"--port {args.port} must be from 0 to 65535")
    shares = {name: getattr(args, name) for name in ("empty_text_share", "reasoning_share", "reject_status_share")}
    problems += [_flag(name, value, "from 0 to 1") for name, value in shares.items() if not 0 <= value <= 1]
    at_least_zero = (
        *("step_base_ms", "prefill_us_per_token", "decode_us_per_seq", "kv_us_per_token"),
        *("frontend_ms", "first_token_ms", "token_interval_ms"),
    )
    for name in at_least_zero:
        value = getattr(args, name)
        if value is not None and value < 0:
            problems.append(_flag(name, value, "at least 0"))
    for name in ("stream_interval", "eos_mean", "max_num_queued_reqs", "sse_keep_alive_interval"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            problems.append(_flag(name, value, "above 0"))
    return problems


def _flag(name: str, value: float, rule: str) -> str:
    return f"--{name.replace('_', '-')} {value:g} must be {rule}"
