"""The bytes of every answer: events and JSON bodies with vLLM 0.32's keys in vLLM's order."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from vllm_locust.simserver.completion import Api, ApiError

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def to_json(value: object) -> str:
    return orjson.dumps(value).decode()


def error_event(error: ApiError) -> bytes:
    """Inside a 200 stream vLLM writes errors with another serializer: a space after each colon and comma."""
    message, kind = to_json(error.message), to_json(error.kind)
    text = f'{{"error": {{"message": {message}, "type": {kind}, "param": null, "code": {int(error.status)}}}}}'
    return f"data: {text}\n\n".encode()


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    """None where the server does not give prompt token details."""
    created_cache_tokens: int = 0
    reasoning_tokens: int | None = None
    """None where the model does not reason."""

    def final(self, *, streamed: bool) -> str:
        text = self._counts()
        if self.cached_tokens is not None:
            text += (
                f',"prompt_tokens_details":{{"cached_tokens":{self.cached_tokens}'
                f',"created_cache_tokens":{self.created_cache_tokens}}}'
            )
        elif not streamed:
            text += ',"prompt_tokens_details":null'
        if self.reasoning_tokens is not None:
            text += f',"completion_tokens_details":{{"reasoning_tokens":{self.reasoning_tokens}}}'
        elif not streamed:
            text += ',"completion_tokens_details":null'
        return text + "}"

    def continuous(self) -> str:
        return self._counts() + ',"completion_tokens_details":null}'

    def _counts(self) -> str:
        total = self.prompt_tokens + self.completion_tokens
        counts = f'"prompt_tokens":{self.prompt_tokens},"total_tokens":{total},"completion_tokens":'
        return f"{{{counts}{self.completion_tokens}"


@dataclass(frozen=True, slots=True)
class Delta:
    """What a chunk adds to a choice. ``field`` is ``content`` or ``reasoning``; a tool call is in ``json``."""

    text: str
    field: str = "content"
    json: str | None = None

    def to_json(self) -> str:
        return self.json if self.json is not None else f'{{"{self.field}":"{self.text}"}}'


def tool_call_begin(call_id: str, name: str) -> str:
    function = f'{{"name":{to_json(name)},"arguments":""}}'
    return f'{{"tool_calls":[{{"id":"{call_id}","type":"function","index":0,"function":{function}}}]}}'


def tool_call_arguments(text: str) -> str:
    return f'{{"tool_calls":[{{"index":0,"function":{{"arguments":{to_json(text)}}}}}]}}'


class Events:
    """The events of one answer. Texts of the simulated model need no escaping; everything else is escaped."""

    def __init__(self, api: Api, response_id: str, created: int, model: str, fingerprint: str) -> None:
        kind = "chat.completion.chunk" if api == "chat" else "text_completion"
        self.api = api
        self.response_id = response_id
        self._created = created
        self._model = to_json(model)
        self._fingerprint = fingerprint
        identity = f'"id":{to_json(response_id)},"object":"{kind}","created":{created},"model":{self._model}'
        self._head = f'data: {{{identity},"choices":['

    def role(self, choice: int, prompt_token_ids: list[int] | None, usage: Usage | None) -> bytes:
        counts = "" if usage is None else f',"usage":{usage.continuous()}'
        ids = "null" if prompt_token_ids is None else to_json(prompt_token_ids)
        return (
            f'{self._head}{{"index":{choice},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]'
            f'{counts},"prompt_token_ids":{ids},"prompt_text":null}}\n\n'
        ).encode()

    def chunk(
        self,
        choice: int,
        delta: Delta,
        *,
        token_ids: list[int] | None,
        finish_reason: str | None = None,
        logprobs: str = "null",
        usage: Usage | None = None,
        last: bool = False,
        prompt_token_ids: list[int] | None = None,
    ) -> bytes:
        """A chunk of one choice; ``last`` is the end of a stream that has no usage chunk."""
        ids = "null" if token_ids is None else to_json(token_ids)
        counts = "" if usage is None else f',"usage":{usage.continuous()}'
        fingerprint = f',"system_fingerprint":"{self._fingerprint}"' if last else ""
        reason = "null" if finish_reason is None else f'"{finish_reason}"'
        if self.api == "chat":
            stop = "" if finish_reason is None else ',"stop_reason":null'
            body = f'"delta":{delta.to_json()},"logprobs":{logprobs},"finish_reason":{reason}{stop},"token_ids":{ids}'
        else:
            prompt_ids = "null" if prompt_token_ids is None else to_json(prompt_token_ids)
            body = (
                f'"text":"{delta.text}","logprobs":{logprobs},"finish_reason":{reason},"stop_reason":null'
                f',"prompt_token_ids":{prompt_ids},"token_ids":{ids}'
            )
        return f'{self._head}{{"index":{choice},{body}}}]{counts}{fingerprint}}}\n\n'.encode()

    def usage(self, usage: Usage) -> bytes:
        counts = usage.final(streamed=True)
        return f'{self._head}],"usage":{counts},"system_fingerprint":"{self._fingerprint}"}}\n\n'.encode()

    def whole(self, choices: list[str], usage: Usage | None, prompt_token_ids: list[int] | None) -> bytes:
        """The JSON answer to a request that is not streamed."""
        kind = "chat.completion" if self.api == "chat" else "text_completion"
        counts = "null" if usage is None else usage.final(streamed=False)
        head = (
            f'{{"id":{to_json(self.response_id)},"object":"{kind}","created":{self._created},"model":{self._model}'
            f',"choices":[{",".join(choices)}],"service_tier":null,"system_fingerprint":"{self._fingerprint}","usage":{counts}'
        )
        if self.api == "chat":
            ids = "null" if prompt_token_ids is None else to_json(prompt_token_ids)
            head += f',"prompt_logprobs":null,"prompt_token_ids":{ids},"prompt_text":null'
        tail = ',"ec_transfer_params":null,"metrics":null}' if self.api == "chat" else "}"
        return f'{head},"kv_transfer_params":null{tail}'.encode()


@dataclass(frozen=True, slots=True)
class WholeChoice:
    """One choice of an answer that is not streamed."""

    index: int
    text: str
    finish_reason: str
    token_ids: list[int] | None
    logprobs: str = "null"
    reasoning_field: str = "reasoning"
    reasoning: str | None = None
    tool_call: tuple[str, str, str] | None = None
    """Id, name and arguments."""
    prompt_token_ids: list[int] | None = None

    def chat(self) -> str:
        ids = "null" if self.token_ids is None else to_json(self.token_ids)
        content = "null" if self.tool_call is not None else to_json(self.text)
        calls = ""
        if self.tool_call is not None:
            call_id, name, arguments = self.tool_call
            call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            calls = f',"tool_calls":[{to_json(call)}]'
        message = (
            f'{{"role":"assistant","content":{content},"refusal":null,"annotations":null,"audio":null,"function_call":null'
            f'{calls},"{self.reasoning_field}":{to_json(self.reasoning)}}}'
        )
        return (
            f'{{"index":{self.index},"message":{message},"logprobs":{self.logprobs},"finish_reason":"{self.finish_reason}"'
            f',"stop_reason":null,"token_ids":{ids},"routed_experts":null}}'
        )

    def completion(self) -> str:
        ids = "null" if self.token_ids is None else to_json(self.token_ids)
        prompt_ids = "null" if self.prompt_token_ids is None else to_json(self.prompt_token_ids)
        return (
            f'{{"index":{self.index},"text":{to_json(self.text)},"logprobs":{self.logprobs}'
            f',"finish_reason":"{self.finish_reason}","stop_reason":null,"token_ids":{ids},"prompt_logprobs":null'
            f',"prompt_token_ids":{prompt_ids}}}'
        )


def chat_logprobs(pieces: list[tuple[int, str]], top: int) -> str:
    def entry(text: str, rank: int) -> dict[str, object]:
        return {"token": text, "logprob": -1.0 - rank, "bytes": list(text.encode())}

    def alternatives(number: int, text: str) -> list[dict[str, object]]:
        return [entry(text if rank == 0 else f" w{10_000 + (number + rank) % 90_000}", rank) for rank in range(top)]

    content = [{**entry(text, 0), "top_logprobs": alternatives(number, text)} for number, text in pieces]
    return to_json({"content": content})


def completion_logprobs(pieces: list[tuple[int, str]], top: int, offset: int) -> str:
    texts = [text for _, text in pieces]
    offsets: list[int] = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops = [{text: -1.0} if top else {} for text in texts]
    return to_json(
        {"text_offset": offsets, "token_logprobs": [-1.0] * len(texts), "tokens": texts, "top_logprobs": tops}
    )
