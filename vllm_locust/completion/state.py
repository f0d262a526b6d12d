"""What is known of one answer: what arrived when, how many tokens it was, and how it turned out."""

from __future__ import annotations

from vllm_locust.completion.choice import Choice, ToolCall, joined
from vllm_locust.outcome import Outcome


class Completion:
    """Filled by ``CompletionReader``."""

    __slots__ = (
        "_choices",
        "_error_event",
        "_first_shown_ns",
        "_has_body",
        "cached_tokens",
        "chunk_ns",
        "chunk_tokens",
        "chunk_width_ns",
        "completion_tokens",
        "done_ns",
        "ended",
        "error",
        "events",
        "finish_reason",
        "ignored",
        "malformed",
        "prompt_tokens",
        "reasoning_tokens",
        "response_id",
        "streamed",
        "tokenizer_tokens",
    )

    def __init__(self, *, streamed: bool) -> None:
        self.streamed = streamed
        self.response_id: str | None = None
        self.chunk_ns: list[int] = []
        """Arrival of each token-bearing chunk on the monotonic axis."""
        self.chunk_tokens: list[int | None] = []
        self.chunk_width_ns: list[int] = []
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.reasoning_tokens: int | None = None
        self.tokenizer_tokens: int | None = None
        """Output tokens as a tokenizer counts the text: for the caller to set, used where the server gives no usage."""
        self.finish_reason: str | None = None
        self.done_ns: int | None = None
        """Arrival of ``[DONE]``; where there is none, the end of the body."""
        self.ended = False
        """Whether ``[DONE]`` came."""
        self.error: str | None = None
        """The server's words of an error, or of what could not be understood; bounded."""
        self.events = 0
        self.malformed = 0
        self.ignored = 0
        self._choices: dict[int, Choice] = {}
        self._error_event = False
        self._first_shown_ns: int | None = None
        self._has_body = False

    @property
    def has_body(self) -> bool:
        """Whether the answer was one document instead of a stream of events."""
        return self._has_body

    @property
    def complete(self) -> bool:
        """``[DONE]`` came, or every choice seen has a finish reason, or the body was one JSON document."""
        if self.ended or self._has_body:
            return True
        return bool(self._choices) and all(choice.finish_reason is not None for choice in self._choices.values())

    def outcome(self, forced_tokens: int | None = None) -> Outcome:
        """How a 200 answer whose body ended cleanly turned out.

        ``forced_tokens`` is what ``--force-length`` asked for, per choice. Only an exact count can tell ``short``.
        """
        if self._error_event:
            return Outcome.ERROR_EVENT
        if self.malformed:
            return Outcome.BAD_RESPONSE
        if not self.complete:
            return Outcome.TRUNCATED
        if not self.chunk_ns and not self.completion_tokens and not any(c.has_tokens for c in self._choices.values()):
            return Outcome.EMPTY
        exact = self._counted_tokens() if self.completion_tokens is None else self.completion_tokens
        if forced_tokens is not None and exact is not None and exact < forced_tokens * max(1, len(self._choices)):
            return Outcome.SHORT
        return Outcome.OK

    @property
    def _usage_counts(self) -> bool:
        """A server that tells of no token beside chunks that bear some does not count."""
        return self.completion_tokens is not None and (self.completion_tokens > 0 or not self.chunk_ns)

    @property
    def output_tokens(self) -> int | None:
        if self._usage_counts:
            return self.completion_tokens
        if self.tokenizer_tokens is not None:
            return self.tokenizer_tokens
        counted = self._counted_tokens()
        return len(self.chunk_ns) or None if counted is None else counted

    @property
    def token_source(self) -> str | None:
        """``usage``, ``tokenizer`` or ``chunks`` (their token ids where they all have some, else one for each)."""
        if self._usage_counts:
            return "usage"
        if self.tokenizer_tokens is not None:
            return "tokenizer"
        return "chunks" if self.chunk_ns else None

    @property
    def known_chunk_tokens(self) -> list[int] | None:
        """Tokens of every chunk; None where one is unknown, or where several choices share the stream: the gap before a
        chunk is then not that of its choice, and no ITL can be told from it."""
        if len(self._choices) > 1 or not self.chunk_tokens:
            return None
        known = [tokens for tokens in self.chunk_tokens if tokens is not None]
        return known if len(known) == len(self.chunk_tokens) else None

    @property
    def first_answer_ns(self) -> int | None:
        """Arrival of the first token-bearing chunk that is not reasoning."""
        if any(choice.reasoning for choice in self._choices.values()):
            return self._first_shown_ns
        return self.chunk_ns[0] if self.chunk_ns else None

    @property
    def choices(self) -> int:
        """How many choices were seen: 1 unless ``n`` asked for more."""
        return len(self._choices)

    @property
    def text(self) -> str:
        """The content of the first choice, with which a conversation goes on."""
        return next(iter(self.texts), "")

    @property
    def texts(self) -> list[str]:
        """The content of every choice, in the order of their indices."""
        return [joined(choice.text) for _, choice in sorted(self._choices.items())]

    @property
    def reasoning(self) -> str:
        """The reasoning of the first choice."""
        return joined(self._choices[min(self._choices)].reasoning) if self._choices else ""

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tool calls of the first choice, in the order of their indices."""
        if not self._choices:
            return []
        return [call for _, call in sorted(self._choices[min(self._choices)].tool_calls.items())]

    def _counted_tokens(self) -> int | None:
        """The sum over all chunks, None unless every chunk told its own."""
        if not self.chunk_tokens or None in self.chunk_tokens:
            return None
        return sum(tokens for tokens in self.chunk_tokens if tokens is not None)
