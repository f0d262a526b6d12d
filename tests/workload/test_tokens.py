from __future__ import annotations

import builtins
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from vllm_locust.errors import WorkloadError
from vllm_locust.workload import tokens
from vllm_locust.workload.byte_classes import estimate_tokens
from vllm_locust.workload.tokens import EstimatedTokens, answer_counter, common_words, token_counter


def strings(values: list[str]) -> pa.LargeStringArray:
    return pa.array(values, pa.large_string())


def by_hand(text: str) -> int:
    """The same weights, applied by regular expressions to one text."""
    ascii_text = re.sub(r"[^\x00-\x7f]", "\x80", text)
    punctuation = r"[^A-Za-z0-9 \t\n\r\x80]"
    wide = sum(len(c.encode()) >= 3 for c in text)
    two = sum(len(c.encode()) == 2 for c in text)
    total = (
        0.826 * len(re.findall(r"[A-Za-z]+", ascii_text))
        + 0.049 * len(re.findall(r"[A-Za-z]", ascii_text))
        + 0.266 * len(re.findall(r"[0-9]", ascii_text))
        + 1.235 * len(re.findall(r"[0-9]+", ascii_text))
        + 0.021 * len(re.findall(punctuation, ascii_text))
        + 0.858 * len(re.findall(f"{punctuation}+", ascii_text))
        + 0.621 * len(re.findall(r"[\t\n\r]+", ascii_text))
        + 0.06 * sum(len(run) - 1 for run in re.findall(r" +", ascii_text))
        + 0.979 * wide
        + 0.535 * two
    )
    return max(1, round(total)) if text else 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(alphabet="aZ09 .,!\n\té日🎉", max_size=30), min_size=1, max_size=8))
def test_the_estimate_is_the_weighted_count_of_each_text_alone(texts: list[str]) -> None:
    found = EstimatedTokens().count(strings(texts))
    # float32 sums may fall on the other side of a half
    assert np.abs(found - np.array([by_hand(text) for text in texts])).max() <= 1
    assert (found == 0).tolist() == [text == "" for text in texts]
    assert found.tolist() == [int(EstimatedTokens().count(strings([text]))[0]) for text in texts]


def test_the_estimate_does_not_depend_on_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"Row {i}: " + "some words, 12 numbers\n" * (i % 7) for i in range(200)] + ["", "end"]
    whole = EstimatedTokens().count(strings(texts))
    monkeypatch.setattr(tokens, "_ESTIMATE_BYTES", 50)
    assert EstimatedTokens().count(strings(texts)).tolist() == whole.tolist()
    assert EstimatedTokens().count(strings(texts).slice(3, 50)).tolist() == whole[3:53].tolist()
    assert EstimatedTokens().count(strings([])).tolist() == []


def test_english_prose_is_about_its_known_length() -> None:
    # 44 tokens in cl100k.
    text = "The quick brown fox jumps over the lazy dog. " * 4 + "It was 1984, wasn't it?"
    data = np.frombuffer(text.encode(), np.uint8)
    (found,) = estimate_tokens(data, np.array([0, data.size]))
    assert abs(found - 50) <= 5


def test_the_common_words_are_distinct_lower_case_and_many() -> None:
    words = common_words()
    assert len(words) == len(set(words)) == 512
    assert all(word.isascii() and word.isalpha() and word.islower() for word in words)


def test_limits_in_the_tokenizer_file_do_not_bend_the_counts(tokenizer_file: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    counter = token_counter(str(tmp_path))
    expected = [len(Tokenizer.from_file(str(tokenizer_file)).encode(text).ids) for text in ("time " * 30, "a", "")]
    assert counter.count(strings(["time " * 30, "a", ""])).tolist() == expected
    assert counter.exact


def test_words_of_a_tokenizer_are_one_token_each(tokenizer_file: Path) -> None:
    words = token_counter(str(tokenizer_file)).words()
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    assert len(words) > 100
    assert all(len(tokenizer.encode(text).ids) == 1 for word in words for text in (word, f" {word}"))


def test_a_foreign_vocabulary_gives_its_own_words(tmp_path: Path) -> None:
    foreign = [f"zq{chr(97 + i // 26)}xv{chr(97 + i % 26)}" for i in range(150)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*foreign, *(f" {word}" for word in foreign)], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = token_counter(str(tmp_path)).words()
    assert set(foreign) <= set(words)
    assert all(len(tokenizer.encode(f" {word}").ids) == 1 for word in words)


def test_a_vocabulary_without_words_is_refused_for_generated_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({chr(i): i - 32 for i in range(32, 127)}, []))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(WorkloadError, match=r"are whole words, too few .*leave --tokenizer out"):
        token_counter(str(tmp_path)).words()


@pytest.mark.parametrize("name", ["missing.json", "/no/such/directory", "./here"])
def test_a_missing_tokenizer_file_is_named(name: str) -> None:
    with pytest.raises(WorkloadError, match=f"--tokenizer {re.escape(name)}: there is no file .*; give the path"):
        token_counter(name)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": None}))
    with pytest.raises(WorkloadError, match=r"is not a tokenizer\.json"):
        token_counter(str(path))


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, tokenizer_file: Path) -> None:
    original = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "tokenizers":
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(WorkloadError, match=r"pip install 'vllm-locust\[tokenizers\]'"):
        token_counter(str(tokenizer_file))


def test_an_answer_is_counted_by_the_tokenizer_or_not_at_all(tokenizer_file: Path) -> None:
    assert answer_counter(None) is None, "an estimate is no count"
    count = answer_counter(str(tokenizer_file))
    assert count is not None
    library = Tokenizer.from_file(str(tokenizer_file))
    texts = ["A first answer, and", " a ß second\n", "x" * 5000]
    assert count(texts) == sum(len(library.encode(text, add_special_tokens=False)) for text in texts)
    assert count(["half a pair \ud800"]) == len(library.encode("half a pair ?", add_special_tokens=False))
