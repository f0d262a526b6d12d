"""The body of a completion request, checked as vLLM 0.32 checks it, with its words for what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import orjson

from vllm_locust.simserver.tokens import chat_tokens, tokenize

Api = Literal["chat", "completions"]


class ApiError(Exception):
    """An answer other than 200, with vLLM's error body."""

    def __init__(self, status: HTTPStatus, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": int(self.status)}
        return orjson.dumps({"error": error})


BUSY = ApiError(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance.",
    "Service Unavailable",
)


def bad_request(message: str, param: str, value: object = None) -> ApiError:
    detail = f"parameter={param}" if value is None else f"parameter={param}, value={value}"
    return ApiError(HTTPStatus.BAD_REQUEST, f"{message} ({detail})", "BadRequestError", param)


def _validation_error(kind: str, location: str, message: str, entries: int, context: str = "") -> ApiError:
    text = (
        f"{{'type': '{kind}', 'loc': '{location}', 'msg': '{message}', 'input': '<dict of {entries} items>'{context}}}"
    )
    return ApiError(HTTPStatus.BAD_REQUEST, f"1 validation error:\n  {text}", "Bad Request", location)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    api: Api
    prompts: tuple[list[str], ...]
    """Token by token; a chat has exactly one."""
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    n: int
    stream: bool
    stream_options: bool
    """The body has stream options."""
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    top_logprobs: int | None
    tool_name: str | None

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n


def parse_completion(api: Api, raw: bytes, model: str, max_model_len: int) -> CompletionRequest:
    body = _json_object(raw)
    required = "messages" if api == "chat" else "prompt"
    if required not in body:
        raise _validation_error("missing", f"body.{required}", "Field required", len(body))
    asked = body.get("model")
    if asked is not None and asked != model:
        message = f"The model `{asked}` does not exist. Valid aliases: {model}."
        raise ApiError(HTTPStatus.NOT_FOUND, message, "NotFoundError", "model")
    temperature = body.get("temperature")
    if isinstance(temperature, int | float) and temperature < 0:
        raise bad_request(
            f"temperature must be non-negative, got {float(temperature)}.", "temperature", float(temperature)
        )
    stream = bool(body.get("stream"))
    options = _mapping(body, "stream_options")
    if options and not stream:
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    prompts = _prompts(api, body[required])
    include_usage = bool(options.get("include_usage"))
    max_tokens = _max_tokens(api, body, max(len(prompt) for prompt in prompts), max_model_len)
    return CompletionRequest(
        api=api,
        prompts=prompts,
        max_tokens=max_tokens,
        min_tokens=_min_tokens(body, max_tokens),
        ignore_eos=bool(body.get("ignore_eos")),
        n=_positive(body, "n") or 1,
        stream=stream,
        stream_options=bool(options),
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options.get("continuous_usage_stats")),
        return_token_ids=bool(body.get("return_token_ids")),
        top_logprobs=_top_logprobs(api, body),
        tool_name=_tool_name(body) if api == "chat" else None,
    )


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        context = f", 'ctx': {{'error': '{error.msg}'}}"
        raise _validation_error("json_invalid", f"body.{error.pos}", "JSON decode error", 0, context) from error
    if not isinstance(body, dict):
        raise _validation_error("model_attributes_type", "body", "Input should be a valid dictionary", 0)
    return body


def _prompts(api: Api, value: object) -> tuple[list[str], ...]:
    if api == "chat":
        if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) for item in value):
            raise _validation_error("list_type", "body.messages", "Input should be a valid list", 1)
        return (chat_tokens(value),)
    many = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    prompts = tuple(_prompt_tokens(item) for item in many)
    if not all(prompts):
        raise bad_request("The decoder prompt cannot be empty.", "prompt")
    return prompts


def _prompt_tokens(value: object) -> list[str]:
    if isinstance(value, str):
        return tokenize(value)
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return [f"w{item:05d}" for item in value]
    raise _validation_error("string_type", "body.prompt", "Input should be a valid string", 1)


def _mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name) or {}
    if not isinstance(value, Mapping):
        raise _validation_error(
            "model_attributes_type", f"body.{name}", "Input should be a valid dictionary", len(body)
        )
    return value


def _positive(body: Mapping[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise bad_request(f"{name} must be at least 1, got {value}.", name, value)
    return value


def _max_tokens(api: Api, body: Mapping[str, Any], prompt_tokens: int, max_model_len: int) -> int:
    if prompt_tokens > max_model_len:
        raise bad_request(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains at least"
            f" {max_model_len + 1} input tokens, which exceeds this limit even without any output tokens."
            " Please reduce the length of the input prompt.",
            "input_tokens",
            max_model_len + 1,
        )
    name = "max_completion_tokens" if api == "chat" and body.get("max_completion_tokens") is not None else "max_tokens"
    asked = _positive(body, name)
    room = max_model_len - prompt_tokens
    if asked is None:
        asked = room if api == "chat" else 16
    if asked > max_model_len:
        raise bad_request(
            f"{name}={asked} cannot be greater than max_model_len={max_model_len}. Please request fewer output tokens.",
            name,
            asked,
        )
    if asked > room or room < 1:
        total = prompt_tokens + asked
        raise bad_request(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {asked} output"
            f" tokens and your prompt contains {prompt_tokens} input tokens, for a total of {total} tokens."
            " Please reduce the length of the input prompt or the number of requested output tokens.",
            "input_tokens",
            prompt_tokens,
        )
    return asked


def _min_tokens(body: Mapping[str, Any], max_tokens: int) -> int:
    value = body.get("min_tokens") or 0
    if not isinstance(value, int) or value < 0:
        raise bad_request(f"min_tokens must be greater than or equal to 0, got {value}.", "min_tokens", value)
    if value > max_tokens:
        raise bad_request(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {value}.", "min_tokens", value
        )
    return value


def _top_logprobs(api: Api, body: Mapping[str, Any]) -> int | None:
    value = body.get("logprobs")
    if api == "chat":
        value = (body.get("top_logprobs") or 0) if value else None
    if value is not None and not isinstance(value, int):
        raise bad_request(f"logprobs must be a number of alternatives, got {value}.", "logprobs", value)
    return value


def _tool_name(body: Mapping[str, Any]) -> str | None:
    """The first tool is the one called, unless the body names another or forbids it."""
    tools = body.get("tools")
    choice = body.get("tool_choice", "auto")
    if not isinstance(tools, Sequence) or not tools or choice == "none":
        return None
    chosen = choice if isinstance(choice, Mapping) else tools[0]
    function = chosen.get("function") if isinstance(chosen, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        raise _validation_error("missing", "body.tools.0.function.name", "Field required", len(body))
    return str(function["name"])
