"""Generated text: exact lengths by the tokenizer itself, no accidental prefixes, the distribution of the source."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from tokenizers import Tokenizer

from vllm_locust.workload import generated
from vllm_locust.workload.corpus import Corpus, Domain
from vllm_locust.workload.lengths import read_length_pairs
from vllm_locust.workload.load import load_workload
from vllm_locust.workload.prompt import Prompt
from vllm_locust.workload.spec import workload_path
from vllm_locust.workload.tokens import TokenizerTokens, common_words
from vllm_locust.workload.workload import Workload


def load(name: str | Path, cache_dir: Path, **options: Any) -> Workload:
    settings = {
        "tokenizer": None,
        "max_model_len": None,
        "max_tokens": None,
        "seed": 0,
        "cache_dir": cache_dir,
    } | options
    return load_workload(str(name), **settings)


def first(workload: Workload, count: int, seed: int = 0) -> list[Prompt]:
    return list(islice(workload.prompts(seed=seed, share=0, shares=1), count))


def contents(messages: tuple[Mapping[str, str], ...]) -> list[str]:
    return [message["content"] for message in messages]


def spec_file(directory: Path, text: str) -> Path:
    path = directory / "spec.yaml"
    path.write_text(text)
    return path


def ks(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> float:
    points = np.union1d(a, b)
    of_a, of_b = (np.searchsorted(np.sort(x), points, side="right") / x.size for x in (a, b))
    return float(np.abs(of_a - of_b).max())


def rank_correlation(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> float:
    ranks = []
    for values in (a, b):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[inverse])
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


SHAREGPT_LENGTHS = f"""
kind: synthetic
conversations: 500
joint_lengths: {workload_path("sharegpt").parent / "sharegpt_lengths.csv"}
"""


def test_prompts_are_exact_in_tokens(tmp_path: Path, cache_dir: Path, tokenizer_file: Path) -> None:
    workload = load(spec_file(tmp_path, SHAREGPT_LENGTHS), cache_dir, tokenizer=str(tokenizer_file))
    prompts = first(workload, 500)
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    counted = [len(e.ids) for e in tokenizer.encode_batch([contents(p.messages)[0] for p in prompts])]
    assert counted == [p.prompt_tokens for p in prompts]
    assert workload.token_count_method == f"tokenizer:{tokenizer_file}"
    assert workload.warnings == ()


def test_prompts_of_one_epoch_and_the_next_start_differently(cache_dir: Path) -> None:
    workload = load("sharegpt", cache_dir)
    prompts = first(workload, 2 * workload.rows)
    starts = [tuple(contents(p.messages)[0].split(" ")[:4]) for p in prompts if (p.prompt_tokens or 0) >= 4]
    assert len(set(starts)) == len(starts)
    assert len({p.prompt_id for p in prompts}) == len(prompts)
    neighbours = {f"synthetic:{i}" for i in range(512)}
    assert len({contents(p.messages)[0].split(" ")[0] for p in prompts if p.prompt_id in neighbours}) == 512


@pytest.mark.parametrize("shares", range(1, 9))
def test_any_number_of_shares_sends_the_same_sequence(cache_dir: Path, shares: int) -> None:
    workload = load("shared_prefix", cache_dir)
    whole = first(workload, 12 * shares, seed=4)
    for share in range(shares):
        assert list(islice(workload.prompts(seed=4, share=share, shares=shares), 12)) == whole[share::shares]
        sessions = islice(workload.sessions(seed=4, share=share, shares=shares), 12)
        assert [s.conversation_id for s in sessions] == [p.conversation_id for p in whole[share::shares]]
    places = (0, workload.rows - 1, workload.rows, 3, 2 * workload.rows + 1)
    longer = first(workload, max(places) + 1, seed=4)
    assert [workload.prompt(place, seed=4) for place in places] == [longer[place] for place in places]
    one = workload.session(3, seed=4)
    assert one is not None
    assert one.conversation_id == longer[3].conversation_id


def test_another_seed_gives_other_text(cache_dir: Path) -> None:
    texts = [{contents(p.messages)[0] for p in first(load("sharegpt", cache_dir, seed=seed), 500)} for seed in (0, 1)]
    long = [{text for text in found if text.count(" ") > 8} for found in texts]
    assert not long[0] & long[1]


def test_without_a_tokenizer_a_token_is_a_word(cache_dir: Path) -> None:
    workload = load("sharegpt", cache_dir)
    assert workload.token_count_method == "estimate:common_words±1%"
    words = set(common_words())
    for prompt in first(workload, 300):
        text = contents(prompt.messages)[0].split(" ")
        assert len(text) == prompt.prompt_tokens
        assert words.issuperset(text)


def test_the_default_follows_the_committed_lengths(cache_dir: Path) -> None:
    prompt, output = read_length_pairs(workload_path("sharegpt").parent / "sharegpt_lengths.csv")
    assert prompt.size == 4096
    workload = load("sharegpt", cache_dir)
    epoch = first(workload, workload.rows)
    sent = np.array([(p.prompt_tokens, p.output_tokens) for p in epoch], np.int64)
    assert ks(sent[:, 0], prompt) == 0
    assert ks(sent[:, 1], output) == 0
    assert rank_correlation(sent[:, 0], sent[:, 1]) == pytest.approx(rank_correlation(prompt, output), abs=1e-9)
    assert [lengths.tolist() for lengths in workload.length_reference()] == [prompt.tolist(), output.tolist()]


def test_a_text_is_a_prefix_of_its_longer_self() -> None:
    corpus = Corpus(common_words(), 3)
    longest = corpus.text(Domain.BLOCK, 99, 70_000)
    assert longest.count(" ") == 69_999
    assert "  " not in longest
    for words in (1, 3, 4, 5, 100, 69_999):
        text = corpus.text(Domain.BLOCK, 99, words)
        assert text.count(" ") == words - 1
        assert longest.startswith(f"{text} ")


def test_domains_and_keys_never_start_alike() -> None:
    corpus = Corpus(common_words(), 0)
    starts = [corpus.text(domain, key, 4) for domain in Domain for key in range(2000)]
    assert len(set(starts)) == len(starts)


SHARED = """
kind: shared_prefix
groups: 3
prefix_tokens: 20
prefix_role: {role}
conversations_per_group: 4
prompt_tokens: {{distribution: uniform, min: 5, max: 9}}
output_tokens: 7
turns: 2
"""


@pytest.mark.parametrize("role", ["system", "user"])
def test_groups_share_their_prefix_and_nothing_else(
    tmp_path: Path, cache_dir: Path, tokenizer_file: Path, role: str
) -> None:
    workload = load(spec_file(tmp_path, SHARED.format(role=role)), cache_dir, tokenizer=str(tokenizer_file))
    prompts = first(workload, 12)
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    prefixes: dict[str, int] = {}
    for prompt in prompts:
        texts = contents(prompt.messages)
        assert sum(len(tokenizer.encode(text).ids) for text in texts) == prompt.prompt_tokens
        assert prompt.prompt_tokens is not None
        assert 25 <= prompt.prompt_tokens <= 29
        assert [message["role"] for message in prompt.messages] == (
            ["system", "user"] if role == "system" else ["user"]
        )
        prefix = " ".join(" ".join(texts).split(" ")[:20])
        prefixes[prefix] = prefixes.get(prefix, 0) + 1
    assert sorted(prefixes.values()) == [4, 4, 4]
    rest = {" ".join(" ".join(contents(p.messages)).split(" ")[20:]) for p in prompts}
    assert len(rest) == 12


@pytest.mark.parametrize("role", ["system", "user"])
def test_only_the_first_turn_of_a_session_has_the_prefix(tmp_path: Path, cache_dir: Path, role: str) -> None:
    workload = load(spec_file(tmp_path, SHARED.format(role=role)), cache_dir)
    session = next(workload.sessions(seed=0, share=0, shares=1))
    assert [turn.turn for turn in session.turns] == [0, 1]
    assert [turn.output_tokens for turn in session.turns] == [7, 7]
    counts = [turn.text.count(" ") + 1 for turn in session.turns]
    assert counts == [turn.prompt_tokens for turn in session.turns]
    assert [count > 20 for count in counts] == [role == "user", False]
    assert session.system_tokens == (20 if role == "system" else 0)
    assert (session.system or "").count(" ") == (19 if role == "system" else 0)


UNIFORM = """
kind: synthetic
conversations: 150
prompt_tokens: {distribution: uniform, min: 1, max: 120}
output_tokens: 3
"""


def test_lengths_are_corrected_where_words_do_not_add_up(
    tmp_path: Path, cache_dir: Path, superword_tokenizer_file: Path
) -> None:
    spec = spec_file(tmp_path, UNIFORM)
    workload = load(spec, cache_dir, tokenizer=str(superword_tokenizer_file))
    tokenizer = Tokenizer.from_file(str(superword_tokenizer_file))
    prompts = {p.prompt_id: p for p in first(workload, 300)}
    assert len(prompts) == 150
    texts = [contents(p.messages)[0] for p in prompts.values()]
    counted = [len(e.ids) for e in tokenizer.encode_batch(texts)]
    assert counted == [p.prompt_tokens for p in prompts.values()]
    assert sum(text.count(" ") + 1 != count for text, count in zip(texts, counted, strict=True)) > 50
    planned = {p.prompt_id: p.prompt_tokens for p in first(load(spec, cache_dir), 150)}
    off = sum(p.prompt_tokens != planned[name] for name, p in prompts.items())
    assert off <= 3
    words = "texts could not be made to the planned length exactly; their true length is recorded"
    assert workload.warnings == ((f"{off} {words}",) if off else ())


LENGTHS = """
kind: synthetic
conversations: 2000
prompt_tokens: {distribution: lognormal, median: 100, sigma: 0.5, min: 20, max: 300}
output_tokens: {distribution: uniform, min: 1, max: 4}
"""


def test_lognormal_and_uniform_lengths(tmp_path: Path, cache_dir: Path) -> None:
    prompt, output = load(spec_file(tmp_path, LENGTHS), cache_dir).length_reference()
    assert np.median(prompt) == pytest.approx(100, abs=1)
    assert (prompt.min(), prompt.max()) == (20, 300)
    # One deviation below and above the median hold 68.27 %.
    assert ((prompt > 100 * np.exp(-0.5)) & (prompt < 100 * np.exp(0.5))).mean() == pytest.approx(0.6827, abs=0.01)
    assert np.unique(output, return_counts=True)[1].tolist() == [500, 500, 500, 500]
    assert abs(rank_correlation(prompt, output)) < 0.1


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_loading_and_shares_survive_a_fork(cache_dir: Path) -> None:
    workload = load("short_chat", cache_dir)
    expected = [p.prompt_id for p in islice(workload.prompts(seed=5, share=1, shares=2), 50)]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        found = [p.prompt_id for p in islice(workload.prompts(seed=5, share=1, shares=2), 50)]
        os.write(writer, b"same" if found == expected else b"different")
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    assert os.read(reader, 20) == b"same"
    os.close(reader)


def test_only_the_process_that_builds_needs_the_tokenizer(
    tmp_path: Path, cache_dir: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_file(tmp_path, SHARED.format(role="system"))
    built = load(spec, cache_dir, tokenizer=str(tokenizer_file))
    monkeypatch.setattr(TokenizerTokens, "count", None)
    again = load(spec, cache_dir, tokenizer=str(tokenizer_file))
    assert first(again, 12) == first(built, 12)
    assert again.fingerprint == built.fingerprint


def test_a_large_plan_is_verified_on_a_sample(
    tmp_path: Path, cache_dir: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def count(self: TokenizerTokens, texts: pa.LargeStringArray) -> npt.NDArray[np.int64]:
        found = original(self, texts)
        counted.append(int(found.sum()))
        return found

    original = TokenizerTokens.count
    monkeypatch.setattr(TokenizerTokens, "words", lambda _self: common_words()[:100])
    monkeypatch.setattr(TokenizerTokens, "count", count)
    monkeypatch.setattr(generated, "_VERIFIED_TOKENS", 5_000)
    workload = load(spec_file(tmp_path, LENGTHS), cache_dir, tokenizer=str(tokenizer_file))
    assert workload.length_reference()[0].sum() > 200_000
    assert 3_000 < sum(counted) < 7_000


def test_generated_text_does_not_repeat(cache_dir: Path) -> None:
    assert not load("short_chat", cache_dir).repeats
