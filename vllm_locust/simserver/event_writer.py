"""Events to writes: framing, the faults that change how bytes look or are grouped, and the truth about each write."""

from __future__ import annotations

from vllm_locust.simserver.choice import Chunk
from vllm_locust.simserver.faults import Fault, spell
from vllm_locust.simserver.http1 import Connection
from vllm_locust.simserver.response import Response
from vllm_locust.simserver.truth import Truth


class EventWriter:
    """Each event is one HTTP chunk in one write, unless a fault says otherwise."""

    def __init__(self, connection: Connection, response: Response, truth: Truth, fault: Fault | None) -> None:
        self._connection = connection
        self._response = response
        self._truth = truth
        self._fault = fault
        self._chunked = response.chunked
        self._merge = fault.integer("events") if fault is not None and fault.name == "merge" else 1
        self._split = fault.integer("bytes") if fault is not None and fault.name == "split" else None
        self._merged: list[bytes] = []
        self._merged_bearing = 0
        self._merged_done = False
        self._first = True

    def event(self, data: bytes) -> None:
        """An event without tokens."""
        self._put(data, bearing=0)

    def done(self, data: bytes) -> None:
        """The [DONE] event: its times are kept."""
        self._put(data, bearing=0, done=True)

    def token_chunk(self, data: bytes, choice: int, tokens: int, chunk: Chunk) -> None:
        truth = self._truth
        truth.chunk_tokens.append(tokens)
        truth.chunk_text_bytes.append(chunk.text_bytes)
        truth.chunk_choice.append(choice)
        truth.chunk_kind.append(chunk.kind)
        truth.output_tokens += tokens
        if chunk.kind == "reasoning":
            truth.reasoning_tokens += tokens
        self._put(data, bearing=1)

    def comment(self, data: bytes) -> None:
        self._connection.write(self._frame(data))

    def flush(self) -> None:
        """Write what ``merge`` holds back."""
        if self._merged:
            self._write(b"".join(self._merged), self._merged_bearing, done=self._merged_done)
            self._merged, self._merged_bearing, self._merged_done = [], 0, False

    def _put(self, data: bytes, *, bearing: int, done: bool = False) -> None:
        if self._fault is not None:
            data = spell(data, self._fault, first=self._first)
            self._first = False
        if self._merge == 1:
            self._write(data, bearing, done=done)
            return
        self._merged.append(data)
        self._merged_bearing += bearing
        self._merged_done = self._merged_done or done
        if len(self._merged) == self._merge:
            self.flush()

    def _write(self, data: bytes, bearing: int, *, done: bool) -> None:
        truth = self._truth
        before: list[int] | None = None
        after: list[int | None] | None = None
        if done:
            before, after = self._response.done_before, self._response.done_after
        elif bearing:
            before, after = truth.chunk_before_ns, truth.chunk_after_ns
        if done and bearing:  # only a merged write has both: its tokens' times are also those of [DONE]
            before, after = truth.chunk_before_ns, truth.chunk_after_ns
            self._response.done_before, self._response.done_after = before, after
        if self._split is None:
            self._connection.write(self._frame(data), before, after, bearing or 1)
            return
        pieces = [data[at : at + self._split] for at in range(0, len(data), self._split)]
        for number, piece in enumerate(pieces):
            first, last = number == 0, number == len(pieces) - 1
            self._connection.write(self._frame(piece), before if first else None, after if last else None, bearing or 1)

    def _frame(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
