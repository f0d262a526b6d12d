"""Rows of ``requests.parquet`` as numpy columns, and what each request's metrics are.

Inside ``report`` an unknown duration is NaN in a float column (exact up to 104 days of nanoseconds); it becomes null
at the edge. Wall-clock times are whole numbers and never pass through floats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from vllm_locust.errors import StoreError, one_line
from vllm_locust.outcome import Outcome
from vllm_locust.slo import REQUEST_METRICS

# Its stubs do not know that a column keeps its type through fill_null and equal.
pc: Any = pyarrow.compute

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

Source = Path | Sequence[pa.RecordBatch]
"""Something that can be read more than once."""

ROWS_PER_BATCH: Final = 1024
CHUNKS_PER_BATCH: Final = 1 << 18


def read_batches(source: Source, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """In pieces of bounded size, so that memory does not grow with the run or with the length of answers.

    ``columns`` that the file lacks are left out. Raises ``StoreError`` where it cannot be read.
    """
    if isinstance(source, Path):
        for batch in _stored(source, columns):
            yield from _small(batch)
    else:
        for batch in source:
            yield from _small(batch)


def _stored(path: Path, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    try:
        # Arrow itself takes no path that is no UTF-8.
        with path.open("rb") as opened, pq.ParquetFile(opened) as file:
            names = file.schema_arrow.names
            wanted = names if columns is None else [name for name in columns if name in names]
            batches = file.iter_batches(batch_size=ROWS_PER_BATCH, columns=wanted)
            while (batch := next(batches, None)) is not None:
                yield batch
    except (OSError, pa.ArrowException) as exc:
        raise StoreError(f"{path} cannot be read: {one_line(exc)}; merge the run again") from exc


def _small(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Slices of at most ``CHUNKS_PER_BATCH`` chunks, or of one row."""
    if "chunk_ns" not in batch.schema.names:
        yield batch
        return
    ends = np.cumsum(_lengths(batch.column("chunk_ns")))
    start = 0
    while start < batch.num_rows:
        before = int(ends[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + CHUNKS_PER_BATCH, side="right")))
        yield batch.slice(start, end - start)
        start = end


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps between chunks of the same request. ``request`` is the row of each, never falling, ``end_ns`` when it was
    over, after sent; ``width_before``/``width_after`` are the uncertainties of the two chunks that bound it.
    """

    request: Ints
    gap_ns: Ints
    end_ns: Ints
    tokens: Ints | None
    width_before_ns: Ints
    width_after_ns: Ints


class Columns:
    """One batch of rows."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch
        self.rows = batch.num_rows

    def has(self, name: str) -> bool:
        return name in self._batch.schema.names

    def texts(self, name: str) -> list[str | None]:
        return [None if value is None else str(value) for value in self._batch.column(name).to_pylist()]

    def is_equal(self, name: str, text: str) -> Flags:
        return _numpy_bool(pc.fill_null(pc.equal(self._plain(name), text), False))

    def floats(self, name: str) -> Floats:
        """NaN where null."""
        column = pc.cast(self._batch.column(name), pa.float64(), safe=False)
        return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)

    def ints(self, name: str, missing: int = 0) -> Ints:
        """``missing`` where null: look at ``known`` first."""
        column = pc.cast(self._batch.column(name), pa.int64())
        return _numpy_ints(pc.fill_null(column, missing))

    def flags(self, name: str) -> Flags:
        """False where null."""
        return _numpy_bool(pc.fill_null(self._batch.column(name), False))

    def known(self, name: str) -> Flags:
        return _numpy_bool(pc.is_valid(self._batch.column(name)))

    def _plain(self, name: str) -> Any:
        column = self._batch.column(name)
        return column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column


class RequestColumns(Columns):
    """One batch of requests."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        super().__init__(batch)
        self._offsets = np.concatenate(([0], np.cumsum(_lengths(batch.column("chunk_ns")))))
        self.chunk_ns = _list_values(batch.column("chunk_ns"))
        self.chunk_request = np.repeat(np.arange(self.rows), self.chunks)

    @property
    def chunks(self) -> Ints:
        """Token-bearing chunks of each request."""
        return np.diff(self._offsets)

    @cached_property
    def ok(self) -> Flags:
        return self.is_equal("outcome", "ok")

    @cached_property
    def sent(self) -> Flags:
        """Whether anything of the request left us: it had a slot, and a connection at one attempt or other."""
        refused, timed_out = (self.is_equal("outcome", o) for o in (Outcome.CONNECT_ERROR, Outcome.TIMEOUT_CONNECT))
        return (self.ints("attempts", missing=1) > 0) & (~(refused | timed_out) | self.known("http_status"))

    @cached_property
    def ended_ns(self) -> Ints:
        """How long the request was in flight; 0 where the record does not say when it was over."""
        return first_known(
            self.floats("done_ns"),
            self.floats("ended_ns") if self.has("ended_ns") else np.full(self.rows, np.nan),
            self.last_ns,
            np.zeros(self.rows),
        ).astype(np.int64)

    @cached_property
    def chunk_tokens(self) -> tuple[Ints, Flags]:
        """Tokens of every chunk, and for each request whether they are known."""
        return self._aligned("chunk_tokens")

    @cached_property
    def chunk_width_ns(self) -> Ints:
        """0 where a chunk has a stamp of its own."""
        return self._aligned("chunk_width_ns")[0]

    def _aligned(self, name: str) -> tuple[Ints, Flags]:
        """A list column spread over the chunks: 0 and not known where a request's list is null or of another length."""
        spread = np.zeros(len(self.chunk_ns), dtype=np.int64)
        if not self.has(name):
            return spread, np.zeros(self.rows, dtype=np.bool_)
        column = self._batch.column(name)
        lengths = _lengths(column)
        fits = self.known(name) & (lengths == self.chunks)
        values = _list_values(column)
        spread[np.repeat(fits, self.chunks)] = values[np.repeat(fits, lengths)]
        return spread, fits

    def _at_first_chunk(self, values: npt.NDArray[Any]) -> Floats:
        return self._at(values, self._offsets[:-1])

    def _at_last_chunk(self, values: npt.NDArray[Any]) -> Floats:
        return self._at(values, self._offsets[1:] - 1)

    def _at(self, values: npt.NDArray[Any], positions: Ints) -> Floats:
        picked = np.full(self.rows, np.nan)
        some = self.chunks > 0
        picked[some] = values[positions[some]]
        return picked

    @cached_property
    def first_ns(self) -> Floats:
        return self._at_first_chunk(self.chunk_ns)

    @cached_property
    def last_ns(self) -> Floats:
        return self._at_last_chunk(self.chunk_ns)

    @cached_property
    def first_width_ns(self) -> Floats:
        return self._at_first_chunk(self.chunk_width_ns)

    @cached_property
    def last_width_ns(self) -> Floats:
        return self._at_last_chunk(self.chunk_width_ns)

    @cached_property
    def first_tokens(self) -> Floats:
        """Tokens of the first chunk; NaN where they are not known."""
        tokens, known = self.chunk_tokens
        return np.where(known, self._at_first_chunk(tokens), np.nan)

    @cached_property
    def tpot_divisor(self) -> Floats:
        """Output tokens − 1; NaN where TPOT is not defined."""
        tokens = self.floats("output_tokens")
        return np.where((tokens >= 2) & (self.chunks >= 2), tokens - 1, np.nan)

    @cached_property
    def itl_mean_ns(self) -> Floats:
        """Of one request: (last − first) / tokens after the first chunk."""
        tokens, known = self.chunk_tokens
        after_first = np.bincount(self.chunk_request, weights=tokens, minlength=self.rows) - self.first_tokens
        defined = known & (self.chunks >= 2) & (after_first > 0)
        return np.where(defined, self.last_ns - self.first_ns, np.nan) / np.where(defined, after_first, 1)

    def metric_ns(self, name: str) -> Floats:
        """A metric that has one value a request, in nanoseconds; NaN where the request has none."""
        match name:
            case "ttft" | "ttft_answer" | "e2e" | "done" | "schedule_lag" | "connect":
                return self.floats(f"{name}_ns")
            case "ttft_from_schedule":
                return self.floats("ttft_ns") + self.floats("schedule_lag_ns")
            case "slot_wait":
                return self.floats("slot_wait_ns") if self.has("slot_wait_ns") else np.full(self.rows, np.nan)
            case "receive_lag":
                return self.floats("receive_lag_max_ns")
            case "tpot":
                return (self.last_ns - self.first_ns) / self.tpot_divisor
            case "itl":
                return self.itl_mean_ns
        raise KeyError(name)

    def slo_values_ns(self) -> dict[str, Floats]:
        """What ``judge_requests`` looks at."""
        return {name: self.metric_ns(name) for name in REQUEST_METRICS}

    def chunk_gaps(self, of: Flags) -> Gaps:
        """Of the requests that ``of`` marks."""
        return self._gaps(of[self.chunk_request], with_tokens=False)

    def itl_gaps(self, of: Flags) -> Gaps:
        """Gaps with the tokens that ended them. A chunk without tokens is no end: its gap goes to the next that has
        some.
        """
        tokens, known = self.chunk_tokens
        is_first = np.zeros(len(tokens), dtype=np.bool_)
        is_first[self._offsets[:-1][self.chunks > 0]] = True
        return self._gaps((of & known)[self.chunk_request] & (is_first | (tokens > 0)), with_tokens=True)

    def _gaps(self, keep: Flags, *, with_tokens: bool) -> Gaps:
        times, owner, width = self.chunk_ns[keep], self.chunk_request[keep], self.chunk_width_ns[keep]
        same = owner[1:] == owner[:-1]
        return Gaps(
            request=owner[1:][same],
            gap_ns=np.diff(times)[same],
            end_ns=times[1:][same],
            tokens=self.chunk_tokens[0][keep][1:][same] if with_tokens else None,
            width_before_ns=width[:-1][same],
            width_after_ns=width[1:][same],
        )


def first_known(*columns: Floats) -> Floats:
    """Of each row the first value that is not NaN."""
    chosen = columns[0]
    for column in columns[1:]:
        chosen = np.where(np.isnan(chosen), column, chosen)
    return chosen


def _numpy_bool(column: Any) -> Flags:
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.bool_)


def _numpy_ints(column: Any) -> Ints:
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.int64)


def _lengths(column: Any) -> Ints:
    return _numpy_ints(pc.fill_null(pc.cast(pc.list_value_length(column), pa.int64()), 0))


def _list_values(column: Any) -> Ints:
    return _numpy_ints(pc.fill_null(pc.cast(column.flatten(), pa.int64()), 0))
