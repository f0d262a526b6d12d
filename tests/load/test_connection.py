from __future__ import annotations

import socket
import ssl

import pytest

from vllm_locust.config import Target
from vllm_locust.load.connection import Connection, ConnectionPool, _tunnel


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_a_name_that_no_host_can_have_is_a_failed_connection(host: str) -> None:
    pool = ConnectionPool(ssl.create_default_context(), None)
    with pytest.raises(OSError, match="no host can have this name"):
        pool.open(Target(scheme="http", host=host, port=1), 1_000_000_000)


@pytest.mark.parametrize(("host", "place"), [("::1", b"[::1]:8443"), ("h", b"h:8443")])
def test_a_tunnel_names_an_ipv6_address_in_brackets(host: str, place: bytes) -> None:
    ours, proxy = socket.socketpair()
    with ours, proxy:
        proxy.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        _tunnel(ours, Target(scheme="https", host=host, port=8443), ())
        assert proxy.recv(1000) == b"CONNECT %b HTTP/1.1\r\nHost: %b\r\n\r\n" % (place, place)


@pytest.mark.parametrize(
    ("header", "limit_s"),
    [
        (None, 4),
        ("timeout=3", 2),
        ("timeout=3, max=100", 2),
        ("timeout=0", 0),
        ("timeout=600", 4),
        ("timeout=soon", 4),
        ("timeout=" + "9" * 5000, 4),
    ],
)
def test_keep_alive_can_only_shorten_the_time_to_reuse(header: str | None, limit_s: int) -> None:
    with socket.socket() as sock:
        connection = Connection(sock, None, stamps=False, proxy_headers=None)
        connection.note_keep_alive(header)
        assert connection.idle_limit_ns == limit_s * 1_000_000_000
