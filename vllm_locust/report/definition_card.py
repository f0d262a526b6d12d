"""What other tools would have printed under the same names, computed from the same requests by their own definitions.

vLLM is ``vllm bench serve`` 0.32, AIPerf 0.13, GuideLLM 0.8, MLPerf is LoadGen. All but MLPerf start their clock at
the actual send, before the connection is opened, and use successes only. Role-only chunks, at which vLLM's bench
marks its TTFT, are not kept; vLLM sends them with the first token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from vllm_locust.pooled import PooledSample
from vllm_locust.report.blocks import seconds
from vllm_locust.report.columns import Floats
from vllm_locust.report.stage_samples import StageSamples
from vllm_locust.statistics import PERCENTILES, linear_percentile, percentile, weighted_percentile

SHOWN: Final = ("p50", "p90", "p99")


def definition_card(samples: StageSamples) -> list[dict[str, Any]]:
    """One entry for each tool and name; ``ours`` is the name of what we print under the same or the nearest name."""
    facts = _facts(samples)
    entries = [_vllm(facts, samples), _aiperf(facts, samples), _guidellm(facts), _mlperf(facts)]
    return [entry for tool in entries for entry in tool]


def _facts(samples: StageSamples) -> dict[str, Floats]:
    """Of ok requests with a first token: times after each tool's start, in ns."""
    ttft = samples.floats["ttft"]
    keep = samples.flags["ok"] & ~np.isnan(ttft)
    names = ("ttft", "e2e", "done", "output_tokens", "connect", "schedule_lag", "first_tokens")
    facts = {name: samples.floats[name][keep] for name in names}
    facts["connect"] = np.nan_to_num(facts["connect"])
    facts["schedule_lag"] = np.nan_to_num(facts["schedule_lag"])
    facts["done"] = np.where(np.isnan(facts["done"]), facts["e2e"], facts["done"])
    facts["decode"] = facts["e2e"] - facts["ttft"]
    return facts


def _per_later_token(facts: Mapping[str, Floats], time_ns: Floats) -> tuple[Floats, Floats]:
    """``time_ns`` / (n − 1) of requests with at least two tokens, and their n − 1."""
    tokens = facts["output_tokens"]
    several = tokens >= 2
    return time_ns[several] / (tokens[several] - 1), tokens[several] - 1


def _vllm(facts: Mapping[str, Floats], samples: StageSamples) -> list[dict[str, Any]]:
    entry = _entries("vLLM bench")
    return [
        entry(
            "TTFT",
            "first chunk with choices − start, connect included",
            "ttft",
            _linear(facts["ttft"] + facts["connect"]),
        ),
        entry("TPOT", "(E2E − TTFT) / (n − 1), n > 1", "tpot", _linear(_per_later_token(facts, facts["decode"])[0])),
        entry("ITL", "gaps between chunks, pooled", "chunk_gap", _pooled_linear(samples.gaps["chunk_gap"].reported)),
        entry(
            "E2EL", "last chunk with choices − start, connect included", "e2e", _linear(facts["e2e"] + facts["connect"])
        ),
    ]


def _aiperf(facts: Mapping[str, Floats], samples: StageSamples) -> list[dict[str, Any]]:
    entry = _entries("AIPerf")
    return [
        entry(
            "time to first token", "first chunk with text − start", "ttft", _linear(facts["ttft"] + facts["connect"])
        ),
        entry(
            "inter token latency",
            "(last − first) / (n − 1), one value a request",
            "itl",
            _linear(_per_later_token(facts, facts["decode"])[0]),
        ),
        entry(
            "inter chunk latency",
            "gaps between chunks, pooled",
            "chunk_gap",
            _pooled_linear(samples.gaps["chunk_gap"].reported),
        ),
        entry("request latency", "last chunk with text − start", "e2e", _linear(facts["e2e"] + facts["connect"])),
    ]


def _guidellm(facts: Mapping[str, Floats]) -> list[dict[str, Any]]:
    entry = _entries("GuideLLM")
    some = facts["output_tokens"] >= 1
    tokens = facts["output_tokens"][some]
    per_token = (facts["e2e"] + facts["connect"])[some] / tokens
    itl, itl_weights = _per_later_token(facts, facts["decode"])
    return [
        entry("TTFT", "first updating line − start", "ttft", _nearest(facts["ttft"] + facts["connect"])),
        entry("TPOT", "(last − start) / n, weighted by n: includes TTFT", "tpot", _weighted(per_token, tokens)),
        entry("ITL", "(last − first) / (n − 1), weighted by n − 1", "itl", _weighted(itl, itl_weights)),
        entry("request latency", "end of the stream − start", "done", _nearest(facts["done"] + facts["connect"])),
    ]


def _mlperf(facts: Mapping[str, Floats]) -> list[dict[str, Any]]:
    entry = _entries("MLPerf")
    latency = facts["done"] + facts["schedule_lag"]
    ttft = facts["ttft"] + facts["schedule_lag"]
    return [
        entry("TTFT", "first token − scheduled (sent, in a closed loop)", "ttft_from_schedule", _nearest(ttft)),
        entry("TPOT", "(latency − TTFT) / (n − 1)", "tpot", _nearest(_per_later_token(facts, latency - ttft)[0])),
        entry("latency", "completion − scheduled (sent, in a closed loop)", "done", _nearest(latency)),
    ]


_Numbers = dict[str, Any]


def _entries(tool: str) -> Callable[[str, str, str, _Numbers], dict[str, Any]]:
    def entry(name: str, definition: str, ours: str, numbers: _Numbers) -> dict[str, Any]:
        return {"tool": tool, "name": name, "definition": definition, "ours": ours, **numbers}

    return entry


def _numbers(n: int, mean_ns: float, percentile_ns: Callable[[str], float]) -> _Numbers:
    if not n:
        return {"n": 0, "mean_s": None, **{f"{name}_s": None for name in SHOWN}}
    shown = {f"{name}_s": seconds(percentile_ns(name)) for name in SHOWN}
    return {"n": n, "mean_s": seconds(mean_ns), **shown}


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0


def _linear(values: Floats) -> _Numbers:
    ordered = np.sort(values)
    return _numbers(
        len(values),
        _mean(values),
        lambda name: linear_percentile(len(ordered), lambda rank: float(ordered[rank - 1]), PERCENTILES[name]),
    )


def _pooled_linear(sample: PooledSample) -> _Numbers:
    mean = sample.mean_ns if sample.n else 0.0
    return _numbers(sample.n, mean, lambda name: linear_percentile(sample.n, sample.at_rank, PERCENTILES[name]))


def _nearest(values: Floats) -> _Numbers:
    ordered = np.sort(values)
    return _numbers(len(values), _mean(values), lambda name: percentile(ordered, PERCENTILES[name]))


def _weighted(values: Floats, weights: Floats) -> _Numbers:
    whole = weights.astype(np.int64)
    mean = float(values @ weights) / float(weights.sum()) if len(values) else 0.0
    return _numbers(len(values), mean, lambda name: weighted_percentile(values, whole, PERCENTILES[name]))
