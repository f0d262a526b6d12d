"""A tiny tokenizer as a Hugging Face directory: the peers refuse to run without one."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def tokenizer_dir(work: Path) -> Path:
    """One byte, one token, and whole words of the synthetic prompts. BENCH_TOKENIZER may name a real one instead."""
    given = os.environ.get("BENCH_TOKENIZER")
    if given:
        return Path(given)
    home = work / "tokenizer"
    home.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, **{letter: i + 2 for i, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(home / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 10_000_000,
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    (home / "tokenizer_config.json").write_text(json.dumps(settings))
    (home / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(vocabulary)}))
    return home
