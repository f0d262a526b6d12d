"""The OpenAI API as vLLM and its relatives speak it: request bodies, error bodies, and which answers are streams."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import takewhile
from typing import Any

import orjson

MAX_ERROR_CHARACTERS = 500
WITHHELD = "***"
_PART = 8
"""So many characters of a key's beginning are taken for it."""
_OWNED_BY_FLAGS = {
    "model": "--model",
    "messages": "--workload",
    "prompt": "--workload",
    "stream": "--no-stream",
}


class Api(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"


def request_path(api: Api) -> str:
    """The path after the host; a host that already ends in ``/v1`` must have lost that first."""
    return "/v1/chat/completions" if api is Api.CHAT else "/v1/completions"


def build_body(
    api: Api,
    *,
    model: str,
    messages: Sequence[Mapping[str, Any]],
    max_tokens: int | None,
    stream: bool,
    token_detail: bool,
    force_length: bool,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """The JSON body of one request.

    ``max_tokens`` goes out under that name in both APIs, since every server knows it (``max_completion_tokens`` is
    OpenAI's newer name, for chat only). ``extra`` is merged over the body as a JSON merge patch (RFC 7396): objects
    merge key by key, anything else replaces, null removes. So ``{"max_tokens": null, "max_completion_tokens": 64}``
    renames the limit, and ``{"stream_options": {"x": 1}}`` keeps ``include_usage``.
    """
    body: dict[str, Any] = {"model": model}
    if api is Api.CHAT:
        body["messages"] = list(messages)
    else:
        body["prompt"] = prompt_text(messages)
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    if force_length:
        if max_tokens is None:
            raise ValueError("force_length needs max_tokens: without it an answer would run to the end of the context")
        body["ignore_eos"] = True
        body["min_tokens"] = max_tokens
    body["stream"] = stream
    if stream:
        body["stream_options"] = {"include_usage": True}
        if token_detail:
            body["stream_options"]["continuous_usage_stats"] = True
    return _merge_patch(body, extra) if extra else body


def prompt_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Messages as the one prompt of the completions API: their texts, one blank line between them, no role names."""
    return "\n\n".join(_message_text(message) for message in messages)


def _message_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a message part that is not text cannot be sent through the completions API: use --api chat")
    return "".join(texts)


def _merge_patch(target: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(target)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            old = merged.get(key)
            merged[key] = _merge_patch(old if isinstance(old, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def extra_body_problems(extra: Mapping[str, Any]) -> list[str]:
    """What ``--extra-body`` must not say, each as one sentence: keys that a flag owns, and switching usage off."""
    problems = [
        f"--extra-body: {key!r} is set by {flag}; remove it from the JSON"
        for key, flag in _OWNED_BY_FLAGS.items()
        if key in extra
    ]
    if "stream_options" in extra:
        options = extra["stream_options"]
        if not isinstance(options, Mapping) or options.get("include_usage", True) is not True:
            problems.append("--extra-body: 'stream_options' must keep include_usage: it counts the tokens")
        elif "continuous_usage_stats" in options:
            problems.append("--extra-body: 'continuous_usage_stats' is set by --token-detail; remove it from the JSON")
    return problems


def error_message(value: object) -> str:
    """The server's own words out of an error value of any shape, bounded."""
    while isinstance(value, Mapping):
        inner = next((value[key] for key in ("error", "message", "detail") if value.get(key)), None)
        if not isinstance(inner, str | Mapping):
            break
        value = inner
    return bounded(value if isinstance(value, str) else _shown(value))


def without_key(text: str, key: str | None) -> str:
    """``text`` from outside with ``***`` in place of the API key, and of its beginning where ``text`` was cut in it."""
    if not key or key[:_PART] not in text:
        return text
    first, *rest = text.split(key[:_PART])
    return WITHHELD.join([first, *(piece[_alike(piece, key[_PART:]) :] for piece in rest)])


def _alike(one: str, other: str) -> int:
    """The number of characters that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def bounded(text: str) -> str:
    """At most 500 characters, all of which can be encoded."""
    return text[:MAX_ERROR_CHARACTERS].encode("utf-8", "replace").decode()


def _shown(value: object) -> str:
    try:
        return json.dumps(value, default=str, ensure_ascii=False)
    except (ValueError, RecursionError):
        return "an error that is nested too deeply to be shown"


def error_in(value: Mapping[str, Any]) -> object | None:
    """The error that a JSON object of a 200 answer carries, or None.

    ``{"error": …}`` (vLLM, SGLang, llama.cpp, TGI), ``{"object": "error", …}`` (vLLM before 0.10, LMDeploy, FastChat).
    """
    error: object = value.get("error")
    if error:
        return error
    return value if value.get("object") == "error" else None


def error_text(body: bytes) -> str | None:
    """What the body of an answer with an error status says: its message if it is JSON, else its text; None if empty."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return bounded(body.decode("utf-8", "replace").strip()) or None
    return error_message(parsed)


def is_event_stream(content_type: str | None) -> bool:
    """Whether a 200 answer is read as events. Any other body is collected, and must then be a JSON completion."""
    return (content_type or "").partition(";")[0].strip().lower() == "text/event-stream"
