"""One answer, assembled from its events: what arrived when, how many tokens it was, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from vllm_locust.completion.choice import (
    MAX_TOKENS,
    WRONG_TYPES,
    Choice,
    MalformedError,
    ToolCall,
    json_or_text,
    keep,
    list_length,
    short_text,
    token_count,
)
from vllm_locust.completion.chunk_template import ChunkTemplate
from vllm_locust.completion.state import Completion
from vllm_locust.protocol import bounded, error_in, error_message
from vllm_locust.sse import Event

_FAILED_REASONS = frozenset({"error", "abort"})
_LESSONS = 4
"""A stream whose chunks cannot be foretold is not studied over and over."""
MOST_ALIKE = 1024
"""So many chunks at most are taken as alike in one go."""


class CompletionReader(Completion):
    """Feed it the events (or an SDK's chunks, or the body) of one 200 answer as they arrive; then read its attributes.

    It never raises, whatever the server sent. What the API leaves open is decided so:

    * A chunk bears tokens when it has text, reasoning, a tool call's name or arguments, token ids, or a usage count
      above the last one of its choice. Usage that is told once, at the end, is a total and not a token; usage beside
      empty ``choices`` is a total always.
    * The tokens of a chunk are the rise of the count, else the number of its token ids, else None.
    * An event that is not a JSON object, or has fields of wrong types, counts as ``malformed`` and makes the answer a
      ``bad_response`` even when the rest was fine: a token may have been in it, and the official SDK raises there too.
      Events without data, objects without choices, usage or error, and events of other types than ``message`` that are
      not JSON count as ``ignored``, and so does everything after ``[DONE]``.
    * Where the model shows no reasoning, the answer starts with the first token-bearing chunk. Where it does, with the
      first text or tool call.
    """

    __slots__ = ("_lessons", "_sole", "_template")

    def __init__(self, *, streamed: bool) -> None:
        super().__init__(streamed=streamed)
        self._sole: Choice | None = None
        self._template: ChunkTemplate | None = None
        self._lessons = 0

    def on_data(self, data: bytes, stamp_ns: int, width_ns: int = 0) -> None:
        """``on_event`` for the data of a ``message`` event, at half the cost."""
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            self.on_event(Event(data, b"message"), stamp_ns, width_ns)
            return
        if self.ended:
            self.ignored += 1
        elif not self._take_plain(chunk, stamp_ns, width_ns):
            self.on_chunk(chunk, stamp_ns, width_ns)
        elif self._template is None and self._lessons < _LESSONS and self._sole is not None:
            self._lessons += 1
            usage = chunk.get("usage")
            self._template = ChunkTemplate.learn(data, chunk, None if usage is None else self._sole.tokens)

    def expected(self) -> tuple[ChunkTemplate, int | None] | None:
        """How the next chunk looks if it is like the last ones, and the count of tokens that it will then tell (None:
        it tells none). None where nothing can be said.
        """
        template, state = self._template, self._sole
        if template is None or state is None:
            return None
        if template.counts and (state.tokens is None or state.tokens > MAX_TOKENS - MOST_ALIKE - 1):
            return None
        return template, (state.tokens or 0) + 1 if template.counts else None

    def on_alike(self, texts: Sequence[str], stamps_ns: Sequence[int], widths_ns: Sequence[int]) -> None:
        """Take chunks that were as ``expected``: their text in as many pieces as the caller likes, and each one's stamp
        and width. Where tokens are counted, each is one.
        """
        state, template = self._sole, self._template
        assert state is not None
        assert template is not None
        number = len(stamps_ns)
        self.events += number
        state.text += texts
        state.has_tokens = True
        if self._first_shown_ns is None:
            self._first_shown_ns = stamps_ns[0]
        self.chunk_ns += stamps_ns
        self.chunk_width_ns += widths_ns
        if template.counts:
            self.chunk_tokens += [1] * number
            self.completion_tokens = state.tokens = (state.tokens or 0) + number
        else:
            self.chunk_tokens += [None] * number

    def _take_plain(self, chunk: Any, stamp_ns: int, width_ns: int) -> bool:
        """Take the chunk that nearly all chunks are: one text fragment of the only choice, not its last, with what
        ``on_chunk`` would make of it. False, and nothing taken, for any other.
        """
        state = self._sole
        if state is None or self.response_id is None:
            return False
        try:
            (choice,) = chunk["choices"]
            delta = choice["delta"]
            text = delta["content"]
            if (
                not text
                or type(text) is not str
                or len(delta) != 1
                or choice["finish_reason"] is not None
                or self._choices.get(choice["index"]) is not state
                or "error" in chunk
            ):
                return False
            usage = chunk.get("usage")
            if usage is None:
                ids = choice.get("token_ids")
                tokens = len(ids) if type(ids) is list and ids else None
                if tokens is None and ids:
                    return False
            else:
                count = usage["completion_tokens"]
                prompt_tokens = usage["prompt_tokens"]
                if (
                    state.tokens is None
                    or type(prompt_tokens) is not int
                    or prompt_tokens != self.prompt_tokens
                    or type(count) is not int
                    or not 0 < count < MAX_TOKENS
                    or usage.get("prompt_tokens_details")
                    or usage.get("completion_tokens_details")
                ):
                    return False
                tokens = state.rise_to(count)
                self.completion_tokens = count
        except (KeyError, TypeError, ValueError, AttributeError):
            return False
        self.events += 1
        state.text.append(text)
        state.has_tokens = True
        if self._first_shown_ns is None:
            self._first_shown_ns = stamp_ns
        self.chunk_ns.append(stamp_ns)
        self.chunk_tokens.append(tokens)
        self.chunk_width_ns.append(width_ns)
        return True

    def on_event(self, event: Event, stamp_ns: int, width_ns: int = 0) -> None:
        data, kind = event
        if self.ended:
            self.ignored += 1
            return
        if kind == b"error":
            self.events += 1
            self._fail(error_message(json_or_text(data)))
            return
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            chunk = json_or_text(data)
            if isinstance(chunk, str):
                self._on_plain_text(chunk, kind, stamp_ns)
                return
        self.on_chunk(chunk, stamp_ns, width_ns)

    def on_chunk(self, chunk: Mapping[str, Any], stamp_ns: int, width_ns: int = 0) -> None:
        """Take a parsed chunk. ``width_ns``: the interval before the stamp it came in; 0: the stamp is its own."""
        self.events += 1
        self._template = None
        try:
            choices = chunk.get("choices")
            if not choices:
                self._on_no_choices(chunk)
                return
            if self.response_id is None:
                self.response_id = short_text(chunk.get("id"))
            usage = chunk.get("usage")
            count = None if usage is None else self._take_usage(usage)
            bears, tokens = self._take_choices(choices, count, stamp_ns)
            if bears:
                self.chunk_ns.append(stamp_ns)
                self.chunk_tokens.append(tokens)
                self.chunk_width_ns.append(width_ns)
            if count is not None:
                self._add_up(choices, count)
            if "error" in chunk:
                self._on_error(chunk)
        except WRONG_TYPES:
            self._on_malformed(chunk)

    def on_body(self, body: bytes, stamp_ns: int) -> None:
        """Take a whole body that is no event stream: a JSON completion, an error, or something else."""
        self._has_body = True
        self.done_ns = stamp_ns
        parsed = json_or_text(body)
        try:
            if self._on_error(parsed):
                return
            choices = parsed["choices"]
            for position, choice in enumerate(choices):
                self._take_choice(self._choice(choice.get("index", position)), choice, choice.get("message"), stamp_ns)
            if not choices:
                raise MalformedError
            self.response_id = short_text(parsed.get("id"))
            usage = parsed.get("usage")
            if usage is not None:
                self.completion_tokens = self._take_usage(usage)
        except WRONG_TYPES:
            self._on_malformed(parsed)

    def on_end(self, stamp_ns: int) -> None:
        """The body ended cleanly."""
        if self.done_ns is None:
            self.done_ns = stamp_ns

    def _choice(self, index: object) -> Choice:
        if index is None:
            index = 0
        if type(index) is not int:
            raise MalformedError
        choice = self._choices.setdefault(index, Choice())
        self._sole = choice if len(self._choices) == 1 else None
        return choice

    def _take_choices(self, choices: list[Any], count: int | None, stamp_ns: int) -> tuple[bool, int | None]:
        """Whether the chunk bears tokens, and how many. A usage count beside several choices is no one's own."""
        bears = False
        tokens: int | None = 0
        for choice in choices:
            index = choice.get("index")
            state = self._choices.get(index) or self._choice(index)
            own = state.rise_to(count) if count is not None and len(choices) == 1 else None
            shown = self._take_choice(state, choice, choice.get("delta"), stamp_ns)
            if own is None and (ids := choice.get("token_ids")):
                own = list_length(ids)
            if shown or own:
                bears = state.has_tokens = True
                tokens = None if tokens is None or own is None else tokens + own
        return bears, tokens

    def _take_choice(self, state: Choice, choice: Mapping[str, Any], delta: Any, stamp_ns: int) -> bool:
        """Take text, reasoning, tool calls and finish reason; True if it shows any of the first three."""
        bears = shown = False
        if delta is None:
            text = choice.get("text")
        else:
            text = delta.get("content")
            bears = keep(state.reasoning, delta.get("reasoning") or delta.get("reasoning_content"))
            calls = delta.get("tool_calls")
            if calls and self._take_tool_calls(state, calls):
                bears = shown = True
        if text:
            shown = bears = keep(state.text, text)
        if bears:
            state.has_tokens = True
            if shown and self._first_shown_ns is None:
                self._first_shown_ns = stamp_ns
        finish_reason = choice.get("finish_reason")
        if finish_reason is not None:
            self._take_finish_reason(state, finish_reason)
        return bears

    def _take_tool_calls(self, state: Choice, calls: list[Any]) -> bool:
        bears = False
        for position, fragment in enumerate(calls):
            index = fragment.get("index", position)
            if type(index) is not int:
                raise MalformedError
            bears |= state.tool_calls.setdefault(index, ToolCall()).take(fragment)
        return bears

    def _take_finish_reason(self, state: Choice, reason: object) -> None:
        state.finish_reason = text = short_text(reason) or ""
        if text in _FAILED_REASONS:
            self._fail(f"finish reason {text}")
            self.finish_reason = text
        elif self.finish_reason is None:
            self.finish_reason = text

    def _take_usage(self, usage: Mapping[str, Any]) -> int | None:
        """Take all but the output tokens, and return these."""
        prompt_tokens = token_count(usage.get("prompt_tokens"))
        if prompt_tokens is not None:
            self.prompt_tokens = prompt_tokens
        if details := usage.get("prompt_tokens_details"):
            self.cached_tokens = token_count(details.get("cached_tokens"))
        if details := usage.get("completion_tokens_details"):
            self.reasoning_tokens = token_count(details.get("reasoning_tokens"))
        return token_count(usage.get("completion_tokens"))

    def _add_up(self, choices: list[Any], count: int) -> None:
        if len(choices) == 1 and len(self._choices) > 1:
            count = sum(choice.tokens or 0 for choice in self._choices.values())
        self.completion_tokens = count

    def _on_no_choices(self, chunk: Mapping[str, Any]) -> None:
        usage = chunk.get("usage")
        if usage is not None:
            total = self._take_usage(usage)
            if total is not None:
                self.completion_tokens = total
        if not self._on_error(chunk) and usage is None:
            self.ignored += 1

    def _on_plain_text(self, text: str, kind: bytes, stamp_ns: int) -> None:
        if text.startswith("[DONE]"):
            self.ended = True
            self._template = None
            self.done_ns = stamp_ns
        elif not text or kind != b"message":
            self.ignored += 1
        else:
            self.events += 1
            self._on_malformed(text)

    def _on_malformed(self, what: object) -> None:
        self.malformed += 1
        if self.error is None:
            self.error = bounded("not a completion: " + (what if isinstance(what, str) else error_message(what)))

    def _on_error(self, chunk: Mapping[str, Any]) -> bool:
        error = error_in(chunk)
        if error is None:
            return False
        self._fail(error_message(error))
        return True

    def _fail(self, message: str) -> None:
        if not self._error_event:
            self._error_event = True
            self.error = message or "the server reported an error without words"
