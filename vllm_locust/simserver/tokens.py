"""The simulated tokenizer and model: what a prompt counts as, and which tokens an answer has.

A token is a run of at most six characters without white space, so an oracle needs one line:
``sum(-(-len(word) // 6) for word in text.split())``. Every generated token reads " wNNNNN" and counts as one token when
it comes back in a later prompt; a share of them, and the end-of-sequence token, have no text.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PIECE_CHARACTERS = 6
EOS_TOKEN_ID = 2
_PIECE = re.compile(r"\S{1,6}")
_FIRST_WORD_ID = 10_000
_WORDS = 90_000
_MULTIPLIER, _INCREMENT, _MASK = 6364136223846793005, 1442695040888963407, (1 << 64) - 1
_BEGIN, _HEADER_START, _HEADER_END, _TURN_END = "<|begin|>", "<|start|>", "<|header_end|>", "<|end|>"
CHAT_TOKENS_PER_MESSAGE = 4
"""Start of header, role, end of header, end of turn."""
CHAT_TOKENS_PER_PROMPT = 4
"""Begin of text, and the header of the answer."""


def tokenize(text: str) -> list[str]:
    return _PIECE.findall(text)


def count_tokens(text: str) -> int:
    return len(_PIECE.findall(text))


def message_text(message: Mapping[str, Any]) -> str:
    """The text of a chat message, whose content may be a string, a list of parts, or null."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) if isinstance(part, Mapping) else str(part) for part in content)


def chat_tokens(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """The prompt after the chat template. The next turn's prompt begins with this one and its answer."""
    tokens = [_BEGIN]
    for message in messages:
        tokens += (_HEADER_START, str(message.get("role")), _HEADER_END)
        tokens += tokenize(message_text(message))
        tokens.append(_TURN_END)
    tokens += (_HEADER_START, "assistant", _HEADER_END)
    return tokens


def count_prompt_tokens(messages: Sequence[Mapping[str, Any]]) -> int:
    """Four tokens for the prompt, four for each message, and those of the messages' texts."""
    texts = sum(count_tokens(message_text(message)) for message in messages)
    return CHAT_TOKENS_PER_PROMPT + CHAT_TOKENS_PER_MESSAGE * len(messages) + texts


def token_id(piece: str) -> int:
    """Generated words carry their id in their text; others get a stable one below those."""
    if piece[0] == "w" and piece[1:].isdecimal() and len(piece) == PIECE_CHARACTERS:
        return int(piece[1:])
    return 3 + zlib.crc32(piece.encode()) % (_FIRST_WORD_ID - 3)


def prompt_seed(seed: int, prompt: Sequence[str], choice: int) -> int:
    """Equal prompts get equal answers under one seed, whatever the order of arrival."""
    return zlib.crc32(" ".join(prompt).encode("utf-8", "surrogatepass"), seed & 0xFFFFFFFF) * 31 + choice


@dataclass(frozen=True, slots=True)
class Output:
    """A whole answer, fixed when the request is admitted."""

    token_ids: list[int]
    texts: list[str]
    finish_reason: str


def output_length(seed: int, max_tokens: int, min_tokens: int, eos_mean: float | None) -> tuple[int, str]:
    """Exactly ``max_tokens`` and "length"; with a mean, an exponential length of at least ``min_tokens`` that ends with
    "stop" where it is reached first."""
    if eos_mean is None:
        return max_tokens, "length"
    uniform = (_mix(seed) >> 11) / (1 << 53)
    length = max(1, min_tokens, math.ceil(-eos_mean * math.log1p(-uniform)))
    return (length, "stop") if length < max_tokens else (max_tokens, "length")


def generate(seed: int, length: int, finish_reason: str, empty_text_share: float) -> Output:
    ids: list[int] = []
    texts: list[str] = []
    threshold = int(empty_text_share * 65536)
    state = _mix(seed)
    for _ in range(length):
        state = (state * _MULTIPLIER + _INCREMENT) & _MASK
        number = _FIRST_WORD_ID + (state >> 33) % _WORDS
        ids.append(number)
        texts.append("" if (state >> 17) & 0xFFFF < threshold else f" w{number}")
    if finish_reason == "stop":
        ids[-1], texts[-1] = EOS_TOKEN_ID, ""
    return Output(ids, texts, finish_reason)


def block_keys(prompt: Sequence[str], output: Output, block_size: int) -> list[int]:
    """One key per full block of prompt and answer, each chained to the one before it."""
    tokens = [
        *prompt,
        *(text[1:] if text else f"\0{number}" for number, text in zip(output.token_ids, output.texts, strict=True)),
    ]
    keys: list[int] = []
    previous = 0
    for start in range(0, len(tokens) - block_size + 1, block_size):
        previous = hash((previous, *tokens[start : start + block_size]))
        keys.append(previous)
    return keys


def _mix(seed: int) -> int:
    value = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
