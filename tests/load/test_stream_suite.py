"""Every transport makes the same of the same bytes, pauses and endings. What an SDK cannot do stands in one table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from tests.load.driving import call, drive
from tests.load.scripted_server import ScriptedServer, serving
from tests.load.stream_cases import CASES, TIMEOUTS, Facts

TRANSPORTS = ["kernel", "sse", "openai"]

_FIRST_EVENT_LOST = {"text": "bc", "chunks": 2, "output_tokens": 2}
_STRICT_UTF8 = {
    "outcome": "bad_response",
    "error": "codec can't decode byte 0xff",
    "text": "",
    "chunks": 0,
    "output_tokens": None,
    "finish_reason": None,
}
_ERROR_FIELD_LOST = {"outcome": "truncated", "error": None}

DIFFERENCES: dict[tuple[str, str], dict[str, Any]] = {
    # Neither library strips a byte order mark: the first line has an unknown field, and its event is lost.
    ("sse", "byte_order_mark"): _FIRST_EVENT_LOST,
    ("openai", "byte_order_mark"): _FIRST_EVENT_LOST,
    # Both decode strictly, where the specification demands U+FFFD, and cannot go on.
    ("sse", "invalid_utf8"): {**_STRICT_UTF8, "done": False},
    ("openai", "invalid_utf8"): _STRICT_UTF8,
    # Both follow the specification and drop llama.cpp's field.
    ("sse", "error_as_field"): _ERROR_FIELD_LOST,
    ("openai", "error_as_field"): _ERROR_FIELD_LOST,
    # sseclient-py hands out what is left at the end of the body, where the specification discards it.
    ("sse", "last_event_unterminated"): {"outcome": "ok"},
    # http.client takes the end of the connection for the end of the headers.
    ("sse", "closed_in_the_headers"): {
        "outcome": "bad_response",
        "error": "not a completion",
        "http_status": 200,
        "done": True,
    },
    # http.client reports a chunk size that is no number as an incomplete read.
    ("sse", "bad_chunk_size"): {"outcome": "disconnected", "error": "inside the answer's body"},
    # The SDK parses the empty data of an event, raises, and cannot go on.
    ("openai", "empty_data"): {
        "outcome": "bad_response",
        "error": "the SDK cannot read the stream",
        "text": "a",
        "chunks": 1,
        "output_tokens": 1,
        "finish_reason": None,
    },
    # The SDK does not show its users the type of an event.
    ("openai", "error_as_event_type"): {"outcome": "ok", "error": None},
}


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with serving({name: case.script for name, case in CASES.items()}) as server:
        yield server


@pytest.fixture(scope="module", params=TRANSPORTS)
def results(request: pytest.FixtureRequest, server: ScriptedServer) -> tuple[str, dict[str, Any], ScriptedServer]:
    """All cases at the same time, but those that time out: they come after, when the process has little else to do."""
    transport: str = request.param
    host, port = server.listener.getsockname()
    rounds: tuple[list[list[Any]], list[list[Any]]] = ([], [])
    for name, case in CASES.items():
        more = {"streamed": case.streamed, "timeouts": case.timeouts, **case.more}
        rounds[name in TIMEOUTS].append([call(f"{name}/{transport}", f"http://{host}:{port}", **more)])
    return transport, drive(transport, *rounds), server


@pytest.mark.parametrize("name", CASES)
def test_the_facts_of_an_answer(name: str, results: tuple[str, dict[str, Any], ScriptedServer]) -> None:
    transport, facts, _ = results
    seen = facts[f"{name}/{transport}"]
    expected: Facts = replace(CASES[name].expected, **DIFFERENCES.get((transport, name), {}))
    shown = {
        "outcome": seen["outcome"],
        "text": seen["text"],
        "chunks": len(seen["chunk_ns"]),
        "output_tokens": seen["output_tokens"],
        "finish_reason": seen["finish_reason"],
        "error": seen["error"],
        "http_status": seen["http_status"],
        "done": seen["done"],
    }
    if expected.error is not None and seen["error"] is not None and expected.error in seen["error"]:
        shown["error"] = expected.error
    assert shown == asdict(expected)
    assert len(seen["chunk_tokens"]) == len(seen["chunk_width_ns"]) == len(seen["chunk_ns"])


@pytest.mark.parametrize("name", CASES)
def test_a_request_is_sent_once_and_its_times_are_in_order(
    name: str, results: tuple[str, dict[str, Any], ScriptedServer]
) -> None:
    transport, facts, server = results
    seen = facts[f"{name}/{transport}"]
    posts = [entry for entry in server.requests if entry.name == seen["name"]]
    assert len(posts) == 1
    assert seen["sent_ns"] <= posts[0].received_ns
    order = [seen["sent_ns"], *([] if seen["headers_ns"] is None else [seen["headers_ns"]]), *seen["chunk_ns"]]
    assert order == sorted(order)
    if seen["chunk_ns"]:
        assert seen["chunk_ns"][0] >= server.sent_ns[seen["name"]][0]


def test_every_difference_is_one_of_a_case_that_exists() -> None:
    assert all(name in CASES and transport in ("sse", "openai") for transport, name in DIFFERENCES)


def test_retry_after_is_kept(results: tuple[str, dict[str, Any], ScriptedServer]) -> None:
    transport, facts, _ = results
    assert facts[f"status_429/{transport}"]["retry_after"] == "7"
    assert facts[f"status_400/{transport}"]["retry_after"] is None


def test_usage_ids_and_reasoning_are_kept(results: tuple[str, dict[str, Any], ScriptedServer]) -> None:
    transport, facts, _ = results
    chunked = facts[f"chunked/{transport}"]
    assert (chunked["prompt_tokens"], chunked["token_source"], chunked["response_id"]) == (9, "usage", "chatcmpl-1")
    assert facts[f"reasoning/{transport}"]["reasoning"] == "hm"
    assert facts[f"empty_text_with_usage/{transport}"]["chunk_tokens"] == [1, 1, 1]
    assert facts[f"vllm_stream_token_ids/{transport}"]["chunk_tokens"] == [1, 1, 1, 1, 1]


def test_a_pause_of_the_server_is_in_the_times(results: tuple[str, dict[str, Any], ScriptedServer]) -> None:
    """Each chunk is stamped after the server has sent it; the pauses of 150 ms between them show."""
    transport, facts, server = results
    seen = facts[f"busy_but_not_idle/{transport}"]
    sent = server.sent_ns[seen["name"]]
    assert len(sent) == 8
    for arrival_ns, send_ns in zip(seen["chunk_ns"], sent[2:5], strict=True):
        assert arrival_ns >= send_ns - 100_000
    assert seen["chunk_width_ns"] == [0, 0, 0]


def test_events_of_one_read_have_the_width_of_what_is_not_known(
    results: tuple[str, dict[str, Any], ScriptedServer],
) -> None:
    """Two events in one send: the first of them cannot have a time of its own, the second can."""
    transport, facts, _ = results
    seen = facts[f"events_share_a_chunk/{transport}"]
    assert seen["chunk_width_ns"][1] > 0
