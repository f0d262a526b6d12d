"""Proxy variables come from outside: each either names a proxy or is refused in words that hold no password."""

from __future__ import annotations

import pytest

from vllm_locust.config import RunConfig, Target
from vllm_locust.errors import UsageError
from vllm_locust.load.preflight import ask_server
from vllm_locust.load.proxy import proxy_for

HTTP = Target.parse("http://server:8000")
HTTPS = Target.parse("https://server")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("http://proxy:3128", "proxy", 3128),
        ("http://proxy", "proxy", None),
        ("proxy:3128", "proxy", 3128),
        ("http://me:secret@[::1]:3128/", "::1", 3128),
    ],
)
def test_a_variable_names_a_proxy(monkeypatch: pytest.MonkeyPatch, address: str, host: str, port: int | None) -> None:
    monkeypatch.setenv("http_proxy", address)
    proxy = proxy_for("env", HTTP)
    assert proxy is not None
    assert (proxy.hostname, proxy.port) == (host, port)
    assert proxy_for("env", HTTPS) is None
    assert proxy_for(None, HTTP) is None


@pytest.mark.parametrize(
    "address",
    [
        "http://me:secret@proxy:port",
        "http://me:secret@proxy:99999",
        "http://me:secret@proxy:0",
        "http://me:secret@[::1:3128",
        "http://me:secret@:3128",
        "socks5://me:secret@proxy:1080",
        "https://me:secret@proxy:3128",
        "http://me:secret\udcff@proxy",
    ],
)
@pytest.mark.parametrize(("name", "target"), [("http_proxy", HTTP), ("https_proxy", HTTPS), ("HTTPS_PROXY", HTTPS)])
def test_a_variable_that_names_none_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, address: str, name: str, target: Target
) -> None:
    monkeypatch.setenv(name, address)
    with pytest.raises(UsageError) as raised:
        ask_server(RunConfig(targets=(target,), proxy="env"), None)
    assert raised.value.exit_code == 2
    (problem,) = raised.value.problems
    assert problem.startswith(f"--proxy env: the variable {name} does not hold the address of an HTTP proxy; write ")
    assert "secret" not in problem


def test_no_proxy_takes_a_host_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:port")
    monkeypatch.setenv("no_proxy", "server")
    assert proxy_for("env", HTTP) is None
