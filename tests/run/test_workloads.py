"""Workloads as a run plays them: traces end it, sessions carry the server's own answers, replicas take turns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.certificates import make_certificate
from tests.run.simulated import FAST, ROOT, end_of, environment, run_locust, simserver

pytestmark = pytest.mark.timeout(120)


def test_a_run_ends_with_a_finite_workload(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 1000 * i, "input_length": 20 + i, "output_length": 5, "hash_ids": [i]} for i in range(30)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with simserver(tmp_path, *FAST) as server:
        flags = (
            "-u",
            "4",
            "-r",
            "4",
            "-t",
            "50s",
            "--warmup-requests",
            "0",
            "--workload",
            str(trace),
            "--force-length",
        )
        run = run_locust(tmp_path, server.url, *flags)
    rows_sent = run.requests()
    assert len(rows_sent) == len({row["prompt_id"] for row in rows_sent}) == 30, run.output
    assert {row["output_tokens"] for row in rows_sent} == {5}
    assert "used up" in str(run.summary["verdict"]["reasons"])


def test_sessions_go_on_with_the_servers_own_answers(tmp_path: Path) -> None:
    data = tmp_path / "talks.json"
    turns = [{"from": who, "value": f"{who} says {n} words"} for n in range(3) for who in ("human", "gpt")]
    data.write_text(json.dumps([{"id": f"talk{i}", "conversations": turns} for i in range(40)]), encoding="utf-8")
    with simserver(tmp_path, *FAST) as server:
        command = [
            sys.executable,
            "-m",
            "locust",
            "-f",
            str(ROOT / "locustfiles" / "sessions.py"),
            "--host",
            server.url,
        ]
        flags = ["--headless", "--only-summary", "--run-dir", "run", "-u", "2", "-r", "2", "-t", "2s"]
        process = subprocess.Popen(
            [
                *command,
                *flags,
                "--workload",
                str(data),
                "--warmup-requests",
                "0",
                "--max-tokens",
                "7",
                "--force-length",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env=environment(),
        )
        run = end_of(process, tmp_path)
    talks: dict[str, list[tuple[int, int]]] = {}
    for row in sorted(run.requests(), key=lambda row: int(row["sent_unix_ns"])):
        talks.setdefault(row["conversation_id"], []).append((row["turn"], row["prompt_tokens"]))
    whole = [talk for talk in talks.values() if len(talk) == 3]
    assert len(whole) > 3, run.output
    for talk in whole:
        assert [turn for turn, _ in talk] == [0, 1, 2]
        sizes = [tokens for _, tokens in talk]
        assert sizes[0] < sizes[1] < sizes[2], "the history grows by the question and the answer"


def test_replicas_are_used_in_turn(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with simserver(tmp_path / "a", *FAST) as first, simserver(tmp_path / "b", *FAST) as second:
        flags = ("-u", "4", "-r", "4", "-t", "1s", "--warmup-requests", "0", "--max-tokens", "5")
        run = run_locust(tmp_path, None, "--target", first.url, "--target", second.url, *flags)
        first.stop()
        second.stop()
        counts = [len(first.truth()), len(second.truth())]
    assert sum(counts) == len(run.requests()) > 10, run.output
    assert abs(counts[0] - counts[1]) <= 1
    assert {row["target"] for row in run.requests()} == {first.url, second.url}


@pytest.mark.parametrize("address", ["unix", "https", "localhost"])
def test_other_ways_to_the_server(tmp_path: Path, address: str) -> None:
    flags = ("-u", "2", "-r", "2", "-t", "1s", "--warmup-requests", "0", "--max-tokens", "5")
    if address == "unix":
        socket_path = tmp_path / "s"
        with simserver(tmp_path, *FAST, "--uds", str(socket_path)) as server:
            run = run_locust(tmp_path, f"unix://{socket_path}", *flags)
    elif address == "https":
        made = make_certificate(tmp_path)
        with simserver(tmp_path, *FAST, "--ssl-certfile", str(made.cert), "--ssl-keyfile", str(made.key)) as server:
            refused = run_locust(tmp_path, server.url, *flags)
            assert refused.exit_code == 2, refused.output
            assert "certificate" in refused.output.lower()
            run = run_locust(tmp_path, server.url, *flags, "--ca-file", str(made.ca))
    else:
        with simserver(tmp_path, *FAST) as server:
            run = run_locust(tmp_path, server.url.replace("127.0.0.1", "localhost"), *flags)
    assert {row["outcome"] for row in run.requests()} == {"ok"}, run.output
    assert {row["stamp_source"] for row in run.requests()} == {"user" if address == "unix" else "kernel"}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole answers"])
def test_the_tokenizer_counts_what_a_server_does_not(tmp_path: Path, stream: bool) -> None:
    """Five tokens in each chunk, one for each word: chunks would say a fifth."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "talks.json").write_text(
        json.dumps(
            [
                {"conversations": [{"from": "human", "value": f"{i} or not"}, {"from": "gpt", "value": "so"}]}
                for i in range(99)
            ]
        )
    )
    words = ("--stream-interval", "5", "--empty-text-share", "0", "--reasoning-share", "0.3")
    faults = ("--fault", "no_usage:share=1" if stream else "no_usage:share=0.5")
    with simserver(tmp_path, *FAST, *words, *faults) as server:
        flags = ("-u", "4", "-r", "4", "-t", "1s", "--warmup-requests", "0", "--max-tokens", "23", "--force-length")
        more = ("--workload", "talks.json", "--tokenizer", "tokenizer.json", "--token-detail", "off")
        run = run_locust(tmp_path, server.url, *flags, *more, *(() if stream else ("--no-stream",)))
        server.stop()
        truth = {row["request_id"]: row for row in server.truth()}
    rows = run.requests()
    assert len(rows) == len(truth) > 20, run.output
    for row in rows:
        assert row["outcome"] == "ok"
        assert row["output_tokens"] == truth[row["request_id"]]["output_tokens"] == 23
        assert len(row["chunk_ns"]) == (len(truth[row["request_id"]]["chunk_before_ns"]) if stream else 0) < 10
        assert row["chunk_tokens"] is None
        faulty = truth[row["request_id"]]["fault_happened"]
        assert row["token_source"] == ("tokenizer" if faulty else "usage"), "where there is usage, it counts"
    assert {row["token_source"] for row in rows} == ({"tokenizer"} if stream else {"tokenizer", "usage"})
    assert "tokens_are_chunks" not in str(run.summary["verdict"])
