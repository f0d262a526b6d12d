from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.workload.conftest import conversation, write_json
from vllm_locust.errors import WorkloadError
from vllm_locust.workload.load import load_workload
from vllm_locust.workload.prompt import Prompt
from vllm_locust.workload.workload import Workload

ROWS = [
    conversation("one", "What is TTFT?", "Time to first token.", "And ITL?", "Inter-token latency."),
    conversation("mid", "the end of an answer", "Go on please.", "Of course, here it is.", first="gpt"),
    {
        "id": "sys",
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "user", "value": "Hello there!"},
            {"from": "assistant", "value": "Hi."},
        ],
    },
    conversation("one", "The same id again", "Another answer"),
    conversation("silent", "Nobody answers"),
    conversation("long", "word " * 500, "answer " * 100),
]


def load(path: Path, cache_dir: Path, **options: Any) -> Workload:
    settings = {
        "tokenizer": None,
        "max_model_len": None,
        "max_tokens": None,
        "seed": 0,
        "cache_dir": cache_dir,
    } | options
    return load_workload(str(path), **settings)


def epoch(workload: Workload) -> dict[str, Prompt]:
    prompts = list(islice(workload.prompts(seed=0, share=0, shares=1), workload.rows))
    return {prompt.prompt_id: prompt for prompt in prompts}


def test_first_questions_are_the_prompts(tmp_path: Path, cache_dir: Path) -> None:
    workload = load(write_json(tmp_path / "chats.json", ROWS), cache_dir)
    prompts = epoch(workload)
    assert set(prompts) == {f"sharegpt:{name}:0" for name in ("one", "mid", "sys", "one#2", "long")}
    assert prompts["sharegpt:one:0"].messages == ({"role": "user", "content": "What is TTFT?"},)
    assert prompts["sharegpt:mid:0"].messages == ({"role": "user", "content": "Go on please."},)
    assert prompts["sharegpt:sys:0"].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello there!"},
    )
    assert (prompts["sharegpt:one#2:0"].conversation_id, prompts["sharegpt:one#2:0"].turn) == ("one#2", 0)
    assert workload.filters == {"leading_answers_dropped": 1, "no_answer": 1}
    assert workload.warnings == ()
    assert workload.token_count_method == "estimate:byte_classes±13%"


def test_json_lines_give_the_same_requests(tmp_path: Path, cache_dir: Path) -> None:
    array = load(write_json(tmp_path / "chats.json", ROWS), cache_dir)
    lines = tmp_path / "chats.jsonl"
    lines.write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    assert epoch(load(lines, cache_dir)) == epoch(array)


def test_counts_are_the_tokenizers(tmp_path: Path, cache_dir: Path, tokenizer_file: Path) -> None:
    workload = load(write_json(tmp_path / "chats.json", ROWS), cache_dir, tokenizer=str(tokenizer_file.parent))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))

    def tokens(text: str) -> int:
        return len(tokenizer.encode(text).ids)

    prompts = epoch(workload)
    assert prompts["sharegpt:one:0"].prompt_tokens == tokens("What is TTFT?")
    assert prompts["sharegpt:one:0"].output_tokens == tokens("Time to first token.")
    assert prompts["sharegpt:sys:0"].prompt_tokens == tokens("Be brief.") + tokens("Hello there!")
    sessions = {s.conversation_id: s for s in islice(workload.sessions(seed=0, share=0, shares=1), workload.rows)}
    turns = sessions["one"].turns
    assert [turn.prompt_id for turn in turns] == ["sharegpt:one:0", "sharegpt:one:1"]
    assert [turn.text for turn in turns] == ["What is TTFT?", "And ITL?"]
    assert [turn.prompt_tokens for turn in turns] == [tokens("What is TTFT?"), tokens("And ITL?")]
    assert [turn.output_tokens for turn in turns] == [tokens("Time to first token."), tokens("Inter-token latency.")]
    assert (sessions["sys"].system, sessions["sys"].system_tokens) == ("Be brief.", tokens("Be brief."))
    assert workload.token_count_method == f"tokenizer:{tokenizer_file.parent}"


def test_rows_beyond_the_context_are_dropped_and_counted(tmp_path: Path, cache_dir: Path, tokenizer_file: Path) -> None:
    path = write_json(tmp_path / "chats.json", ROWS)
    whole = epoch(load(path, cache_dir, tokenizer=str(tokenizer_file)))["sharegpt:long:0"]
    assert whole.prompt_tokens is not None
    assert whole.output_tokens is not None
    needed = whole.prompt_tokens + whole.output_tokens + 64
    assert "sharegpt:long:0" in epoch(load(path, cache_dir, tokenizer=str(tokenizer_file), max_model_len=needed))
    cut = load(path, cache_dir, tokenizer=str(tokenizer_file), max_model_len=needed - 1)
    assert "sharegpt:long:0" not in epoch(cut)
    assert cut.filters["too_long"] == 1
    # An answer of 1 token makes room again; the reference keeps what was dropped.
    assert load(path, cache_dir, tokenizer=str(tokenizer_file), max_model_len=needed - 1, max_tokens=1).rows == 5
    assert whole.prompt_tokens in cut.length_reference()[0]


def test_a_session_ends_where_its_history_would_not_fit(tmp_path: Path, cache_dir: Path, tokenizer_file: Path) -> None:
    path = write_json(tmp_path / "chats.json", ROWS[:1])
    session = next(load(path, cache_dir, tokenizer=str(tokenizer_file)).sessions(seed=0, share=0, shares=1))
    assert (len(session.turns), session.turns_too_long) == (2, 0)
    needed = sum(turn.prompt_tokens + turn.output_tokens for turn in session.turns) + 64
    for max_model_len, turns in ((needed, 2), (needed - 1, 1)):
        workload = load(path, cache_dir, tokenizer=str(tokenizer_file), max_model_len=max_model_len)
        session = next(workload.sessions(seed=0, share=0, shares=1))
        assert (len(session.turns), session.turns_too_long) == (turns, 2 - turns)
    assert load(path, cache_dir, tokenizer=str(tokenizer_file), max_model_len=needed - 1).rows == 1


def test_limits_of_a_workload_file(tmp_path: Path, cache_dir: Path, tokenizer_file: Path) -> None:
    write_json(tmp_path / "chats.json", ROWS)
    spec = tmp_path / "limited.yaml"
    spec.write_text("kind: sharegpt\nfile: chats.json\nmax_prompt_tokens: 100\nmin_output_tokens: 3\n")
    workload = load(spec, cache_dir, tokenizer=str(tokenizer_file))
    whole = epoch(load(tmp_path / "chats.json", cache_dir, tokenizer=str(tokenizer_file)))
    expected = {k for k, p in whole.items() if (p.prompt_tokens or 0) <= 100 and (p.output_tokens or 0) >= 3}
    assert set(epoch(workload)) == expected
    assert workload.filters["prompt_too_long"] == 1
    assert workload.filters.get("output_too_short", 0) == 4 - len(expected)
    assert workload.name == "limited"


def test_a_cut_off_file_is_read_as_far_as_it_goes(tmp_path: Path, cache_dir: Path) -> None:
    path = write_json(tmp_path / "chats.json", ROWS[:3])
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"Hello there")])
    workload = load(path, cache_dir)
    assert set(epoch(workload)) == {"sharegpt:one:0", "sharegpt:mid:0"}
    (warning,) = workload.warnings
    assert warning.startswith(
        f"chats.json ({path.stat().st_size:,} bytes) is damaged: reading ended where the file is cut"
    )
    assert warning.endswith("; 2 whole rows were read")


@pytest.mark.parametrize("content", ["", "[]", "[1, 2]", "<html>", '[{"id": "a", "conversations": [', '{"id": 1}\n'])
def test_a_file_with_nothing_usable_is_refused(tmp_path: Path, cache_dir: Path, content: str) -> None:
    path = tmp_path / "chats.json"
    path.write_text(content)
    with pytest.raises(WorkloadError, match=r"chats\.json holds nothing usable .*; give a ShareGPT file"):
        load(path, cache_dir)


def test_nothing_left_by_the_filters_is_refused(tmp_path: Path, cache_dir: Path) -> None:
    path = write_json(tmp_path / "chats.json", ROWS)
    with pytest.raises(WorkloadError, match=r"no row of 5 is left \(.*too_long 5\); raise the server's max_model_len"):
        load(path, cache_dir, max_model_len=10)


@pytest.mark.parametrize("name", ["missing.json", "no/such/file"])
def test_a_missing_file_is_named(cache_dir: Path, name: str) -> None:
    with pytest.raises(WorkloadError, match=f"--workload {name}: there is no such file"):
        load_workload(name, tokenizer=None, max_model_len=None, max_tokens=None, seed=0, cache_dir=cache_dir)


def test_the_fingerprint_follows_content_and_settings_and_not_the_place(tmp_path: Path, cache_dir: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    one = load(write_json(here / "chats.json", ROWS), cache_dir)
    assert load(write_json(there / "chats.json", ROWS), cache_dir).fingerprint == one.fingerprint
    assert load(here / "chats.json", cache_dir, max_model_len=8192).fingerprint != one.fingerprint
    assert load(write_json(there / "chats.json", ROWS[::-1]), cache_dir).fingerprint != one.fingerprint


def test_the_content_has_nothing_of_the_seed_and_all_of_the_file(tmp_path: Path, cache_dir: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    one = load(write_json(here / "chats.json", ROWS), cache_dir)
    assert load(here / "chats.json", cache_dir, seed=5).content == one.content
    assert load(write_json(there / "chats.json", ROWS[::-1]), cache_dir, seed=5).content != one.content


def test_a_data_set_repeats(tmp_path: Path, cache_dir: Path) -> None:
    assert load(write_json(tmp_path / "chat.json", ROWS), cache_dir).repeats
