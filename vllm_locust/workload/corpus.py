"""Text of an exact number of tokens, made from words that are one token each.

A text is four words that spell its key, so that no two keys share a prefix of more than three tokens, followed by a
stretch of a long seeded sequence of words. Cutting a stretch out of a string costs no more than copying it: nothing is
tokenized while load is being sent.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

_CORPUS_WORDS = 1 << 16
_KEY_WORDS = 4
_DOMAINS = 4
_SPREAD = 2_654_435_761
"""Knuth's multiplier: neighbouring keys get distant stretches."""


class Domain(IntEnum):
    """Texts of different domains never start alike."""

    PROMPT = 0
    PREFIX = 1
    BLOCK = 2
    SUFFIX = 3


class Corpus:
    """Immutable after construction, so it may be shared over a fork."""

    def __init__(self, words: tuple[str, ...], seed: int) -> None:
        rng = np.random.default_rng(np.random.SeedSequence([seed, len(words)]))
        self._words = [words[i] for i in rng.permutation(len(words))]
        sequence = [self._words[i] for i in rng.integers(len(words), size=_CORPUS_WORDS)]
        self._sequence = " ".join(sequence) + " "
        lengths = np.fromiter((len(word) + 1 for word in sequence), np.int64, _CORPUS_WORDS)
        self._starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths))).tolist()

    def text(self, domain: Domain, key: int, words: int, variant: int = 0) -> str:
        """``words`` words joined by spaces, the same whenever the same is asked for; each shorter text is a prefix.

        Variants of a key start alike and go on differently.
        """
        base = len(self._words)
        keys = base**_KEY_WORDS
        value = (domain * (keys // _DOMAINS) + key) % keys
        head = []
        rest = value
        for _ in range(min(words, _KEY_WORDS)):
            rest, digit = divmod(rest, base)
            head.append(self._words[digit])
        text = " ".join(head)
        if words > _KEY_WORDS:
            text = f"{text} {self._stretch((value + variant) * _SPREAD % _CORPUS_WORDS, words - _KEY_WORDS)}"
        return text

    def _stretch(self, start: int, words: int) -> str:
        parts = []
        while words > _CORPUS_WORDS - start:
            parts.append(self._sequence[self._starts[start] :])
            words -= _CORPUS_WORDS - start
            start = 0
        parts.append(self._sequence[self._starts[start] : self._starts[start + words]])
        return "".join(parts).rstrip(" ")
