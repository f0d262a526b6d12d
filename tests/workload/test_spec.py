from __future__ import annotations

import re
from importlib import resources
from itertools import pairwise
from pathlib import Path

import pytest

from vllm_locust.errors import WorkloadError
from vllm_locust.workload.lengths import Fixed, Lognormal, Marginals, Uniform, read_length_pairs
from vllm_locust.workload.load import find_spec, load_workload
from vllm_locust.workload.spec import (
    SharedPrefixSpec,
    ShareGptSpec,
    SyntheticSpec,
    TraceSpec,
    WorkloadSpec,
    read_spec,
    workload_path,
)

SHIPPED = ("sharegpt", "short_chat", "code_completion", "rag_long_prompt", "offline_batch", "shared_prefix")


def read(directory: Path, text: str) -> WorkloadSpec:
    path = directory / "mix.yaml"
    path.write_text(text)
    return read_spec(path)


def problems(directory: Path, text: str) -> tuple[str, ...]:
    with pytest.raises(WorkloadError) as caught:
        read(directory, text)
    return caught.value.problems


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_workload_loads(name: str, cache_dir: Path) -> None:
    workload = load_workload(name, tokenizer=None, max_model_len=32_768, max_tokens=None, seed=0, cache_dir=cache_dir)
    assert workload.name == name
    assert workload.description
    assert workload.filters == {}
    assert next(workload.prompts(seed=0, share=0, shares=1)).prompt_tokens


def test_the_shipped_files_are_the_ones_tested() -> None:
    assert {path.stem for path in workload_path("sharegpt").parent.glob("*.yaml")} == set(SHIPPED)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        WorkloadError, match=r"--workload chat: there is no such workload; use one of code_completion, "
    ):
        find_spec("chat")


def test_an_installed_package_finds_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "vllm_locust"
    data = package / "data" / "workloads"
    data.mkdir(parents=True)
    (data / "sharegpt.yaml").write_text("kind: synthetic")
    monkeypatch.setattr(resources, "files", lambda _name: package)
    assert workload_path("sharegpt") == data / "sharegpt.yaml"


def test_the_typed_form(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        """
        kind: shared_prefix
        name: docs
        groups: 4
        prefix_tokens: 100
        prefix_role: user
        conversations_per_group: 2
        template_tokens: 0
        prompt_tokens: {distribution: lognormal, median: 50, sigma: 0.5, max: 99}
        output_tokens: {distribution: uniform, min: 2, max: 3}
        turns: 3
        """,
    )
    assert found == SharedPrefixSpec(
        name="docs",
        template_tokens=0,
        groups=4,
        prefix_tokens=100,
        prefix_role="user",
        conversations_per_group=2,
        lengths=Marginals(Lognormal(50, 0.5, 1, 99), Uniform(2, 3)),
        turns=Fixed(3),
    )


def test_all_faults_come_at_once(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        """
        kind: synthetic
        conversation: 5
        prompt_tokens: {distribution: uniform, min: 9, max: 3, sigma: 1}
        output_tokens: many
        turns: 0
        """,
    )
    assert found == (
        "mix.yaml: prompt_tokens: max must not be below min (9)",
        "mix.yaml: prompt_tokens: sigma is not a known key; known here: distribution, max, min",
        "mix.yaml: output_tokens must be a whole number of at least 1, not 'many'",
        "mix.yaml: conversations is missing; add it",
        "mix.yaml: turns must be a whole number of at least 1, not 0",
        "mix.yaml: conversation is not a known key; did you mean conversations?",
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kind: chat", "mix.yaml: kind must be one of synthetic, sharegpt, shared_prefix, trace, not 'chat'"),
        ("conversations: 3", "mix.yaml: kind is missing; add it"),
        ("kind: trace\nfile: t.csv\nspeed: -1", "mix.yaml: speed must be a number above 0, not -1"),
        (
            "kind: synthetic\nconversations: true\nprompt_tokens: 1\noutput_tokens: 1",
            "mix.yaml: conversations must be a whole number of at least 1, not True",
        ),
        (
            "kind: synthetic\nconversations: 1\nprompt_tokens: 1\njoint_lengths: mix.yaml",
            "mix.yaml: prompt_tokens cannot stand beside joint_lengths; remove one of them",
        ),
        ("kind: sharegpt", "mix.yaml: file is missing; add it"),
    ],
)
def test_each_fault_names_its_key(tmp_path: Path, text: str, problem: str) -> None:
    assert problem in problems(tmp_path, text)


def test_a_missing_file_is_named_by_its_full_path(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, "kind: sharegpt\nfile: chats.json")
    assert found.startswith(f"mix.yaml: file names {tmp_path / 'chats.json'}, which is not a file")


@pytest.mark.parametrize("text", ["- a\n- b", "", "kind: [", "kind: trace\nkind: sharegpt", "kind: \x00"])
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    (found,) = problems(tmp_path, text)
    assert str(tmp_path / "mix.yaml") in found


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("chats.json", '[{"id": "a", "conversations": []}]', ShareGptSpec),
        ("chats.jsonl", '{"id": "a", "conversations": []}', ShareGptSpec),
        ("t.jsonl", '{"timestamp": 1, "input_length": 2, "output_length": 3}', TraceSpec),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", TraceSpec),
        ("mix.yml", "kind: synthetic\nconversations: 1\nprompt_tokens: 1\noutput_tokens: 1", SyntheticSpec),
    ],
)
def test_a_file_is_known_by_its_content(tmp_path: Path, name: str, content: str, kind: type) -> None:
    (tmp_path / name).write_text(content)
    assert type(find_spec(str(tmp_path / name))) is kind


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1,2\n", "the first line of"),
        ("prompt_tokens,output_tokens\n", "at least one pair"),
        ("prompt_tokens,output_tokens\n0,1\n", "no length below 1"),
        ("prompt_tokens,output_tokens\n1\n", "not two whole numbers"),
        ("prompt_tokens,output_tokens\n1,x\n", "not two whole numbers"),
    ],
)
def test_a_bad_file_of_lengths_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(content)
    with pytest.raises(WorkloadError, match=message):
        read_length_pairs(path)


BOMB = "a: &a [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in pairwise("abcdefghijk")
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("kind: [", "not valid YAML"),
        ("kind: {shape: hold, ? [a, b] : 3}", "a key is a list or a mapping: write a name"),
        ("? {a: 1}\n: 3", "a key is a list or a mapping: write a name"),
        ("kind: " + "[" * 3000, "nested more than 50 deep"),
        ("kind: " + "{a: " * 3000, "nested more than 50 deep"),
        (BOMB + "kind: *k", r"\*a is an alias, which is not read here: write out what it stands for"),
        ("kind: &k [*k]", r"\*k is an alias"),
        ("<<: {a: 1}", "<< is neither a text nor a number"),
        ("kind: 010", "010 is another number in YAML than it seems: write it as a plain decimal"),
        ("kind: 1:30", "1:30 is another number in YAML than it seems"),
        ("kind: " + "9" * 5000, "is not a number"),
        ("kind: 2026-13-45", "2026-13-45 is neither a text nor a number in YAML: put it in quotes"),
        ("kind: !!int x", "is a tag, which is not read here: drop it"),
        ("kind: !!python/object/apply:os.getcwd []", "is a tag, which is not read here: drop it"),
    ],
)
def test_what_yaml_allows_and_nobody_means(tmp_path: Path, text: str, reason: str) -> None:
    (problem,) = problems(tmp_path, text)
    assert re.search(reason, problem)
    assert "\n" not in problem
    assert len(problem) < 500


def test_numbers_as_yaml_1_2_writes_them(tmp_path: Path) -> None:
    lengths = "prompt_tokens: {distribution: lognormal, median: 1_000, sigma: 5e-1, max: 2000}\noutput_tokens: 5"
    spec = read(tmp_path, f"kind: synthetic\nname: '010'\nconversations: 9\n{lengths}")
    assert isinstance(spec, SyntheticSpec)
    assert spec.lengths == Marginals(Lognormal(1000, 0.5, 1, 2000), Fixed(5))
    assert spec.name == "010"
