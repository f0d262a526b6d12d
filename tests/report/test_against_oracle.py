"""The numbers of random runs against plain Python over sorted lists, and the bounds of coalesced chunks against the
truth.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from tests.report.rows import SECOND, batch, request, run
from vllm_locust.report.summary import summarize
from vllm_locust.statistics import PERCENTILES


def nearest(values: list[float], q: Fraction) -> float:
    return sorted(values)[max(1, math.ceil(q * len(values))) - 1]


def random_rows(random: Random) -> list[dict[str, Any]]:
    rows = []
    for _ in range(random.randrange(1, 120)):
        chunks = sorted(random.choices(range(1, 4000), k=random.randrange(0, 12)))
        known = random.random() < 0.9
        tokens = [random.choice([0, 1, 1, 1, 2, 3]) for _ in chunks] if known and chunks else None
        if tokens:
            tokens[0] = max(1, tokens[0])
        rows.append(
            request(
                10 + random.randrange(10_000) / 1000,
                [chunk / 1000 for chunk in chunks],
                tokens,
                outcome=random.choice(["ok", "ok", "ok", "ok", "truncated", "timeout_idle"]),
                prompt=random.choice([None, 5, 50]),
            )
        )
    return rows


def oracle_samples(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """In nanoseconds, of ok requests, token by token."""
    samples: dict[str, list[float]] = {name: [] for name in ("ttft", "e2e", "tpot", "chunk_gap", "itl")}
    for row in rows:
        if row["outcome"] != "ok" or not row["chunk_ns"]:
            continue
        times, tokens = row["chunk_ns"], row["chunk_tokens"]
        samples["ttft"].append(times[0])
        samples["e2e"].append(times[-1])
        samples["chunk_gap"] += [b - a for a, b in pairwise(times)]
        if tokens is None:
            continue
        if sum(tokens) >= 2 and len(times) >= 2:
            samples["tpot"].append((times[-1] - times[0]) / (sum(tokens) - 1))
        since = times[0]
        for time, k in zip(times[1:], tokens[1:], strict=True):
            if k:
                samples["itl"] += [(time - since) / k] * k
                since = time
    return samples


@pytest.mark.parametrize("seed", range(12))
def test_every_number_is_the_oracles(seed: int) -> None:
    random = Random(seed)
    rows = random_rows(random)
    (stage,) = summarize(run(), [batch(rows)])["stages"]
    for name, values in oracle_samples(rows).items():
        block = stage[f"{name}_s"]
        assert block["n"] == len(values), name
        if values:
            assert block["mean"] == pytest.approx(sum(values) / len(values) / SECOND)
            assert block["max"] == pytest.approx(max(values) / SECOND)
            for key, q in PERCENTILES.items():
                assert block[key] == pytest.approx(nearest(values, q) / SECOND, rel=1e-12), (name, key)
    failed = sum(row["outcome"] != "ok" for row in rows)
    with_failures = sorted(oracle_samples(rows)["e2e"]) + [math.inf] * failed
    for key, q in PERCENTILES.items():
        expected = nearest(with_failures, q) if with_failures else None
        adjusted = stage["e2e_adjusted_s"]
        if expected is None:
            assert adjusted["n"] == 0
        elif math.isinf(expected):
            assert adjusted[key] is None
            assert key in adjusted["beyond"]
        else:
            assert adjusted[key] == pytest.approx(expected / SECOND)


@pytest.mark.parametrize("seed", range(6))
def test_token_rates_are_the_oracles(seed: int) -> None:
    rows = random_rows(Random(seed))
    (stage,) = summarize(run(12, 17), [batch(rows)])["stages"]
    start, end = stage["start_unix_ns"], stage["end_unix_ns"]

    def inside(row: dict[str, Any], after: int) -> bool:
        return bool(start <= row["sent_unix_ns"] + after < end)

    output = sum(
        k for row in rows for t, k in zip(row["chunk_ns"], row["chunk_tokens"] or [], strict=False) if inside(row, t)
    )
    given = sum(row["prompt_tokens"] or 0 for row in rows if row["chunk_ns"] and inside(row, row["chunk_ns"][0]))
    ended = sum(row["outcome"] == "ok" and bool(row["chunk_ns"]) and inside(row, row["chunk_ns"][-1]) for row in rows)
    assert stage["output_tokens_per_s"] == pytest.approx(output / 5)
    assert stage["input_tokens_per_s"] == pytest.approx(given / 5)
    assert stage["requests_per_s"] == pytest.approx(ended / 5)
    assert stage["achieved_rps"] == pytest.approx(sum(inside(row, 0) for row in rows) / 5)


def coalesced(random: Random, true: list[int]) -> tuple[list[int], list[int]]:
    """What a client records that reads several chunks at once: the last stamp for all, and the width for the others."""
    stamps, widths, polled, i = [], [], 0, 0
    while i < len(true):
        together = random.choice([1, 1, 1, 2, 3])
        read = true[i : i + together]
        stamps += [read[-1]] * len(read)
        widths += [read[-1] - polled] * (len(read) - 1) + [0]
        # An empty poll, some time before the next chunk.
        polled = read[-1]
        i += together
    return stamps, widths


def test_the_bounds_of_coalesced_chunks_hold_the_true_percentiles() -> None:
    random = Random(5)
    rows, truth = [], []
    for i in range(300):
        true = [50_000_000]
        for _ in range(40):
            true.append(true[-1] + random.randrange(15_000_000, 25_000_000))
        stamps, widths = coalesced(random, true)
        row = request(10 + i / 100, None, [1] * len(true), ttft_ns=stamps[0], e2e_ns=stamps[-1])
        rows.append({**row, "chunk_ns": stamps, "chunk_width_ns": widths, "coalesced": sum(w > 0 for w in widths)})
        truth.append({**row, "chunk_ns": true, "ttft_ns": true[0], "e2e_ns": true[-1]})
    summary = summarize(run(), [batch(rows)])
    exact = summarize(run(), [batch(truth)])["totals"]
    shifts = summary["coalesced"]["shifts"]
    assert {(shift["metric"], shift["percentile"]) for shift in shifts} >= {
        (metric, p) for metric in ("itl", "chunk_gap") for p in ("p50", "p99", "p99_9")
    } | {("ttft", "p50"), ("tpot", "p95"), ("e2e", "p90")}
    for shift in shifts:
        true_value = exact[f"{shift['metric']}_s"][shift["percentile"]]
        assert shift["lowest_s"] - 1e-9 <= true_value <= shift["highest_s"] + 1e-9, shift
        block = summary["totals"][f"{shift['metric']}_s"]
        assert shift["reported_s"] == block[shift["percentile"]]
        assert shift["percentile"] not in block["few_samples"], "what the report flags is no evidence"
    block = summary["coalesced"]
    touched = sum(
        before > 0 or after > 0
        for row in rows
        for before, after in zip(row["chunk_width_ns"], row["chunk_width_ns"][1:], strict=False)
    )
    assert (block["gaps"], block["gaps_touched"]) == (300 * 40, touched)
    assert block["width_s"]["n"] == sum(row["coalesced"] for row in rows)
    assert block["width_s"]["max"] == max(w for row in rows for w in row["chunk_width_ns"]) / 1e9
    assert summary["verdict"]["status"] == "invalid"
    assert summary["exit_code"] == 4
    assert "coalesced" in {reason["code"] for reason in summary["verdict"]["reasons"]}


def test_a_few_coalesced_chunks_move_nothing() -> None:
    rows = [request(10 + i / 1000, [0.05 + 0.02 * k for k in range(20)], [1] * 20) for i in range(3000)]
    rows[7] |= {"chunk_width_ns": [0] * 10 + [1_000_000] + [0] * 9, "coalesced": 1}
    summary = summarize(run(), [batch(rows)])
    assert summary["verdict"] == {"status": "valid", "reasons": []}
    assert summary["coalesced"]["gaps_touched"] == 2
