"""Connections of every transport: kept alive, never used twice in silence, over every kind of address."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Certificate, make_certificate
from tests.load.driving import Facts, call, drive
from tests.load.scripted_server import End, Request, ScriptedServer, Step, chunked, head, serving, whole
from tests.load.stream_cases import ABC, BUSY

TRANSPORTS = ["kernel", "sse", "openai"]
SCRIPTS: dict[str, tuple[Step, ...]] = {
    "good": chunked(*ABC),
    "slow": (*chunked(*ABC)[:-1], 0.3, chunked(*ABC)[-1]),
    "closing": (head(connection=b"close"), *ABC, End.CLOSE),
    "refused": (whole(b'{"error":"slow"}', b"429 Too Many Requests"),),
    "error_event": chunked(BUSY),
    "hangs_up_later": (*chunked(*ABC), 0.05, End.CLOSE),
    "hangs_up": (End.CLOSE,),
}


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving(SCRIPTS) as server:
        yield server


def url(server: ScriptedServer, host: str = "127.0.0.1", scheme: str = "http") -> str:
    return f"{scheme}://{host}:{server.listener.getsockname()[1]}"


def outcomes(facts: dict[str, Facts]) -> dict[str, str]:
    return {name: entry["outcome"] for name, entry in facts.items()}


def test_a_connection_is_kept_after_every_whole_answer(transport: str, server: ScriptedServer) -> None:
    names = ["good/1", "good/2", "refused/3", "good/4", "error_event/5", "good/6", "closing/7", "good/8"]
    facts = drive(transport, [[call(name, url(server)) for name in names]])
    assert list(outcomes(facts).values()) == ["ok", "ok", "http_error", "ok", "error_event", "ok", "ok", "ok"]
    assert [entry["connected"] for entry in facts.values()] == [True, *[False] * 6, True]
    assert [entry.connection for entry in server.requests] == [1] * 7 + [2]


def test_a_connection_that_the_server_has_closed_is_not_used_again(transport: str, server: ScriptedServer) -> None:
    calls = [call("hangs_up_later/1", url(server)), call("good/2", url(server), after_s=0.4)]
    facts = drive(transport, [calls])
    assert set(outcomes(facts).values()) == {"ok"}
    assert [entry.name for entry in server.requests] == ["hangs_up_later/1", "good/2"]


def test_a_request_is_never_sent_twice_in_silence(transport: str, server: ScriptedServer) -> None:
    facts = drive(transport, [[call(name, url(server)) for name in ["good/1", "hangs_up/2", "good/3"]]])
    assert list(outcomes(facts).values()) == ["ok", "disconnected", "ok"]
    assert [entry.name for entry in server.requests] == ["good/1", "hangs_up/2", "good/3"]


def test_there_are_as_many_connections_as_busy_users(transport: str, server: ScriptedServer) -> None:
    users = [[call(f"slow/{user}", url(server))] for user in range(130)]
    facts = drive(transport, users)
    assert set(outcomes(facts).values()) == {"ok"}
    assert len({entry.connection for entry in server.requests}) == 130


def test_what_goes_over_the_wire(transport: str, server: ScriptedServer) -> None:
    text = "é" * 500_000
    headers = [["Authorization", "Bearer sk-1"]]
    drive(
        transport,
        [[call("good/1", url(server) + "/prefix", headers=headers, content=text), call("good/2", url(server))]],
    )
    first, second = server.requests
    assert first.head.startswith(b"POST /prefix/v1/chat/completions HTTP/1.1\r\n")
    assert second.head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert json.loads(first.body) == {
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        "ignore_eos": True,
    }
    fields = _fields(first)
    assert fields["host"] == url(server).removeprefix("http://")
    assert fields["authorization"] == "Bearer sk-1"
    assert fields["accept-encoding"] == "identity"
    assert fields["content-type"] == "application/json"
    assert fields["x-request-id"] == "good/1"
    assert "authorization" not in _fields(second)


def _fields(request: Request) -> dict[str, str]:
    lines = request.head.decode().split("\r\n")[1:]
    names = [line.partition(":")[0].lower() for line in lines]
    assert len(set(names)) == len(names)
    return {name: line.partition(":")[2].strip() for name, line in zip(names, lines, strict=True)}


# Addresses


def test_localhost_on_either_family_and_unix_sockets(transport: str, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    families = {family for family, *_ in socket.getaddrinfo("localhost", 80)}
    localhost_is_six = socket.AF_INET6 in families
    with (
        serving(SCRIPTS) as four,
        serving(SCRIPTS, family=socket.AF_INET6, address=("::1", 0)) as six,
        serving(SCRIPTS, family=socket.AF_UNIX, address=path) as unix,
    ):
        addresses = {
            "good/4": url(four, "localhost"),
            **({"good/6": url(six, "localhost")} if localhost_is_six else {}),
            "good/ip6": url(six, "[::1]"),
            "good/unix": f"unix://{path}",
        }
        facts = drive(transport, [[call(name, address) for name, address in addresses.items()]])
        assert outcomes(facts) == dict.fromkeys(addresses, "ok")
        assert len(unix.requests) == 1


def test_a_port_that_nobody_listens_on(transport: str, tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        facts = drive(
            transport,
            [
                [
                    call("a", f"http://127.0.0.1:{port}"),
                    call("b", f"unix://{tmp_path}/none"),
                    call("c", "http://no.invalid:1"),
                ]
            ],
        )
    assert set(outcomes(facts).values()) == {"connect_error"}
    assert facts["a"]["error"] == f"http://127.0.0.1:{port}: Connection refused"
    assert facts["b"]["error"] == f"unix://{tmp_path}/none: No such file or directory"
    assert facts["c"]["error"].startswith("http://no.invalid:1: ")
    assert all(entry["sent_ns"] is None for entry in facts.values())


def test_a_server_that_does_not_take_connections(transport: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        facts = drive(transport, [[call("a", f"http://127.0.0.1:{address[1]}", timeouts={"connect_ns": 300_000_000})]])
        for filler in fillers:
            filler.close()
    assert facts["a"]["outcome"] == "timeout_connect"
    assert "--timeout-connect" in facts["a"]["error"]
    assert facts["a"]["sent_ns"] is None


def test_our_own_limit_is_a_client_error(transport: str, server: ScriptedServer) -> None:
    users = [[call(f"slow/{user}", url(server))] for user in range(60)]
    facts = drive(transport, users, open_files=48)
    assert set(outcomes(facts).values()) == {"ok", "client_error"}
    failed = [entry for entry in facts.values() if entry["outcome"] == "client_error"]
    assert all(entry["error"].endswith("Too many open files") for entry in failed)


# Proxies


def test_proxy_variables_are_ignored(transport: str, server: ScriptedServer) -> None:
    nowhere = "http://127.0.0.1:9"
    variables = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY")
    environment = dict.fromkeys(variables, nowhere)
    facts = drive(transport, [[call("good/1", url(server, "localhost"))]], environment=environment)
    assert facts["good/1"]["outcome"] == "ok"


def test_a_proxy_that_is_asked_for_gets_the_whole_address(transport: str, server: ScriptedServer) -> None:
    proxy = url(server).replace("//", "//user:pa%20ss@")
    facts = drive(transport, [[call("good/1", "http://models.invalid:8000")]], proxy=proxy)
    assert facts["good/1"]["outcome"] == "ok"
    assert server.requests[0].head.startswith(b"POST http://models.invalid:8000/v1/chat/completions HTTP/1.1\r\n")
    fields = _fields(server.requests[0])
    assert fields["host"] == "models.invalid:8000"
    assert fields["proxy-authorization"] == "Basic dXNlcjpwYSBzcw=="


# TLS


@pytest.fixture(scope="module")
def server_certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def client_certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"), "client")


@pytest.fixture
def tls_server(server_certificate: Certificate, client_certificate: Certificate) -> Iterator[ScriptedServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server_certificate.cert, server_certificate.key)
    context.load_verify_locations(client_certificate.ca)
    context.verify_mode = ssl.CERT_OPTIONAL
    with serving(SCRIPTS, tls=context) as server:
        yield server


def test_tls(
    transport: str, tls_server: ScriptedServer, server_certificate: Certificate, client_certificate: Certificate
) -> None:
    address = url(tls_server, "localhost", "https")
    own: dict[str, Any] = {"ca_file": str(server_certificate.ca)}
    with_client = {**own, "cert_file": str(client_certificate.cert), "key_file": str(client_certificate.key)}
    for name, tls in [("ca", own), ("client", with_client), ("insecure", {"insecure": True})]:
        names = [f"good/{name}1", f"slow/{name}2", f"error_event/{name}3"]
        facts = drive(transport, [[call(each, address) for each in names]], tls=tls)
        assert list(outcomes(facts).values()) == ["ok", "ok", "error_event"]
        assert [entry["connected"] for entry in facts.values()] == [True, False, False]
        assert facts[names[0]]["text"] == "abc"
        assert len(facts[names[0]]["chunk_ns"]) == 3


def test_a_certificate_that_nobody_vouches_for(transport: str, tls_server: ScriptedServer) -> None:
    facts = drive(transport, [[call("a", url(tls_server, "localhost", "https"))]])
    assert facts["a"]["outcome"] == "connect_error"
    assert "certificate" in facts["a"]["error"]
    assert tls_server.requests == []
