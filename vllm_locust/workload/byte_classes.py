"""Estimate of a text's tokens where no tokenizer is given: a weighted count of word starts, letters, digits and so on.

Fitted on 20,000 random messages of ShareGPT against the mean of the cl100k and DeepSeek vocabularies. Measured on all
122,284 messages of the file against DeepSeek: the sum is right within 0.1 %; of the single texts of 8 tokens and more,
nine in ten are within 12.5 % (prompts) and 9.5 % (answers), 19 in 20 within 18 % and 12 %. On the 20,000 messages nine
in ten are within 11.4 % for either vocabulary (bytes / 4.4: 29 %). For a vocabulary of 8,000 tokens the sum is 19 % too
low, so the stated error holds for vocabularies of about 100,000 tokens and more only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ERROR_P90 = 0.13
"""Nine in ten texts are closer than this, by a vocabulary of 100,000 tokens or more."""

_LETTER, _DIGIT, _SPACE, _LINE, _PUNCTUATION, _WIDE, _TWO_BYTE, _CONTINUATION = range(1, 9)


def _classes() -> npt.NDArray[np.uint8]:
    table = np.full(256, _PUNCTUATION, np.uint8)
    for byte in range(128):
        if chr(byte).isalpha():
            table[byte] = _LETTER
    table[ord("0") : ord("9") + 1] = _DIGIT
    table[ord(" ")] = _SPACE
    table[[9, 10, 13]] = _LINE
    table[0x80:0xC0] = _CONTINUATION
    table[0xC0:0xE0] = _TWO_BYTE
    table[0xE0:] = _WIDE
    return table


_CLASS = _classes()
# (class, class of the byte before it: None any, False another class, True the same) -> tokens
_WEIGHTS = (
    (_LETTER, False, 0.826),
    (_LETTER, None, 0.049),
    (_DIGIT, None, 0.266),
    (_DIGIT, False, 1.235),
    (_PUNCTUATION, None, 0.021),
    (_PUNCTUATION, False, 0.858),
    (_LINE, False, 0.621),
    (_SPACE, True, 0.06),
    (_WIDE, None, 0.979),
    (_TWO_BYTE, None, 0.535),
)


def estimate_tokens(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Tokens of each UTF-8 text ``data[offsets[i]:offsets[i + 1]]``; at least 1 for a text that is not empty."""
    starts, lengths = offsets[:-1] - offsets[0], np.diff(offsets)
    kind = _CLASS[data[offsets[0] : offsets[-1]]]
    before = np.concatenate((np.zeros(min(1, kind.size), np.uint8), kind[:-1]))
    before[starts[lengths > 0]] = 0
    tokens = np.zeros(lengths.size)
    filled = np.flatnonzero(lengths)
    if filled.size:
        weight = np.zeros(kind.size, np.float32)
        for which, same, value in _WEIGHTS:
            mask = kind == which
            if same is not None:
                mask &= (before == which) == same
            weight[mask] += np.float32(value)
        tokens[filled] = np.maximum(1, np.add.reduceat(weight, starts[filled], dtype=np.float64))
    return np.rint(tokens).astype(np.int64)
