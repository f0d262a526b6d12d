from __future__ import annotations

from typing import Any

import pytest

from vllm_locust.protocol import (
    Api,
    build_body,
    error_in,
    error_message,
    error_text,
    extra_body_problems,
    is_event_stream,
    prompt_text,
    request_path,
    without_key,
)

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def body(api: Api = Api.CHAT, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": "m",
        "messages": MESSAGES,
        "max_tokens": 16,
        "stream": True,
        "token_detail": False,
        "force_length": False,
        "extra": {},
    }
    return build_body(api, **{**arguments, **changes})


def test_a_streamed_chat_request() -> None:
    assert body() == {
        "model": "m",
        "messages": MESSAGES,
        "max_tokens": 16,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert request_path(Api.CHAT) == "/v1/chat/completions"


def test_a_completions_request_has_one_prompt() -> None:
    assert body(Api.COMPLETIONS, stream=False, max_tokens=None) == {
        "model": "m",
        "prompt": "Be brief.\n\nHello",
        "stream": False,
    }
    assert request_path(Api.COMPLETIONS) == "/v1/completions"


def test_token_detail_and_forced_length() -> None:
    full = body(token_detail=True, force_length=True)
    assert full["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert (full["ignore_eos"], full["min_tokens"], full["max_tokens"]) == (True, 16, 16)
    assert "stream_options" not in body(stream=False, token_detail=True)
    with pytest.raises(ValueError, match="max_tokens"):
        body(force_length=True, max_tokens=None)


def test_extra_is_a_merge_patch_over_the_body() -> None:
    extra = {
        "temperature": 0,
        "max_tokens": None,
        "max_completion_tokens": 64,
        "stream_options": {"x": 1},
        "chat_template_kwargs": {"thinking": False, "gone": None},
        "stop": ["a"],
    }
    assert body(extra=extra) == {
        "model": "m",
        "messages": MESSAGES,
        "stream": True,
        "stream_options": {"include_usage": True, "x": 1},
        "temperature": 0,
        "max_completion_tokens": 64,
        "chat_template_kwargs": {"thinking": False},
        "stop": ["a"],
    }
    assert extra["max_tokens"] is None


def test_extra_must_not_take_what_a_flag_owns() -> None:
    assert extra_body_problems({"temperature": 1, "stream_options": {"x": 1}}) == []
    assert extra_body_problems({"stream": False, "model": "x"}) == [
        "--extra-body: 'model' is set by --model; remove it from the JSON",
        "--extra-body: 'stream' is set by --no-stream; remove it from the JSON",
    ]
    for options in ({"include_usage": False}, None, 5, {"continuous_usage_stats": True}):
        assert len(extra_body_problems({"stream_options": options})) == 1


def test_prompt_text_joins_text_parts_and_refuses_others() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt_text([{"role": "user", "content": parts}, {"role": "assistant", "content": None}]) == "ab\n\n"
    with pytest.raises(ValueError, match="--api chat"):
        prompt_text([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b'{"error":{"message":"no such model","type":"NotFoundError","code":404}}', "no such model"),
        (b'{"error":"Unauthorized"}', "Unauthorized"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"detail":[{"loc":["body"]}]}', '{"detail": [{"loc": ["body"]}]}'),
        (b'{"object":"error","message":"old","code":400}', "old"),
        (b'{"error":{"code":7}}', '{"code": 7}'),
        (b'"plain"', "plain"),
        (b"  <h1>502</h1>\n", "<h1>502</h1>"),
        (b"", None),
        (b"\xff", "\ufffd"),
        (b"x" * 900, "x" * 500),
        (b'{"error":' * 900 + b"1" + b"}" * 900, '{"error": 1}'),
        (b'{"error":{"code":' + b"[" * 990 + b"]" * 990 + b"}}", "an error that is nested too deeply to be shown"),
    ],
)  # fmt: skip
def test_error_bodies(data: bytes, text: str | None) -> None:
    assert error_text(data) == text


def test_errors_in_a_200_answer() -> None:
    assert error_in({"choices": [], "error": None}) is None
    assert error_in({"object": "chat.completion.chunk"}) is None
    assert error_in({"error": "busy"}) == "busy"
    old = {"object": "error", "message": "m"}
    assert error_in(old) == old
    assert error_message("\ud800") == "?"


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        ("text/event-stream; charset=utf-8", True),
        ("TEXT/Event-Stream", True),
        ("application/json", False),
        ("text/html", False),
        ("", False),
        (None, False),
    ],
)
def test_is_event_stream(content_type: str | None, expected: bool) -> None:
    assert is_event_stream(content_type) is expected


@pytest.mark.parametrize(
    ("text", "key", "told"),
    [
        ("bad sk-12345678, and sk-12345678", "sk-12345678", "bad ***, and ***"),
        ("cut in it: sk-123456 (400)", "sk-12345678", "cut in it: *** (400)"),
        ("sk-12 is too short to tell", "sk-12345678", "sk-12 is too short to tell"),
        ("short abc", "abc", "short ***"),
        ("none", None, "none"),
    ],
)
def test_a_text_from_outside_loses_the_key(text: str, key: str | None, told: str) -> None:
    assert without_key(text, key) == told
