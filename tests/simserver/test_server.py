"""Over a real socket: what was sent is what the truth log and the metrics say."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import make_certificate
from tests.simserver.conftest import FAST
from tests.simserver.raw_client import Client, Server, chat, request_bytes, running, stream
from vllm_locust.errors import UsageError
from vllm_locust.simserver.completion import BUSY
from vllm_locust.simserver.engine import Engine, EngineConfig, EngineRequest
from vllm_locust.simserver.settings import parse_settings
from vllm_locust.simserver.tokens import count_prompt_tokens

MS = 1_000_000
CHAT = "/v1/chat/completions"
BUSY_BODY = (
    '{"error":{"message":"The engine is currently busy and cannot accept new requests. Please try again later or on a'
    ' different instance.","type":"Service Unavailable","param":null,"code":503}}'
)


def token_times(answer: Any) -> list[int]:
    """When each chunk with content was read."""
    times = zip(answer.chunks, answer.chunk_ns, strict=True)
    return [at for chunk, at in times if b'"delta":{"content":" w' in chunk]


def test_each_event_is_one_chunk_and_the_truth_is_what_arrived(fast: Server) -> None:
    before_ns = time.monotonic_ns()
    answer = fast.ask(CHAT, stream(), {"X-Request-Id": "one"})
    truth = fast.truth("one")
    assert all(chunk.startswith(b"data: ") and chunk.count(b"\n\n") == 1 for chunk in answer.chunks)
    assert len(answer.chunks) == 1 + 5 + 1 + 1
    assert [event["id"] for event in answer.events()[:-1]] == ["chatcmpl-one"] * 7
    usage = answer.events()[-2]["usage"]
    assert usage == {"prompt_tokens": 10, "total_tokens": 15, "completion_tokens": 5}
    assert (truth["prompt_tokens"], truth["output_tokens"], truth["outcome"]) == (10, 5, "ok")
    assert (truth["finish_reasons"], truth["http_status"], truth["streamed"]) == (["length"], 200, True)
    assert truth["chunk_tokens"] == [1] * 5
    assert truth["chunk_text_bytes"] == [7] * 5
    arrived = token_times(answer)
    assert len(arrived) == 5
    for sent, done, read in zip(truth["chunk_before_ns"], truth["chunk_after_ns"], arrived, strict=True):
        assert before_ns < sent <= done
        assert sent < read
    received = truth["received_mono_ns"]
    for index, sent in enumerate(truth["chunk_before_ns"]):
        assert sent >= received + 2 * MS + index * MS
    assert received < truth["headers_before_ns"] <= truth["headers_after_ns"] < truth["chunk_before_ns"][0]
    assert truth["chunk_after_ns"][-1] < truth["done_before_ns"] <= truth["done_after_ns"] <= truth["ended_mono_ns"]
    assert abs(truth["received_unix_ns"] - time.time_ns()) < 60_000 * MS


def test_the_same_prompt_gets_the_same_answer_streamed_or_not(fast: Server) -> None:
    streamed, whole = fast.ask(CHAT, stream()), fast.ask(CHAT, chat(), {"X-Request-Id": "whole"})
    assert whole.json()["choices"][0]["message"]["content"] == streamed.text()
    truth = fast.truth("whole")
    assert (truth["output_tokens"], truth["chunk_tokens"], truth["streamed"]) == (5, [], False)
    assert truth["done_before_ns"] > truth["received_mono_ns"] + 6 * MS


def test_prompt_tokens_are_those_of_the_documented_function(fast: Server) -> None:
    messages = [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "Über 50 % incomprehensible?"}]
    usage = fast.ask(CHAT, chat(messages=messages)).json()["usage"]
    words = [word for message in messages for word in message["content"].split()]
    assert usage["prompt_tokens"] == 4 + 2 * 4 + sum(-(-len(word) // 6) for word in words)
    assert usage["prompt_tokens"] == count_prompt_tokens(messages)


def test_several_choices_and_token_ids(fast: Server) -> None:
    answer = fast.ask(CHAT, stream(n=2, return_token_ids=True), {"X-Request-Id": "two"})
    events = [event for event in answer.events() if event != "[DONE]"]
    ids: dict[int, list[int]] = {0: [], 1: []}
    for event in events:
        for choice in event["choices"]:
            ids[choice["index"]] += choice.get("token_ids") or []
    assert [len(found) for found in ids.values()] == [5, 5]
    assert ids[0] != ids[1]
    assert len(events[0]["prompt_token_ids"]) == 10
    assert events[-1]["usage"] == {"prompt_tokens": 10, "total_tokens": 20, "completion_tokens": 10}
    truth = fast.truth("two")
    assert (truth["output_tokens"], sorted(truth["chunk_choice"])) == (10, [0] * 5 + [1] * 5)


def test_a_tool_call_is_one_json_object(fast: Server) -> None:
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    answer = fast.ask(CHAT, stream(tools=tools))
    calls = [
        choice["delta"]["tool_calls"][0]["function"]
        for event in answer.events()[:-1]
        for choice in event["choices"]
        if "tool_calls" in choice["delta"]
    ]
    assert (len(calls), calls[0]["name"]) == (5, "look_up")
    assert list(json.loads("".join(call["arguments"] for call in calls))) == ["text"]
    assert answer.events()[-3]["choices"][0]["finish_reason"] == "tool_calls"
    whole = fast.ask(CHAT, chat(tools=tools)).json()["choices"][0]
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == "".join(call["arguments"] for call in calls)


def test_keep_alive_chunked_bodies_and_expect(fast: Server) -> None:
    client = fast.connect()
    for _ in range(3):
        assert client.ask(CHAT, stream()).events()[-1] == "[DONE]"
    payload = json.dumps(chat()).encode()
    client.socket.sendall(
        b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n"
    )
    assert client.read().status == 100
    for piece in (payload[:7], payload[7:]):
        client.socket.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
    client.socket.sendall(b"0\r\n\r\n")
    assert client.read().json()["usage"]["completion_tokens"] == 5
    last = client.ask(CHAT, chat(), {"connection": "close"})
    assert last.header("connection") == "close"
    assert client.read().ended == "eof"
    client.close()


def test_http_1_0_and_garbage(fast: Server) -> None:
    client = fast.connect()
    client.socket.sendall(request_bytes(CHAT, stream()).replace(b"HTTP/1.1", b"HTTP/1.0"))
    old = client.read()
    assert (old.ended, old.header("transfer-encoding"), old.events()[-1]) == ("closed", None, "[DONE]")
    client.close()
    client = fast.connect()
    client.socket.sendall(b"nonsense\r\n\r\n")
    assert client.read().status == 400
    client.close()


def test_a_client_that_goes_is_in_the_truth_log(fast: Server) -> None:
    client = fast.connect()
    client.socket.sendall(request_bytes(CHAT, stream(max_tokens=5_000), {"X-Request-Id": "gone"}))
    client.socket.recv(2_000)
    client.close()
    truth = fast.truth("gone")
    assert truth["outcome"] == "client_closed"
    assert truth["output_tokens"] < 5_000
    assert len(truth["chunk_before_ns"]) == len(truth["chunk_tokens"]) == len(truth["chunk_after_ns"])
    assert fast.metric("num_requests_running") == 0


def test_a_slow_reader_never_makes_a_stamp_lie(tmp_path: Path) -> None:
    with running(tmp_path, "--first-token-ms", "0", "--token-interval-ms", "0") as server:
        client = Client(socket.socket())
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        client.socket.connect(("127.0.0.1", server.port))
        body = stream(max_tokens=30_000, messages=[{"role": "user", "content": "x"}])
        client.socket.sendall(request_bytes(CHAT, body, {"X-Request-Id": "slow"}))
        time.sleep(1.0)
        reading_ns = time.monotonic_ns()
        answer = client.read()
        assert answer.events()[-2]["usage"]["completion_tokens"] == 30_000
        truth = server.truth("slow")
        after = truth["chunk_after_ns"]
        assert len(after) == 30_000
        assert after == sorted(after)
        assert sum(at < reading_ns for at in after) < 29_000
        last_read = answer.chunk_ns[-1]
        assert after[-1] < last_read
        client.close()


def test_counters_equal_the_truth(tmp_path: Path) -> None:
    flags = ("--frontend-ms", "0", "--step-base-ms", "0.5", "--eos-mean", "12", "--max-num-seqs", "4", "--seed", "3")
    cache = ("--num-gpu-blocks-override", "30", "--max-model-len", "400")
    with running(tmp_path, *flags, *cache) as server:

        def one(number: int) -> Any:
            words = "shared words of a common prompt " * 3 + f"question {number}"
            body = stream(max_tokens=40, messages=[{"role": "user", "content": words}], ignore_eos=number % 2 == 0)
            return server.ask(CHAT, body, {"X-Request-Id": f"r{number}"})

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(one, range(24)))
        truths = [server.truth(f"r{number}") for number in range(24)]
        usages = [answer.events()[-2]["usage"] for answer in answers]
        for truth, usage in zip(truths, usages, strict=True):
            assert truth["prompt_tokens"] == usage["prompt_tokens"]
            assert truth["output_tokens"] == usage["completion_tokens"] == sum(truth["chunk_tokens"])
        reasons = [truth["finish_reasons"][0] for truth in truths]
        assert set(reasons) == {"stop", "length"}
        output = sum(usage["completion_tokens"] for usage in usages)
        prompt = sum(usage["prompt_tokens"] for usage in usages)
        cached = sum(truth["cached_tokens"] for truth in truths)
        assert cached > 0
        expected = {
            "prompt_tokens_total": prompt,
            "generation_tokens_total": output,
            "prompt_tokens_cached_total": cached,
            "prefix_cache_hits_total": cached,
            "prefix_cache_queries_total": prompt,
            "request_success_total": 24,
            "num_preemptions_total": sum(truth["num_preemptions"] for truth in truths),
            "iteration_tokens_total_sum": prompt + output,
            "inter_token_latency_seconds_count": output - 24,
            "time_to_first_token_seconds_count": 24,
            "e2e_request_latency_seconds_count": 24,
            "request_generation_tokens_sum": output,
            "request_prompt_tokens_sum": prompt,
            "num_requests_running": 0,
            "kv_cache_usage_perc": 0,
        }
        assert {name: server.metric(name) for name in expected} == expected
        by_reason = {key: value for key, value in server.metrics().items() if "request_success_total" in key}
        assert by_reason['vllm:request_success_total{engine="0",finished_reason="stop",model_name="sim"}'] == (
            reasons.count("stop")
        )
        seen_ns = sum(truth["chunk_before_ns"][0] - truth["received_mono_ns"] for truth in truths)
        assert server.metric("time_to_first_token_seconds_sum") == pytest.approx(seen_ns / 1e9, abs=24 * 0.02)
        assert server.ask("/reset_prefix_cache", b"").status == 200


def test_no_token_leaves_before_the_offline_simulation_says(tmp_path: Path) -> None:
    with running(tmp_path, "--frontend-ms", "10") as server:
        server.ask(CHAT, stream(max_tokens=8), {"X-Request-Id": "engine"})
        truth = server.truth("engine")
    engine = Engine(EngineConfig())
    now_ns = truth["received_mono_ns"] + 10 * MS
    engine.add(EngineRequest("engine", truth["prompt_tokens"], 8), now_ns)
    for sent in truth["chunk_before_ns"]:
        now_ns += engine.step(now_ns).duration_ns
        assert sent >= now_ns
    assert len(truth["chunk_before_ns"]) == 8
    assert not engine.has_work


def test_stream_interval_reasoning_and_details(tmp_path: Path) -> None:
    flags = ("--stream-interval", "4", "--reasoning-share", "0.5", "--enable-prompt-tokens-details")
    with running(tmp_path, *FAST, *flags) as server:
        answer = server.ask(CHAT, stream(max_tokens=20), {"X-Request-Id": "many"})
        deltas = [choice["delta"] for event in answer.events()[:-1] for choice in event["choices"]][1:]
        assert [next(iter(delta)) for delta in deltas] == ["reasoning"] * 4 + ["content"] * 3
        truth = server.truth("many")
        # the first token alone, then every four, and what is left where the kind changes and at the end
        assert truth["chunk_tokens"] == [1, 4, 4, 1, 4, 4, 2]
        assert truth["chunk_kind"] == ["reasoning"] * 4 + ["content"] * 3
        assert truth["reasoning_tokens"] == 10
        usage = answer.events()[-2]["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 10}
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_keys_guard_v1_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with running(tmp_path, *FAST) as server:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            refused = server.ask(CHAT, chat(), headers)
            assert (refused.status, refused.body) == (401, b'{"error":"Unauthorized"}')
            assert [name for name, _ in refused.headers] == ["date", "server", "content-length", "content-type"]
        assert [(truth["http_status"], truth["outcome"]) for truth in server.truths()] == [(401, "http_error")] * 2
        assert server.ask("/v1/models").status == 401
        assert [server.ask(path).status for path in ("/health", "/metrics")] == [200, 200]
        assert server.ask(CHAT, chat(), {"authorization": "Bearer secret"}).status == 200
        cmdline = Path(f"/proc/{server.process.pid}/cmdline").read_text()
        assert "secret" not in cmdline + server.truth_path.read_text()


def test_a_full_queue_rejects_inside_the_stream_and_keeps_others_alive(tmp_path: Path) -> None:
    flags = ("--max-num-seqs", "1", "--max-num-queued-reqs", "2", "--frontend-ms", "0", "--step-base-ms", "20")
    with running(tmp_path, *flags, "--reject-status-share", "0", "--sse-keep-alive-interval", "0.03") as server:
        first, second = server.connect(), server.connect()
        first.socket.sendall(request_bytes(CHAT, stream(max_tokens=10)))
        second.socket.sendall(request_bytes(CHAT, stream(max_tokens=1)))
        deadline = time.monotonic() + 5
        while server.metric("num_requests_waiting") != 1 and time.monotonic() < deadline:
            time.sleep(0.005)
        rejected = server.ask(CHAT, stream(), {"X-Request-Id": "busy"})
        assert (rejected.status, len(rejected.chunks), rejected.events()[1]) == (200, 2, "[DONE]")
        message = BUSY.message
        kind = '"type": "Service Unavailable", "param": null, "code": 503'
        assert rejected.chunks[0].decode() == f'data: {{"error": {{"message": "{message}", {kind}}}}}\n\n'
        whole = server.ask(CHAT, chat())
        assert (whole.status, whole.body.decode()) == (503, BUSY_BODY)
        assert server.truth("busy")["outcome"] == "error_event"
        waited = second.read()
        assert waited.chunks[0] == waited.chunks[1] == b": keep-alive\n\n"
        assert first.read().events()[-1] == "[DONE]"
        assert server.metric("admission_rejections_total") == 2
        first.close()
        second.close()


def test_sigterm_ends_streams_with_abort_and_loses_no_truth(tmp_path: Path) -> None:
    with running(tmp_path, "--first-token-ms", "1", "--token-interval-ms", "5") as server:
        clients = [server.connect() for _ in range(5)]
        for number, client in enumerate(clients):
            body = stream(max_tokens=5_000) if number else chat(max_tokens=5_000)
            client.socket.sendall(request_bytes(CHAT, body, {"X-Request-Id": f"s{number}"}))
        time.sleep(0.1)
        server.process.send_signal(signal.SIGTERM)
        whole, *streams = [client.read() for client in clients]
        assert whole.json()["choices"][0]["finish_reason"] == "abort"
        for answer in streams:
            assert answer.ended == "complete"
            finish, usage, done = answer.events()[-3:]
            assert finish["choices"][0]["finish_reason"] == "abort"
            token_chunks = [chunk for chunk in answer.chunks if b'"finish_reason":null,"token_ids"' in chunk]
            assert usage["usage"]["completion_tokens"] == len(token_chunks) > 5
            assert done == "[DONE]"
        assert server.process.wait(5) == 0
        truths = server.truths()
        assert sorted(truth["request_id"] for truth in truths) == ["s0", "s1", "s2", "s3", "s4"]
        assert {truth["outcome"] for truth in truths} == {"error_event"}
        for client in clients:
            client.close()


def test_unix_socket_and_tls(tmp_path: Path) -> None:
    path, made = tmp_path / "s.sock", make_certificate(tmp_path)
    flags = ("--uds", str(path), "--ssl-certfile", str(made.cert), "--ssl-keyfile", str(made.key))
    with running(tmp_path, *FAST, *flags) as server:
        assert server.ready == f"READY https://127.0.0.1:{server.port}/v1 model=sim\n"
        local = socket.socket(socket.AF_UNIX)
        local.connect(str(path))
        client = Client(local)
        assert client.ask(CHAT, stream()).events()[-1] == "[DONE]"
        client.close()
        context = ssl.create_default_context(cafile=str(made.ca))
        raw = socket.create_connection(("127.0.0.1", server.port))
        client = Client(context.wrap_socket(raw, server_hostname="localhost"))
        assert client.ask(CHAT, stream(), {"X-Request-Id": "tls"}).events()[-1] == "[DONE]"
        assert server.truth("tls")["output_tokens"] == 5
        client.close()
    assert not os.path.exists(path)


def test_every_problem_of_the_flags_is_named_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        parse_settings(["--first-token-ms", "5", "--empty-text-share", "2", "--fault", "nope:share=1", "--port", "-1"])
    assert len(caught.value.problems) == 4
    with pytest.raises(UsageError, match="max_model_len"):
        parse_settings(["--num-gpu-blocks-override", "10"])
