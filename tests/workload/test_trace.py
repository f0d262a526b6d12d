from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from vllm_locust.errors import WorkloadError
from vllm_locust.workload.load import load_workload
from vllm_locust.workload.prompt import Prompt
from vllm_locust.workload.workload import Workload

BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,230,1317,API log
118,ChatGPT,417,0,417,Conversation log
bad,ChatGPT,417,1,417,Conversation log
120,ChatGPT,0,5,5,API log
121,ChatGPT,12
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
2024-05-10 00:00:00+00:00,12,3
2024-05-10 02:00:00.009930+02:00,13,4
yesterday,1,1
"""


def load(path: Path, cache_dir: Path, **options: Any) -> Workload:
    settings = {
        "tokenizer": None,
        "max_model_len": None,
        "max_tokens": None,
        "seed": 0,
        "cache_dir": cache_dir,
    } | options
    return load_workload(str(path), **settings)


def written(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def all_prompts(workload: Workload) -> list[Prompt]:
    return list(workload.prompts(seed=0, share=0, shares=1))


def plan(prompts: list[Prompt]) -> list[tuple[int | None, int | None, int | None]]:
    return [(p.offset_ns, p.prompt_tokens, p.output_tokens) for p in prompts]


def mooncake(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def text(prompt: Prompt) -> list[str]:
    return prompt.messages[0]["content"].split(" ")


def test_burstgpt(tmp_path: Path, cache_dir: Path) -> None:
    workload = load(written(tmp_path / "t.csv", BURSTGPT), cache_dir)
    assert plan(all_prompts(workload)) == [(0, 472, 18), (40_500_000_000, 1087, 230)]
    assert workload.filters == {"bad_row": 2, "empty_prompt": 1, "no_answer": 1}
    assert workload.replays_times


def test_azure_times_keep_their_fraction_and_zone(tmp_path: Path, cache_dir: Path) -> None:
    workload = load(written(tmp_path / "t.csv", AZURE), cache_dir)
    assert plan(all_prompts(workload)) == [
        (0, 374, 44),
        (4_314_579_000, 396, 109),
        (4_541_877_000, 879, 55),
        # 175 days, 5:44:13.31941 later
        (((175 * 24 + 5) * 3600 + 44 * 60 + 13) * 10**9 + 319_410_000, 12, 3),
        (((175 * 24 + 5) * 3600 + 44 * 60 + 13) * 10**9 + 329_340_000, 13, 4),
    ]
    assert workload.filters == {"bad_row": 1}


def test_mooncake_blocks_of_equal_name_are_equal_text(tmp_path: Path, cache_dir: Path) -> None:
    rows: list[Any] = [
        {"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2**63]},
        {"timestamp": 10.5, "input_length": 1030, "output_length": 26, "hash_ids": [46, 47, 48]},
        {"timestamp": 11, "input_length": 600, "output_length": 1, "hash_ids": [99, 47]},
        {"timestamp": 12, "input_length": 600, "output_length": 1, "hash_ids": [46]},
        {"timestamp": 13, "input_length": 100, "output_length": 1},
        {"timestamp": 14, "input_length": -1, "output_length": 1},
        {"timestamp": 15, "input_length": 1.5, "output_length": 1},
        {"timestamp": "x", "input_length": 1, "output_length": 1},
        {"timestamp": 15, "input_length": 1, "output_length": 1, "hash_ids": [[1]]},
        [],
        '{"timestamp": 16, "input_',
    ]
    workload = load(mooncake(tmp_path / "t.jsonl", rows), cache_dir)
    prompts = all_prompts(workload)
    assert plan(prompts) == [
        (0, 1100, 52),
        (10_500_000, 1030, 26),
        (11_000_000, 600, 1),
        (12_000_000, 600, 1),
        (13_000_000, 100, 1),
    ]
    assert workload.filters == {"bad_row": 6}
    a, b, c, d, e = (text(prompt) for prompt in prompts)
    assert [len(words) for words in (a, b, c, d, e)] == [1100, 1030, 600, 600, 100]
    assert a[:1024] == b[:1024]
    assert a[1024:1028] != b[1024:1028]
    assert c[:4] != a[:4]
    # A block that is cut short is the beginning of the block.
    assert c[512:] == a[512:600]
    assert d[:512] == a[:512]
    assert d[512:516] != a[512:516]
    assert e[:4] not in (a[:4], c[:4])
    (warning,) = workload.warnings
    assert "its last line is cut off" in warning


def test_rows_are_sorted_by_time_and_it_is_said(tmp_path: Path, cache_dir: Path) -> None:
    rows = [{"timestamp": t, "input_length": n, "output_length": 1} for t, n in ((30, 1), (10, 2), (20, 3), (10, 4))]
    workload = load(mooncake(tmp_path / "t.jsonl", rows), cache_dir)
    assert plan(all_prompts(workload)) == [(0, 2, 1), (0, 4, 1), (10_000_000, 3, 1), (20_000_000, 1, 1)]
    assert workload.warnings == ("t.jsonl: 2 rows are earlier than the row before them; sorted by time",)


@pytest.mark.parametrize("shares", [1, 2, 3])
def test_shares_together_replay_the_trace_once(tmp_path: Path, cache_dir: Path, shares: int) -> None:
    rows = [{"timestamp": t, "input_length": t + 1, "output_length": 1} for t in range(10)]
    workload = load(mooncake(tmp_path / "t.jsonl", rows), cache_dir)
    whole = all_prompts(workload)
    assert [p.prompt_tokens for p in whole] == list(range(1, 11))
    for share in range(shares):
        assert list(workload.prompts(seed=9, share=share, shares=shares)) == whole[share::shares]
    assert [workload.prompt(position, seed=9) for position in range(11)] == [*whole, None]


def test_speed_layout_and_row_limit_of_a_workload_file(tmp_path: Path, cache_dir: Path) -> None:
    rows = [{"timestamp": 1000 * t, "input_length": 8, "output_length": 1, "hash_ids": [1, 2]} for t in range(9)]
    mooncake(tmp_path / "t.jsonl", rows)
    spec = "kind: trace\nfile: t.jsonl\nlayout: mooncake\nspeed: 4\nblock_tokens: 4\nmax_rows: 3\n"
    workload = load(written(tmp_path / "replay.yaml", spec), cache_dir)
    prompts = all_prompts(workload)
    assert [p.offset_ns for p in prompts] == [0, 250_000_000, 500_000_000]
    assert len({p.messages[0]["content"] for p in prompts}) == 1
    assert workload.warnings == ("t.jsonl: only its first 3 usable rows are used (max_rows)",)
    assert workload.name == "replay"


def test_rows_beyond_the_context_are_dropped_and_counted(tmp_path: Path, cache_dir: Path) -> None:
    workload = load(written(tmp_path / "t.csv", BURSTGPT), cache_dir, max_model_len=472 + 18 + 64)
    assert plan(all_prompts(workload)) == [(0, 472, 18)]
    assert workload.filters["too_long"] == 1


def test_sessions_of_a_trace_have_one_turn(tmp_path: Path, cache_dir: Path) -> None:
    workload = load(written(tmp_path / "t.csv", BURSTGPT), cache_dir)
    sessions = list(islice(workload.sessions(seed=0, share=0, shares=1), 5))
    assert [(len(s.turns), s.turns[0].prompt_tokens) for s in sessions] == [(1, 472), (1, 1087)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", r"its columns \(a,b\) are of no known layout; known are"),
        ("", r"are of no known layout"),
        ("Timestamp,Request tokens,Response tokens\n1,x,2\n", r"holds nothing usable \(bad_row 1\)"),
        ("Timestamp,Request tokens,Response tokens\n", r"holds nothing usable \(no rows\)"),
    ],
)
def test_a_file_of_no_use_is_refused(tmp_path: Path, cache_dir: Path, content: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        load(written(tmp_path / "t.csv", content), cache_dir)


def test_a_layout_that_does_not_fit_is_refused(tmp_path: Path, cache_dir: Path) -> None:
    written(tmp_path / "t.csv", BURSTGPT)
    spec = written(tmp_path / "t.yaml", "kind: trace\nfile: t.csv\nlayout: azure\n")
    with pytest.raises(WorkloadError, match="layout azure needs the columns contexttokens, generatedtokens"):
        load(spec, cache_dir)


def test_the_times_of_a_trace_are_those_of_the_prompts_that_stay(tmp_path: Path, cache_dir: Path) -> None:
    for limit in (None, 472 + 18 + 64):
        workload = load(written(tmp_path / "t.csv", BURSTGPT), cache_dir, max_model_len=limit)
        times = workload.offsets_ns()
        assert times is not None
        assert times.tolist() == [prompt.offset_ns for prompt in all_prompts(workload)]
    other = written(tmp_path / "w.yaml", "kind: synthetic\nconversations: 3\nprompt_tokens: 5\noutput_tokens: 5\n")
    assert load(other, cache_dir).offsets_ns() is None


def test_the_content_has_nothing_of_the_seed_and_all_of_the_file(tmp_path: Path, cache_dir: Path) -> None:
    one, other = load(written(tmp_path / "t.csv", BURSTGPT), cache_dir), load(tmp_path / "t.csv", cache_dir, seed=5)
    assert one.fingerprint != other.fingerprint
    assert one.content == other.content
    changed = load(written(tmp_path / "t.csv", BURSTGPT.replace("1087,230", "1087,231")), cache_dir, seed=5)
    assert changed.content != one.content
