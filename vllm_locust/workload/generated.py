"""Conversations whose text is generated when asked for, to a length that was verified when the table was built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vllm_locust.workload.corpus import Corpus, Domain
from vllm_locust.workload.dataset_cache import Batches
from vllm_locust.workload.prompt import Prompt, Session, Turn
from vllm_locust.workload.table_metadata import ColumnValues, TableMetadata, digest_of, integers, metadata_of
from vllm_locust.workload.tokens import TokenCounter

_VERIFIED_TOKENS = 2_000_000
_BATCH_TEXTS = 256
_CORRECTIONS = 32
_CORRECTIONS_PER_VARIANT = 4

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to generate, one entry per turn. A turn of number 0 starts a conversation."""

    kind: str
    turn: Integers
    prompt_tokens: Integers
    """Of the user's message, a prefix in it included."""
    output_tokens: Integers
    group: Integers | None = None
    """Which shared prefix the conversation starts with."""
    prefix_tokens: int = 0
    prefix_role: Literal["system", "user"] = "system"
    blocks: tuple[tuple[int, ...], ...] | None = None
    """Names of the blocks that the message consists of: equal names, equal text."""
    block_tokens: int = 0
    offset_ns: Integers | None = None
    filters: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Per turn: how many words of which variant are generated, and the tokens they are."""

    words: Integers
    variant: Integers
    tokens: Integers


_FIELDS: list[pa.Field[Any]] = [
    *(pa.field(name, pa.int64()) for name in ("turn", "prompt_tokens", "output_tokens", "words", "variant")),
    pa.field("group", pa.int64()),
    pa.field("blocks", pa.large_list(pa.int64())),
    pa.field("offset_ns", pa.int64()),
]
SCHEMA = pa.schema(_FIELDS)
"""The last three are null throughout where the plan has no such thing."""


def build_table(plan: Plan, counter: TokenCounter, seed: int) -> Batches:
    """The plan as one batch, its texts corrected until a tokenizer counts them as planned."""
    words = counter.words()
    texts = _Texts(plan, Corpus(words, seed))
    sizes = _Sizes(plan.prompt_tokens.copy(), np.zeros_like(plan.prompt_tokens), plan.prompt_tokens.copy())
    inexact = _verify(plan, sizes, texts, counter) if counter.exact else 0
    groups = 0 if plan.group is None or plan.prefix_role == "user" else int(plan.group.max()) + 1
    prefix_tokens = [plan.prefix_tokens] * groups
    if counter.exact:
        prefixes = [texts.corpus.text(Domain.PREFIX, group, plan.prefix_tokens) for group in range(groups)]
        prefix_tokens = counter.count(pa.array(prefixes, pa.large_string())).tolist()
    settings: dict[str, Any] = {
        "kind": plan.kind,
        "seed": seed,
        "prefix_words": plan.prefix_tokens,
        "prefix_tokens": prefix_tokens,
        "prefix_role": plan.prefix_role,
        "block_tokens": plan.block_tokens,
        # The texts of later epochs were not verified, so they differ only where words add up exactly.
        "repeats": bool((sizes.words != plan.prompt_tokens).any() or sizes.variant.any()),
    }
    columns = (plan.turn, sizes.tokens, plan.output_tokens, sizes.words, sizes.variant)
    optional = (plan.group, plan.blocks, plan.offset_ns)
    arrays = [
        pa.nulls(plan.turn.size, column.type) if values is None else pa.array(values, column.type)
        for values, column in zip((*columns, *optional), SCHEMA, strict=True)
    ]
    yield pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
    warnings = plan.warnings
    if inexact:
        warnings += (
            f"{inexact:,} texts could not be made to the planned length exactly; their true length is recorded",
        )
    digest = digest_of(settings, words, *columns, *optional)
    return TableMetadata(digest, plan.filters, warnings, words, settings)


class _Texts:
    """The message of a turn for any number of words: words are always added or removed at the end."""

    def __init__(self, plan: Plan | GeneratedSource, corpus: Corpus) -> None:
        self._plan = plan
        self.corpus = corpus

    def user(self, row: int, words: int, variant: int, epoch: int = 0) -> str:
        plan, parts = self._plan, []
        if plan.blocks is not None:
            for block in plan.blocks[row]:
                taken = min(plan.block_tokens, words)
                if taken > 0:
                    parts.append(self.corpus.text(Domain.BLOCK, block, taken))
                    words -= taken
        elif plan.group is not None and plan.prefix_role == "user" and plan.turn[row] == 0:
            taken = min(plan.prefix_tokens, words)
            parts.append(self.corpus.text(Domain.PREFIX, int(plan.group[row]), taken))
            words -= taken
        if words > 0:
            domain = Domain.SUFFIX if parts else Domain.PROMPT
            parts.append(self.corpus.text(domain, row + epoch * plan.turn.size, words, variant))
        return " ".join(parts)


def _verify(plan: Plan, sizes: _Sizes, texts: _Texts, counter: TokenCounter) -> int:
    """Correct ``sizes`` until the tokenizer counts what was planned, and return how many texts stay inexact.

    Words add up exactly in nearly every vocabulary, so a large plan is first tried on a sample. One text that is off
    has every text counted and corrected: words are added or removed, and when that leads nowhere, others are taken.
    """
    every = max(1, -(-int(plan.prompt_tokens.sum()) // _VERIFIED_TOKENS))
    if _recount(np.arange(0, plan.turn.size, every), plan, sizes, texts, counter).size == 0:
        return 0
    off = _recount(np.arange(plan.turn.size), plan, sizes, texts, counter)
    for attempt in range(1, _CORRECTIONS + 1):
        if off.size == 0:
            break
        sizes.words[off] = np.maximum(1, sizes.words[off] + plan.prompt_tokens[off] - sizes.tokens[off])
        sizes.variant[off] = attempt // _CORRECTIONS_PER_VARIANT
        off = _recount(off, plan, sizes, texts, counter)
    return off.size


def _recount(rows: Integers, plan: Plan, sizes: _Sizes, texts: _Texts, counter: TokenCounter) -> Integers:
    """Count the texts of these rows and return those that are off."""
    for start in range(0, rows.size, _BATCH_TEXTS):
        part = rows[start : start + _BATCH_TEXTS]
        batch = [texts.user(row, int(sizes.words[row]), int(sizes.variant[row])) for row in part.tolist()]
        sizes.tokens[part] = counter.count(pa.array(batch, pa.large_string()))
    off: Integers = rows[sizes.tokens[rows] != plan.prompt_tokens[rows]]
    return off


class GeneratedSource:
    """Reads a table made by ``build_table``; needs no tokenizer."""

    def __init__(self, table: pa.Table) -> None:
        self.metadata = metadata_of(table)
        settings = self.metadata.settings
        self._kind = str(settings["kind"])
        self._repeats = bool(settings["repeats"])
        self._prefix_words = int(settings["prefix_words"])
        self.prefix_tokens = self._prefix_words
        self.prefix_role = settings["prefix_role"]
        self.block_tokens = int(settings["block_tokens"])
        self.turn = integers(table, "turn")
        self._tokens, self._outputs = integers(table, "prompt_tokens"), integers(table, "output_tokens")
        self._words, self._variant = integers(table, "words"), integers(table, "variant")
        self.group = None if table["group"].null_count else integers(table, "group")
        self._offset_ns = None if table["offset_ns"].null_count else integers(table, "offset_ns")
        self.blocks = None if table["blocks"].null_count else ColumnValues(table, "blocks")
        self._first = np.flatnonzero(self.turn == 0)
        self._ends = np.append(self._first[1:], self.turn.size)
        self._system_tokens = np.zeros(self._first.size, np.int64)
        if self.group is not None and self.prefix_role == "system":
            self._system_tokens = np.array(settings["prefix_tokens"], np.int64)[self.group[self._first]]
        self.prompt_tokens = self._tokens[self._first] + self._system_tokens
        self.output_tokens = self._outputs[self._first]
        self.offset_ns = None if self._offset_ns is None else self._offset_ns[self._first]
        self._texts = _Texts(self, Corpus(self.metadata.words, int(settings["seed"])))

    def prompt(self, conversation: int, epoch: int) -> Prompt:
        row = int(self._first[conversation])
        system = self._system(row)
        messages = ({"role": "user", "content": self._user(row, epoch)},)
        return Prompt(
            prompt_id=self._prompt_id(conversation, 0, epoch),
            messages=messages if system is None else ({"role": "system", "content": system}, *messages),
            prompt_tokens=int(self.prompt_tokens[conversation]),
            output_tokens=int(self.output_tokens[conversation]),
            conversation_id=self._name(conversation, epoch),
            turn=0,
            offset_ns=None if self._offset_ns is None else int(self._offset_ns[row]),
        )

    def prepare_sessions(self) -> None:
        """Everything was prepared with the table."""

    def session(self, conversation: int, epoch: int) -> Session:
        start, end = int(self._first[conversation]), int(self._ends[conversation])
        turns = (
            Turn(
                prompt_id=self._prompt_id(conversation, row - start, epoch),
                turn=row - start,
                text=self._user(row, epoch),
                prompt_tokens=int(self._tokens[row]),
                output_tokens=int(self._outputs[row]),
            )
            for row in range(start, end)
        )
        system_tokens = int(self._system_tokens[conversation])
        return Session(self._name(conversation, epoch), self._system(start), system_tokens, tuple(turns))

    def _system(self, row: int) -> str | None:
        if self.group is None or self.prefix_role != "system":
            return None
        return self._texts.corpus.text(Domain.PREFIX, int(self.group[row]), self._prefix_words)

    def _user(self, row: int, epoch: int) -> str:
        return self._texts.user(row, int(self._words[row]), int(self._variant[row]), 0 if self._repeats else epoch)

    def _name(self, conversation: int, epoch: int) -> str:
        """Later epochs have texts of their own, so they have names of their own."""
        return f"{conversation}" if epoch == 0 or self._repeats else f"{conversation}@{epoch}"

    def _prompt_id(self, conversation: int, turn: int, epoch: int) -> str:
        name = f"{self._kind}:{self._name(conversation, epoch)}"
        return name if turn == 0 else f"{name}:{turn}"
