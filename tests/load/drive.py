"""Runs calls in a gevent-patched process of its own, so that the tests' process stays unpatched.

``python -m tests.load.drive`` reads one plan (JSON) per line, and answers each with one line (JSON) per exchange and a
line ``end``.
"""

from gevent import monkey

monkey.patch_all()

import json  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from typing import Any  # noqa: E402

import gevent  # noqa: E402
from gevent.event import Event  # noqa: E402

from vllm_locust import clock  # noqa: E402
from vllm_locust.config import Target, Timeouts  # noqa: E402
from vllm_locust.load.kernel import KernelTransport  # noqa: E402
from vllm_locust.load.openai_transport import OpenAITransport  # noqa: E402
from vllm_locust.load.retry import Retries  # noqa: E402
from vllm_locust.load.sse_transport import SseTransport  # noqa: E402
from vllm_locust.load.transport import Call, CutShort, Exchange, Transport  # noqa: E402
from vllm_locust.outcome import Outcome  # noqa: E402
from vllm_locust.tls import TlsFiles, tls_context  # noqa: E402

TRANSPORTS: dict[str, Any] = {"kernel": KernelTransport, "sse": SseTransport, "openai": OpenAITransport}


def _call(spec: dict[str, Any]) -> Call:
    limits = {
        "connect_ns": 5_000_000_000,
        "first_token_ns": 20_000_000_000,
        "idle_ns": 20_000_000_000,
        "total_ns": None,
    }
    return Call(
        target=Target.parse(spec["url"]),
        path="/v1/chat/completions",
        payload={
            "model": "m",
            "messages": [{"role": "user", "content": spec.get("content", "Hello")}],
            "stream": spec["streamed"],
            "ignore_eos": True,
        },
        headers=(("X-Request-Id", spec["name"]), *map(tuple, spec.get("headers", []))),
        streamed=spec["streamed"],
        timeouts=Timeouts(**{**limits, **spec.get("timeouts", {})}),
        patience_ns=spec.get("patience_ns"),
        patience_from_ns=spec.get("patience_from_ns"),
    )


def _facts(spec: dict[str, Any], exchange: Exchange) -> dict[str, Any]:
    completion = exchange.completion
    return {
        "name": spec["name"],
        "outcome": exchange.outcome,
        "error": exchange.error,
        "http_status": exchange.http_status,
        "retry_after": exchange.retry_after,
        "attempts": exchange.attempts,
        "retry_wait_ns": exchange.retry_wait_ns,
        "text": completion.text,
        "reasoning": completion.reasoning,
        "finish_reason": completion.finish_reason,
        "chunk_tokens": completion.chunk_tokens,
        "output_tokens": completion.output_tokens,
        "prompt_tokens": completion.prompt_tokens,
        "token_source": completion.token_source,
        "response_id": completion.response_id,
        "done": completion.done_ns is not None,
        "connected": exchange.connect_ns is not None,
        "sent_ns": exchange.sent_ns,
        "headers_ns": exchange.headers_ns,
        "chunk_ns": completion.chunk_ns,
        "chunk_width_ns": completion.chunk_width_ns,
        "done_ns": completion.done_ns,
    }


def _perform(transport: Transport, spec: dict[str, Any]) -> dict[str, Any]:
    gevent.sleep(spec.get("after_s", 0))
    caller = gevent.getcurrent()
    cut = CutShort(Outcome.ABANDONED, "its user was stopped")
    ending = [
        gevent.spawn_later(spec[key], lambda error=error: gevent.get_hub().loop.run_callback(caller.throw, error))
        for key, error in (("stopped_after_s", cut), ("killed_after_s", gevent.GreenletExit()))
        if key in spec
    ]
    draining = Event()
    if "drained_after_s" in spec:
        ending.append(gevent.spawn_later(spec["drained_after_s"], draining.set))
    retries = Retries(transport.perform, limit=spec.get("retries", 0), seed="0", draining=draining)
    try:
        exchange = retries.perform(_call(spec))
        return {**_facts(spec, exchange), "ended_ns": clock.monotonic_ns()}
    finally:
        gevent.killall(ending)


def _carry_out(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    transport: Transport = TRANSPORTS[plan["transport"]](tls_context(TlsFiles(**plan["tls"])), plan["proxy"])

    def run(sequence: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [_perform(transport, spec) for spec in sequence]

    for sequences in plan["rounds"]:
        greenlets = [gevent.spawn(run, sequence) for sequence in sequences]
        for greenlet in greenlets:
            yield from greenlet.get()
    transport.close()


def main() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for line in sys.stdin:
        plan = json.loads(line)
        os.environ.update(plan["environment"])
        resource.setrlimit(resource.RLIMIT_NOFILE, (plan["open_files"] or soft, hard))
        for facts in _carry_out(plan):
            print(json.dumps(facts))
        for name in plan["environment"]:
            del os.environ[name]
        print("end", flush=True)


if __name__ == "__main__":
    main()
