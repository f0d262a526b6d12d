"""ShareGPT conversations from a JSON array or JSON lines.

The text is parsed once per machine into one cached table, the tokens are counted once per tokenizer into another: of
the first turns when the workload is loaded, of the later turns when sessions are asked for.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Generator
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vllm_locust.errors import WorkloadError
from vllm_locust.workload.conversations import Conversation, parse_conversation
from vllm_locust.workload.dataset_cache import Batches, DatasetCache, cache_key, file_identity
from vllm_locust.workload.json_rows import ReadReport, read_rows
from vllm_locust.workload.prompt import Prompt, Session, Turn
from vllm_locust.workload.table_metadata import ColumnValues, TableMetadata, integers, metadata_of
from vllm_locust.workload.tokens import TokenCounter

_BATCH_CONVERSATIONS = 1000
_TEXT_FIELDS: list[pa.Field[Any]] = [
    pa.field("conversation_id", pa.large_string()),
    pa.field("turn", pa.int64()),
    pa.field("system", pa.large_string()),
    pa.field("user", pa.large_string()),
    pa.field("answer", pa.large_string()),
]
_TEXT = pa.schema(_TEXT_FIELDS)
_COUNTS = pa.schema([("system", pa.int64()), ("user", pa.int64()), ("answer", pa.int64())])


class ShareGptSource:
    """Conversations mapped from the cache. The table has one row per turn; a conversation starts at turn 0."""

    offset_ns = None

    def __init__(self, file: Path, counter: TokenCounter, cache: DatasetCache) -> None:
        self._counter = counter
        self._cache = cache
        self._text_key = cache_key("sharegpt", *file_identity(file))
        self._text = cache.table("sharegpt", self._text_key, _TEXT, lambda: _build_text(file))
        self.metadata = metadata_of(self._text)
        self._ids, self._systems, self._users = (
            ColumnValues(self._text, name) for name in ("conversation_id", "system", "user")
        )
        turns = integers(self._text, "turn")
        self._first = np.flatnonzero(turns == 0)
        self._ends = np.append(self._first[1:], turns.size)
        first = self._counts("first")
        self._system_tokens = integers(first, "system")
        self.prompt_tokens = self._system_tokens + integers(first, "user")
        self.output_tokens = integers(first, "answer")

    def prompt(self, conversation: int, epoch: int) -> Prompt:  # noqa: ARG002 - a data set is the same in every epoch
        row = int(self._first[conversation])
        system, user = self._systems[row], self._users[row]
        messages = ({"role": "user", "content": user},)
        conversation_id = self._ids[row]
        return Prompt(
            prompt_id=f"sharegpt:{conversation_id}:0",
            messages=messages if system is None else ({"role": "system", "content": system}, *messages),
            prompt_tokens=int(self.prompt_tokens[conversation]),
            output_tokens=int(self.output_tokens[conversation]),
            conversation_id=conversation_id,
            turn=0,
        )

    def prepare_sessions(self) -> None:
        """Count the tokens of the later turns, where this machine has not done so before."""
        self._all_turns  # noqa: B018 - counted on first access

    def session(self, conversation: int, epoch: int) -> Session:  # noqa: ARG002 - as above
        start, end = int(self._first[conversation]), int(self._ends[conversation])
        conversation_id = self._ids[start]
        users, answers = self._all_turns
        turns = (
            Turn(
                prompt_id=f"sharegpt:{conversation_id}:{row - start}",
                turn=row - start,
                text=self._users[row],
                prompt_tokens=int(users[row]),
                output_tokens=int(answers[row]),
            )
            for row in range(start, end)
        )
        system = self._systems[start]
        return Session(conversation_id, system, int(self._system_tokens[conversation]), tuple(turns))

    @cached_property
    def _all_turns(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        counts = self._counts("all")
        return integers(counts, "user"), integers(counts, "answer")

    def _counts(self, which: str) -> pa.Table:
        key = cache_key("sharegpt counts", self._text_key, self._counter.identity, which)
        return self._cache.table("counts", key, _COUNTS, lambda: self._count(which))

    def _count(self, which: str) -> Batches:
        text = self._text if which == "all" else self._text.take(self._first)
        for batch in text.to_batches():
            columns = [pa.array(self._counter.count(_texts(batch, name))) for name in _COUNTS.names]
            yield pa.RecordBatch.from_arrays(columns, schema=_COUNTS)
        return TableMetadata(self.metadata.digest)


def _build_text(file: Path) -> Batches:
    filters: Counter[str] = Counter()
    report = ReadReport(file.stat().st_size)
    try:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        usable = yield from _batches(file, report, filters)
    except OSError as error:
        raise WorkloadError(
            f"workload {file} cannot be read ({error.strerror}); check the path and its rights"
        ) from None
    if report.bad_lines:
        filters["bad_row"] += report.bad_lines
    if not usable:
        reasons = ", ".join(f"{name} {count:,}" for name, count in sorted(filters.items()) if count) or "no rows"
        raise WorkloadError(
            f"workload {file} holds nothing usable ({reasons}{f'; {report.damage}' if report.damage else ''}); give a "
            'ShareGPT file: rows of {"id": …, "conversations": [{"from": "human", "value": …}, {"from": "gpt", …}]}'
        )
    warnings: tuple[str, ...] = ()
    if report.damage is not None:
        size = f"{report.file_bytes:,} bytes"
        warnings = (f"{file.name} ({size}) is damaged: {report.damage}; {report.rows:,} whole rows were read",)
    return TableMetadata(digest, {name: count for name, count in sorted(filters.items()) if count}, warnings)


def _batches(file: Path, report: ReadReport, filters: Counter[str]) -> Generator[pa.RecordBatch, None, int]:
    """The usable conversations, and their number."""
    seen: Counter[str] = Counter()
    batch: list[Conversation] = []
    for index, row in enumerate(read_rows(file, report)):
        conversation = parse_conversation(row, index, filters)
        if conversation is None:
            continue
        batch.append(_with_unique_id(conversation, seen))
        if len(batch) == _BATCH_CONVERSATIONS:
            yield _record_batch(batch)
            batch = []
    if batch:
        yield _record_batch(batch)
    return seen.total()


def _with_unique_id(conversation: Conversation, seen: Counter[str]) -> Conversation:
    """The second conversation of an id is ``<id>#2``: a prompt's name must point at one row."""
    name = conversation.conversation_id
    seen[name] += 1
    if seen[name] == 1:
        return conversation
    return Conversation(f"{name}#{seen[name]}", conversation.system, conversation.exchanges)


def _record_batch(conversations: list[Conversation]) -> pa.RecordBatch:
    rows = [(c, turn, exchange) for c in conversations for turn, exchange in enumerate(c.exchanges)]
    columns: dict[str, list[Any]] = {
        "conversation_id": [c.conversation_id for c, _, _ in rows],
        "turn": [turn for _, turn, _ in rows],
        "system": [c.system if turn == 0 else None for c, turn, _ in rows],
        "user": [exchange.user for _, _, exchange in rows],
        "answer": [exchange.answer for _, _, exchange in rows],
    }
    return pa.RecordBatch.from_pydict(columns, _TEXT)


def _texts(batch: pa.RecordBatch, column: str) -> pa.LargeStringArray:
    """A column of texts, absent ones as empty."""
    return cast(pa.LargeStringArray, cast(Any, batch[column]).fill_null(""))
