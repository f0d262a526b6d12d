"""Asks the server what it is before any load is sent. Only GET requests, and never a POST, except for the one that
``--reset-prefix-cache`` asks for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import gevent
import httptools

from vllm_locust.config import RunConfig, Target
from vllm_locust.errors import TargetError
from vllm_locust.load.connection import Connection, ConnectionPool, receive
from vllm_locust.protocol import error_text, without_key
from vllm_locust.tls import tls_context

BODY_LIMIT = 4 * 1024 * 1024
MODEL_LENGTH_LIMIT = 1 << 40
_KEY_LENGTH = 8
"""A shorter one is a stand-in, such as EMPTY, that a model's name may hold by chance."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What ``/v1/models`` and ``/version`` said. None where the server did not say."""

    model: str
    max_model_len: int | None
    is_vllm: bool
    version: str | None

    @property
    def tells_usage_per_chunk(self) -> bool:
        """vLLM gives usage on every chunk when asked; what others do with the wish is not known."""
        return self.is_vllm


class _Get:
    """Collects one answer for httptools."""

    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


def ask_server(config: RunConfig, api_key: str | None) -> ServerFacts:
    """Check every target. Raises TargetError that names the target, what it answered and what to change."""
    with _asking(config, api_key) as pool:
        facts: list[ServerFacts] = []
        for target in config.targets:
            # Requests to every target name one model: without --model the first one of the first target.
            model = facts[0].model if facts and config.model is None else config.model
            facts.append(_ask_target(pool, config, target, api_key, model))
    known = [fact.max_model_len for fact in facts if fact.max_model_len is not None]
    return ServerFacts(
        model=facts[0].model,
        max_model_len=min(known, default=None),
        is_vllm=all(fact.is_vllm for fact in facts),
        version=facts[0].version,
    )


def ask_health(config: RunConfig, target: Target, api_key: str | None) -> int:
    """The status with which a target answers GET /health. Raises TargetError where it does not answer."""
    with _asking(config, api_key) as pool:
        return _get(pool, config, target, "/health", api_key)[0]


def reset_prefix_cache(config: RunConfig, api_key: str | None) -> None:
    """Have every target forget its prefix cache. Raises TargetError where one refuses."""
    with _asking(config, api_key) as pool:
        for target in config.targets:
            status, body = _ask(pool, config, target, "POST", "/reset_prefix_cache", api_key)
            if status != 200:
                why = f" ({text})" if (text := error_text(body)) else ""
                raise TargetError(
                    f"--reset-prefix-cache: POST {target.url}/reset_prefix_cache answered {status}{why}; vLLM has it "
                    "when it is started with VLLM_SERVER_DEV_MODE=1 in its environment; drop the flag otherwise"
                )


@contextmanager
def _asking(config: RunConfig, api_key: str | None) -> Iterator[ConnectionPool]:
    """What a server says in its errors may hold the key that it was sent."""
    pool = _pool(config)
    try:
        yield pool
    except TargetError as error:
        raise TargetError(*(without_key(problem, api_key) for problem in error.problems)) from None
    finally:
        pool.close()


def _pool(config: RunConfig) -> ConnectionPool:
    try:
        return ConnectionPool(tls_context(config.tls), config.proxy)
    except OSError as error:
        raise TargetError(
            f"--ca-file, --cert-file, --key-file: {error}; give readable PEM files that belong together"
        ) from None


def _ask_target(
    pool: ConnectionPool, config: RunConfig, target: Target, api_key: str | None, model: str | None
) -> ServerFacts:
    status, body = _get(pool, config, target, "/v1/models", api_key)
    place = f"GET {target.url}/v1/models"
    if status in (401, 403):
        fix = "the server refuses this API key" if api_key else "the server wants an API key"
        raise TargetError(f"{place} answered {status}: {fix}; set OPENAI_API_KEY or --api-key-file")
    if status != 200:
        raise TargetError(
            f"{place} answered {status} ({error_text(body) or 'empty body'}); --host must be the base address of a "
            "server with the OpenAI API, with or without /v1 at its end"
        )
    try:
        listed = json.loads(body)["data"]
        models = [model for model in listed if _is_name(model["id"], api_key)]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise TargetError(f"{place} did not answer with a list of models; is {target.url} the OpenAI API?") from None
    if not models and listed:
        raise TargetError(
            f"{place} lists no model whose name can be used: one of 1 to 512 printable characters; name the model "
            "anew (vLLM: --served-model-name)"
        )
    if not models:
        raise TargetError(f"{place} lists no model; load one")
    chosen = _chosen(models, model, place, asked=config.model is not None)
    is_vllm = chosen.get("owned_by") == "vllm"
    return ServerFacts(
        model=chosen["id"],
        max_model_len=_length(chosen.get("max_model_len")),
        is_vllm=is_vllm,
        version=_version(pool, config, target, api_key) if is_vllm else None,
    )


def _is_name(value: object, api_key: str | None) -> bool:
    """Something that may be shown in a terminal, stored, and sent back in a request."""
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= 512:
        return False
    return api_key is None or len(api_key) < _KEY_LENGTH or api_key not in value


def _length(value: object) -> int | None:
    """A context length that is one; JSON's numbers know no bound, and true is an int to Python."""
    return value if type(value) is int and 0 < value < MODEL_LENGTH_LIMIT else None


def _chosen(models: list[dict[str, Any]], name: str | None, place: str, *, asked: bool) -> dict[str, Any]:
    if name is None:
        return models[0]
    for model in models:
        if model["id"] == name:
            return model
    served = ", ".join(model["id"] for model in models[:10])
    if asked:
        raise TargetError(f"--model: {name!r} is not served; {place} lists {served}")
    raise TargetError(
        f"--target: {place} lists {served}, and not {name!r}, the model of the first target; "
        "name with --model one that every target serves"
    )


def _version(pool: ConnectionPool, config: RunConfig, target: Target, api_key: str | None) -> str | None:
    status, body = _get(pool, config, target, "/version", api_key)
    try:
        answer: Mapping[str, Any] = json.loads(body) if status == 200 else {}
        version = answer.get("version")
    except (ValueError, AttributeError, RecursionError):
        return None
    return without_key(version, api_key) if isinstance(version, str) else None


def _get(pool: ConnectionPool, config: RunConfig, target: Target, path: str, api_key: str | None) -> tuple[int, bytes]:
    return _ask(pool, config, target, "GET", path, api_key)


def _ask(
    pool: ConnectionPool, config: RunConfig, target: Target, method: str, path: str, api_key: str | None
) -> tuple[int, bytes]:
    try:
        connection = pool.open(target, config.timeouts.connect_ns)
    except OSError as error:
        raise TargetError(
            f"{target.url} cannot be reached: {error.strerror or error}; is the server up, and is --host right?"
        ) from None
    limit_ns = config.timeouts.connect_ns
    try:
        with gevent.Timeout(None if limit_ns is None else limit_ns / 1e9, TimeoutError("no answer in time")):
            return _exchange(connection, target, method, path, api_key)
    except (OSError, httptools.HttpParserError) as error:
        raise TargetError(f"{method} {target.url}{path} failed: {error}; is this an HTTP server?") from None
    finally:
        connection.close()


def _exchange(connection: Connection, target: Target, method: str, path: str, api_key: str | None) -> tuple[int, bytes]:
    place = f"{target.prefix}{path}"
    if connection.proxy_headers is not None:
        place = f"http://{target.authority}{place}"
    lines = [f"{method} {place} HTTP/1.1", f"Host: {target.authority}", "Accept: application/json"]
    lines += ["Connection: close", *(["Content-Length: 0"] if method == "POST" else [])]
    lines += [f"{name}: {value}" for name, value in connection.proxy_headers or ()]
    if api_key:
        lines.append(f"Authorization: Bearer {api_key}")
    connection.send(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
    answer = _Get()
    parser = httptools.HttpResponseParser(answer)
    while not answer.complete and len(answer.body) < BODY_LIMIT:
        data = receive(connection.sock)
        if not data:
            if not answer.headers:
                raise ConnectionResetError("the server closed the connection without an answer")
            break
        try:
            parser.feed_data(data if connection.tls is None else connection.tls.decrypt(data))
        except httptools.HttpParserUpgrade:
            break
    return parser.get_status_code(), bytes(answer.body)
