"""Whole runs on a real vLLM with the real ShareGPT file, against the server's own counters and histograms.

Start a vLLM that nothing else uses, then
``VLLM_LOCUST_TEST_VLLM_URL=http://HOST:8000 VLLM_LOCUST_TEST_SHAREGPT=FILE pytest tests/live``.
"""

from __future__ import annotations

import json
import urllib.request
from collections import defaultdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.live.server_metrics import Added, Histogram, counting
from tests.run.simulated import ROOT, LocustRun, run_distributed, run_locust
from tests.run.test_truth import nearest_rank
from vllm_locust.workload.load import load_workload
from vllm_locust.workload.prompt import Session

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

SESSIONS = str(ROOT / "locustfiles" / "sessions.py")
QUICK = ("-u", "4", "-r", "4", "-t", "3s", "--warmup-requests", "4")


def ok_rows(run: LocustRun, minimum: int = 10) -> list[dict[str, Any]]:
    """Every request of the run, all phases; all must have gone well. Exit code 4 is a noisy machine's."""
    assert run.exit_code in (0, 4), run.output
    rows = run.requests()
    assert {row["outcome"] for row in rows} == {"ok"}, run.output
    assert len(rows) >= minimum, run.output
    return rows


def assert_same_counts(rows: list[dict[str, Any]], added: Added) -> None:
    """Requests and tokens are those that the server counted, to the last one."""
    success = "vllm:request_success_total"
    finished = {reason: sum(row["finish_reason"] == reason for row in rows) for reason in ("stop", "length")}
    assert {reason: added.total(success, finished_reason=reason) for reason in finished} == finished
    assert added.total(success) == len(rows)
    assert added.total("vllm:prompt_tokens_total") == sum(row["prompt_tokens"] for row in rows)
    assert added.total("vllm:generation_tokens_total") == sum(row["output_tokens"] for row in rows)


def assert_tokens_of_every_chunk(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert sum(row["chunk_tokens"]) == row["output_tokens"]
        assert len(row["chunk_tokens"]) == len(row["chunk_ns"])
        assert row["token_source"] == "usage"


def test_a_sharegpt_run_agrees_with_the_server(
    vllm_url: str, sharegpt: str, tokenizer_flags: tuple[str, ...], tmp_path: Path
) -> None:
    flags = ("-u", "8", "-r", "8", "-t", "15s", "--warmup-requests", "20", "--workload", sharegpt, "--max-tokens", "64")
    with counting(vllm_url) as added:
        run = run_distributed(tmp_path, vllm_url, 2, [*flags, *tokenizer_flags])
    rows = ok_rows(run, minimum=50)
    assert len({row["worker_id"] for row in rows}) == 2
    assert len({row["prompt_id"] for row in rows}) == len({row["request_id"] for row in rows}) == len(rows)
    assert {row["phase"] for row in rows} >= {"warmup", "window"}
    assert_same_counts(rows, added)
    assert_tokens_of_every_chunk(rows)
    totals = run.summary["totals"]["all_phases"]
    assert totals["output_tokens"] == added.total("vllm:generation_tokens_total")
    assert_ttft_agrees([row["ttft_ns"] / 1e9 for row in rows], added.histogram("vllm:time_to_first_token_seconds"))
    assert_itl_agrees(rows, added.histogram("vllm:inter_token_latency_seconds"))
    if tokenizer_flags:
        assert_planned_lengths(rows, sharegpt)


def assert_planned_lengths(rows: list[dict[str, Any]], sharegpt: str) -> None:
    """With its tokenizer each prompt is as long as planned, but for what the chat template adds to each message."""
    sessions = sessions_by_id(sharegpt, {row["conversation_id"] for row in rows})
    added: dict[bool, set[int]] = defaultdict(set)
    for row in rows:
        has_system = sessions[row["conversation_id"]].system is not None
        added[has_system].add(row["prompt_tokens"] - row["prompt_tokens_planned"])
    assert all(len(different) == 1 for different in added.values()), added


def assert_ttft_agrees(ours_s: list[float], servers: Histogram) -> None:
    """The server's TTFT starts when it has read the request and ends before it writes the token: it is the lesser."""
    assert servers.count == len(ours_s)
    assert sum(ours_s) / len(ours_s) > servers.sum / servers.count
    for q in (0.5, 0.9, 0.99):
        ours = servers.bucket_of(nearest_rank(ours_s, q))
        assert abs(ours - servers.bucket_of_quantile(q)) <= 1, (q, nearest_rank(ours_s, q))


def assert_itl_agrees(rows: list[dict[str, Any]], servers: Histogram) -> None:
    """vLLM observes one ITL per engine step of a request after its first: without speculative decoding one per token,
    whatever chunks the tokens later share. So its sum is the time from the first to the last token, its count the
    tokens but the first, and that is how ours is pooled here. Ours misses the steps inside a first chunk of several
    tokens, which are few.
    """
    intervals = sum(row["output_tokens"] - 1 for row in rows)
    assert servers.count == intervals
    ours_s = sum(row["chunk_ns"][-1] - row["chunk_ns"][0] for row in rows) / 1e9 / intervals
    assert ours_s == pytest.approx(servers.sum / servers.count, rel=0.05)


def test_every_transport_counts_what_the_server_counts(vllm_url: str, sharegpt: str, tmp_path: Path) -> None:
    prompt_tokens: dict[str, dict[str, int]] = {}
    for transport in ("kernel", "sse", "openai"):
        directory = tmp_path / transport
        directory.mkdir()
        flags = (*QUICK, "--workload", sharegpt, "--max-tokens", "32", "--force-length", "--transport", transport)
        with counting(vllm_url) as added:
            run = run_locust(directory, vllm_url, *flags)
        rows = ok_rows(run)
        assert {row["transport"] for row in rows} == {transport}
        assert {row["output_tokens"] for row in rows} == {32}
        assert_same_counts(rows, added)
        assert_tokens_of_every_chunk(rows)
        prompt_tokens[transport] = {row["prompt_id"]: row["prompt_tokens"] for row in rows}
    common = set.intersection(*(set(of_one) for of_one in prompt_tokens.values()))
    assert len(common) >= 10
    for prompt_id in common:
        assert len({of_one[prompt_id] for of_one in prompt_tokens.values()}) == 1, prompt_id


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_both_apis_streamed_and_whole(vllm_url: str, sharegpt: str, tmp_path: Path, api: str, stream: bool) -> None:
    flags = (*QUICK, "--workload", sharegpt, "--max-tokens", "32", "--api", api, *(() if stream else ("--no-stream",)))
    with counting(vllm_url) as added:
        run = run_locust(tmp_path, f"{vllm_url}/v1", *flags)
    rows = ok_rows(run)
    assert_same_counts(rows, added)
    prefix = "chatcmpl-" if api == "chat" else "cmpl-"
    assert all(row["response_id"].startswith(prefix) for row in rows)
    assert {row["streamed"] for row in rows} == {stream}
    if stream:
        assert_tokens_of_every_chunk(rows)
        return
    assert all(row["ttft_ns"] is None and row["chunk_ns"] == [] for row in rows)
    assert all(row["e2e_ns"] == row["done_ns"] > 0 for row in rows)
    servers = added.histogram("vllm:e2e_request_latency_seconds")
    assert sum(row["e2e_ns"] for row in rows) / 1e9 > servers.sum


def test_without_token_detail_there_is_no_itl(vllm_url: str, sharegpt: str, tmp_path: Path) -> None:
    flags = (*QUICK, "--workload", sharegpt, "--max-tokens", "32", "--token-detail", "off")
    with counting(vllm_url) as added:
        run = run_locust(tmp_path, vllm_url, *flags)
    rows = ok_rows(run)
    assert_same_counts(rows, added)
    assert all(row["chunk_tokens"] is None for row in rows)
    (stage,) = run.summary["stages"]
    assert stage["itl_s"]["n"] == 0
    assert stage["itl_s"]["p50"] is None
    window = [row for row in rows if row["phase"] == "window"]
    assert stage["chunk_gap_s"]["n"] == sum(len(row["chunk_ns"]) - 1 for row in window) > 0


def test_sessions_carry_the_servers_own_answers(vllm_url: str, sharegpt: str, tmp_path: Path) -> None:
    """``/tokenize`` tells how long each prompt would be with empty answers in its history. What was sent is longer by
    the answers: by about their tokens, since text need not become the tokens again that it was made of.
    """
    flags = ("-f", SESSIONS, *QUICK, "--workload", sharegpt, "--max-tokens", "32", "--force-length")
    with counting(vllm_url) as added:
        run = run_locust(tmp_path, vllm_url, *flags)
    rows = ok_rows(run)
    assert_same_counts(rows, added)
    sessions = sessions_by_id(sharegpt, {row["conversation_id"] for row in rows})
    ratios: list[float] = []
    for row in rows:
        turn = row["turn"]
        answers = row["prompt_tokens"] - tokens_with_empty_answers(vllm_url, sessions[row["conversation_id"]], turn)
        if turn:
            ratios.append(answers / (32 * turn))
        else:
            assert answers == 0
    assert len(ratios) > 5
    assert 0.8 < nearest_rank(ratios, 0.5) < 1.25, ratios
    assert 0.5 < min(ratios) <= max(ratios) < 2, ratios


def sessions_by_id(sharegpt: str, wanted: set[str]) -> dict[str, Session]:
    workload = load_workload(sharegpt, tokenizer=None, max_model_len=None, max_tokens=32, seed=0)
    one_epoch = islice(workload.sessions(seed=0, share=0, shares=1), workload.rows)
    return {session.conversation_id: session for session in one_epoch if session.conversation_id in wanted}


def tokens_with_empty_answers(url: str, session: Session, turn: int) -> int:
    messages = [] if session.system is None else [{"role": "system", "content": session.system}]
    for number, asked in enumerate(session.turns[: turn + 1]):
        messages += [{"role": "assistant", "content": ""}] if number else []
        messages.append({"role": "user", "content": asked.text})
    return int(post_json(f"{url}/tokenize", {"messages": messages})["count"])


def post_json(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_an_unknown_model_is_refused_before_any_load(vllm_url: str, tmp_path: Path) -> None:
    with counting(vllm_url) as added:
        run = run_locust(tmp_path, vllm_url, *QUICK, "--model", "no-such-model")
    assert run.exit_code == 2, run.output
    assert "--model: 'no-such-model' is not served" in run.output
    assert added.total("vllm:prompt_tokens_total") == 0
