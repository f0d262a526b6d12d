"""The checks of ``vllm-locust doctor`` that ask others: Redis, the server, the master."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Final

from vllm_locust.checkup.check import Check, failed, ok, skipped, warning
from vllm_locust.checkup.redis import judge_link, judge_rights, judge_server
from vllm_locust.config import RunConfig, Target
from vllm_locust.errors import StoreError, TargetError, UsageError
from vllm_locust.load.preflight import ServerFacts, ask_health, ask_server
from vllm_locust.run.telemetry.server_metrics import page_fault, page_of_target
from vllm_locust.store.embedded import start_embedded
from vllm_locust.store.redis_probe import RedisProbe, RedisRole, round_trip
from vllm_locust.store.redis_url import RedisOptions

_TIMEOUT_S: Final = 3.0


def check_redis(options: RedisOptions, role: RedisRole) -> Iterator[Check]:
    probe = RedisProbe(options)
    try:
        yield judge_server(probe.facts())
        yield from judge_link(probe.link())
        rights = judge_rights(role.value, *probe.refused(role))
        yield rights
        if role is RedisRole.MASTER and rights.fix is None:
            round_trip(options)
            yield ok("Redis round trip", "a batch went there and came back")
    except (StoreError, UsageError) as error:
        fix = "start it, open its port to this host, or correct --redis-url and --redis-password-file"
        yield failed("Redis", str(error), fix if isinstance(error, StoreError) else "use another server")
    finally:
        probe.close()


def check_without_redis(*, embedded_will_do: bool) -> Check:
    if not embedded_will_do:
        return skipped("Redis", "no address is given", "give --redis-url as the master does")
    try:
        start_embedded().stop()
    except (StoreError, UsageError) as error:
        return failed("Redis", f"no --redis-url, and no embedded Valkey: {error}", "give --redis-url")
    return ok("Redis", "the embedded Valkey starts; workers on other hosts need --redis-url")


def check_server(config: RunConfig | None, api_key: str | None) -> Iterator[Check]:
    if config is None:
        yield skipped("server", "no address is given", "give --host http://HOST:PORT")
        return
    try:
        facts = ask_server(config, api_key)
    except TargetError as error:
        found, _, fix = str(error).rpartition("; ")
        yield failed("server", found or fix, fix)
        return
    (target,) = config.targets
    yield _server(config, target, facts, api_key)
    yield _health(config, target, api_key)
    page = page_of_target(target)
    fault = page_fault(page, config, api_key)
    if fault is None:
        yield ok("server metrics", f"{page.url} tells of the server")
    else:
        yield warning("server metrics", f"{page.url}: {fault}", "give --metrics-url, or do without its own metrics")


def _server(config: RunConfig, target: Target, facts: ServerFacts, api_key: str | None) -> Check:
    kind = f"vLLM {facts.version or 'of unknown version'}" if facts.is_vllm else "not a vLLM"
    key = "it accepts the API key" if api_key else "it asks for no API key"
    length = "of unknown length" if facts.max_model_len is None else f"with {facts.max_model_len} tokens"
    found = f"{target.url} serves {facts.model} {length}; {kind}; {key}"
    figures = {
        "model": facts.model,
        "max_model_len": facts.max_model_len,
        "is_vllm": facts.is_vllm,
        "version": facts.version,
    }
    if config.tls.insecure and target.scheme == "https":
        fix = "give its CA with --ca-file in place of --insecure: anybody could answer in its name"
        return warning("server", f"{found}; its certificate was not checked", fix, **figures)
    return ok("server", found, **figures)


def _health(config: RunConfig, target: Target, api_key: str | None) -> Check:
    try:
        status = ask_health(config, target, api_key)
    except TargetError as error:
        return failed("server health", str(error), "see the server's log")
    found = f"GET /health answered {status}"
    if status == 404:
        return warning("server health", found, "nothing, where this server has no such page", status=status)
    if status != 200:
        return failed("server health", found, "see the server's log", status=status)
    return ok("server health", found, status=status)


def check_own_port(port: int) -> Check:
    """Whether the master may listen there. It would on every address of the host."""
    try:
        with socket.create_server(("", port)):
            pass
    except OSError as error:
        found = f"port {port} cannot be opened: {error.strerror or error}"
        return failed("master port", found, "end what listens there, or use another --master-bind-port")
    found = f"port {port} is free; without a login, so that only the workers' hosts should reach it"
    return ok("master port", found, port=port)


def check_master(host: str | None, port: int) -> Check:
    if host is None:
        return skipped("master", "no address is given", "give --master-host, with the master started")
    place = f"{host}:{port}"
    fix = "start the master first; open the port to this host; or correct --master-host and --master-port"
    try:
        with socket.create_connection((host, port), _TIMEOUT_S) as connection:
            greeting = _greeting(connection)
    except OSError as error:
        return failed("master", f"{place} cannot be reached: {error.strerror or error}", fix, port=port)
    if greeting[:1] != b"\xff" or greeting[9:10] != b"\x7f":
        return failed("master", f"what listens on {place} is no Locust master", fix, port=port)
    return ok("master", f"{place} answers as a Locust master does", port=port)


def _greeting(connection: socket.socket) -> bytes:
    """The first bytes of ZMTP: a signature of ten, of which the first and the last are fixed."""
    connection.settimeout(_TIMEOUT_S)
    greeting = b""
    while len(greeting) < 10:
        try:
            data = connection.recv(10 - len(greeting))
        except TimeoutError:
            break
        if not data:
            break
        greeting += data
    return greeting
