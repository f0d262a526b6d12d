"""The same headers, keys, order and spelling as recorded answers of a vLLM 0.32."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.simserver.raw_client import Answer, Server, chat

SAMPLES = Path(__file__).parent / "samples"


def shape(value: object) -> object:
    """Keys in order and kinds of values; a list by the shapes that occur in it."""
    if isinstance(value, dict):
        return [(key, shape(item)) for key, item in value.items()]
    if isinstance(value, list):
        return ["list", *sorted({repr(shape(item)) for item in value})]
    return type(value).__name__


def shapes(body: str) -> list[object]:
    """Of each event, without repetitions; every event must be spelt as vLLM spells it."""
    found: list[object] = []
    for event in body.strip("\n").split("\n\n"):
        assert event.startswith("data: ")
        data = event.removeprefix("data: ")
        seen: object = data
        if data != "[DONE]":
            value = json.loads(data)
            assert json.dumps(value, separators=(",", ":"), ensure_ascii=False) == data
            seen = shape(value)
        if not found or found[-1] != seen:
            found.append(seen)
    return found


def header_lines(answer: Answer) -> list[tuple[str, str]]:
    varying = {"date", "content-length"}
    return [(name, "" if name in varying else value) for name, value in answer.headers]


def sample(name: str) -> tuple[list[tuple[str, str]], str]:
    head, _, body = (SAMPLES / f"{name}.txt").read_text().replace("\r\n", "\n").partition("\n\n")
    return header_lines(Answer(0, _headers(head), b"")), body


def _headers(head: str) -> list[tuple[str, str]]:
    return [(name, value.strip()) for name, _, value in (line.partition(":") for line in head.split("\n")[1:])]


STREAMS: dict[str, dict[str, object]] = {
    "stream_sample": {"stream_options": {"include_usage": True}},
    "stream_no_usage": {},
    "stream_continuous_usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "stream_n2": {"stream_options": {"include_usage": True}, "n": 2},
    "stream_token_ids": {"stream_options": {"include_usage": True}, "return_token_ids": True},
    "stream_logprobs": {"stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2},
}


@pytest.mark.parametrize("name", STREAMS)
def test_chat_streams(fast: Server, name: str) -> None:
    answer = fast.ask("/v1/chat/completions", chat(stream=True, **STREAMS[name]))
    headers, body = sample(name)
    assert header_lines(answer) == headers
    assert shapes(answer.body.decode()) == shapes(body)


def test_completion_stream(fast: Server) -> None:
    body = {"model": "sim", "prompt": "a b", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
    answer = fast.ask("/v1/completions", body)
    headers, expected = sample("completions_stream_sample")
    assert header_lines(answer) == headers
    assert shapes(answer.body.decode()) == shapes(expected)


def test_an_answer_that_is_not_streamed(fast: Server) -> None:
    answer = fast.ask("/v1/chat/completions", chat())
    headers, expected = sample("nonstream_sample")
    assert header_lines(answer) == headers
    assert shape(answer.json()) == shape(json.loads(expected))
    assert json.dumps(answer.json(), separators=(",", ":")).encode() == answer.body


def test_models(fast: Server) -> None:
    answer = fast.ask("/v1/models")
    headers, expected = sample("models")
    assert header_lines(answer) == headers
    assert shape(answer.json()) == shape(json.loads(expected))
    assert answer.json()["data"][0]["max_model_len"] == 32_768


def _error_samples() -> dict[str, tuple[str, list[tuple[str, str]], str]]:
    found: dict[str, tuple[str, list[tuple[str, str]], str]] = {}
    for part in (SAMPLES / "error_samples.txt").read_text().replace("\r\n", "\n").split("##### ")[1:]:
        title, _, rest = part.partition("\n")
        head, _, body = rest.partition("\n\n")
        found[title] = (head.split("\n")[0], header_lines(Answer(0, _headers(head), b"")), body.strip())
    return found


ERRORS: dict[str, tuple[str, object]] = {
    "max_tokens above the context window (stream=true)": ("max_tokens", 100000),
    "unknown model (stream=true)": ("model", "nope"),
    "invalid value: temperature -1": ("temperature", -1),
    "stream_options without stream": ("stream_options", {"include_usage": True}),
    "prompt longer than the context window": ("messages", [{"role": "user", "content": "w " * 33_000}]),
}


@pytest.mark.parametrize("title", ERRORS)
def test_error_bodies(fast: Server, title: str) -> None:
    key, value = ERRORS[title]
    answer = fast.ask("/v1/chat/completions", chat(**{key: value}))
    status, headers, body = _error_samples()[title]
    assert status.startswith(f"HTTP/1.1 {answer.status} ")
    assert header_lines(answer) == headers
    expected = body.replace("4096", "32768").replace("4097", "32769").replace("tiny", "sim")
    assert answer.body.decode() == expected


def test_unreadable_bodies(fast: Server) -> None:
    missing = fast.ask("/v1/chat/completions", {"model": "sim"})
    assert missing.body.decode() == _error_samples()["missing messages"][2]
    broken = fast.ask("/v1/chat/completions", b'{"model": "sim",')
    assert broken.status == 400
    assert shape(broken.json()) == shape(json.loads(_error_samples()["body is not json"][2]))
    assert fast.ask("/v1/chat/completions", b"[]").status == 400
    odd: list[dict[str, object]] = [
        {"stream": True, "stream_options": [1]},
        {"tools": [1]},
        {"messages": "text"},
        {"messages": []},
        {"max_tokens": "many"},
        {"n": 0},
        {"min_tokens": 6},
        {"logprobs": True, "top_logprobs": "all"},
    ]
    for body in odd:
        assert fast.ask("/v1/chat/completions", chat(**body)).status == 400, body


def test_paths_and_methods(fast: Server) -> None:
    for title, answer in (
        ("unknown path", fast.ask("/nowhere")),
        ("GET on a POST path", fast.ask("/v1/chat/completions")),
    ):
        status, headers, body = _error_samples()[title]
        assert status.startswith(f"HTTP/1.1 {answer.status} ")
        assert (header_lines(answer), answer.body.decode()) == (headers, body)
    assert fast.ask("/version").body == b'{"version":"0.32.0"}'
    health = fast.ask("/health")
    assert (health.status, health.body) == (200, b"")


def test_metrics_have_the_names_labels_buckets_and_texts_of_vllm(fast: Server) -> None:
    answer = fast.ask("/metrics")
    assert answer.header("content-type") == "text/plain; version=1.0.0; charset=utf-8"
    lines = answer.body.decode().splitlines()
    ours = [line if line.startswith("#") else line.rsplit(" ", 1)[0] for line in lines]
    recorded = (SAMPLES / "metrics_names.txt").read_text().replace('"tiny"', '"sim"').splitlines()

    def comparable(names: list[str]) -> set[str]:
        return {re.sub(r"cache_config_info\{.*", "cache_config_info", name) for name in names}

    assert comparable(ours) == comparable(recorded)
    assert len(ours) == len(recorded)
