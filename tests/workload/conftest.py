"""Tokenizers small enough to be trained in the test itself, and ShareGPT files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from vllm_locust.workload.tokens import common_words


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE like that of current models: merges stay inside a word."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=6000, initial_alphabet=alphabet, show_progress=False)
    words = common_words()
    tokenizer.train_from_iterator([*words, *(f" {word}" for word in words)], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def superword_tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BPE whose merges cross spaces, so that the tokens of words do not add up."""
    words = common_words()[:80]
    pairs = [f"{a} {b}" for a in words[:40] for b in words[:40]]
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=1500, show_progress=False)
    tokenizer.train_from_iterator([*pairs, *words, *(f" {word}" for word in words)] * 2, trainer)
    path = tmp_path_factory.mktemp("superword") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def conversation(name: str, *messages: str, first: str = "human") -> dict[str, Any]:
    """Messages by turns, starting with ``first``."""
    speakers = ["human", "gpt"] if first == "human" else ["gpt", "human"]
    return {
        "id": name,
        "conversations": [{"from": speakers[i % 2], "value": text} for i, text in enumerate(messages)],
    }


def write_json(path: Path, rows: list[Any]) -> Path:
    path.write_text(json.dumps(rows, indent=2, ensure_ascii=False), encoding="utf-8")
    return path
