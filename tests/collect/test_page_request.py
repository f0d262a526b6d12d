"""One page over a real socket: all that a server, or what answers in its place, can do wrong."""

from __future__ import annotations

import gzip
import socket
import ssl
import time
import zlib
from pathlib import Path

import pytest

from tests.certificates import make_certificate
from tests.load.scripted_server import LAST_CHUNK, End, Step, chunk, head, serving, whole
from vllm_locust.collect.page_request import Page, PageFailed, request_page
from vllm_locust.metrics_page import MetricsPage
from vllm_locust.tls import TlsFiles, tls_context

TEXT = b"vllm:num_requests_running 3.0\n"
PLAIN = b"text/plain; version=0.0.4"
TLS = tls_context(TlsFiles())


def page_of(listener: socket.socket, scheme: str = "http") -> MetricsPage:
    return MetricsPage.parse(f"{scheme}://localhost:{listener.getsockname()[1]}/metrics")


def ask(*script: Step, timeout_s: float = 5.0, max_bytes: int = 1 << 20) -> Page:
    with serving({"GET": script}) as server:
        return request_page(page_of(server.listener), tls=TLS, timeout_s=timeout_s, max_bytes=max_bytes)


@pytest.mark.parametrize(
    "script",
    [
        (whole(TEXT, content_type=PLAIN),),
        (head(content_type=PLAIN), TEXT, End.CLOSE),
        (head(content_type=PLAIN, transfer_encoding=b"chunked"), chunk(TEXT[:9]), chunk(TEXT[9:]), LAST_CHUNK),
        (whole(gzip.compress(TEXT), content_type=PLAIN, content_encoding=b"gzip"),),
        (whole(zlib.compress(TEXT), content_type=PLAIN, content_encoding=b"deflate"),),
        (whole(TEXT, content_type=PLAIN)[:40], 0.05, whole(TEXT, content_type=PLAIN)[40:]),
    ],
    ids=["length", "until close", "chunked", "gzip", "deflate", "in pieces"],
)
def test_a_page(script: tuple[Step, ...]) -> None:
    page = ask(*script)
    assert page.text.encode() == TEXT
    assert 0 < page.ended_ns - page.began_ns < 5_000_000_000


def test_what_is_asked_for() -> None:
    with serving({"GET": (whole(TEXT),)}) as server:
        page = MetricsPage.parse(f"http://127.0.0.1:{server.listener.getsockname()[1]}/a/metrics?name=x")
        request_page(page, tls=TLS, timeout_s=5, api_key="sk-secret")
        (request,) = server.requests
    lines = request.head.decode().split("\r\n")
    assert lines[0] == "GET /a/metrics?name=x HTTP/1.1"
    assert f"Host: {page.authority}" in lines
    assert "Accept-Encoding: gzip" in lines
    assert "secret" not in request.head.decode(), "a server that asks for no key gets none"


def test_the_key_goes_to_a_server_that_asks_for_it() -> None:
    scripts = {"GET#1": (whole(b"no", b"401 Unauthorized"), End.CLOSE), "GET#2": (whole(TEXT),), "GET": (End.CLOSE,)}
    with serving(scripts) as server:
        page = request_page(page_of(server.listener), tls=TLS, timeout_s=5, api_key="sk-secret")
        first, second = server.requests
    assert page.text.encode() == TEXT
    assert b"Authorization" not in first.head
    assert b"Authorization: Bearer sk-secret" in second.head.split(b"\r\n")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ((whole(b"no", b"401 Unauthorized"),), "it answered 401: set OPENAI_API_KEY or --api-key-file"),
        ((whole(b"", b"404 Not Found"),), "it answered 404"),
        ((whole(b"", b"307 Temporary Redirect", location=b"http://127.0.0.1:1/"),), "it answered 307"),
        ((whole(b'[{"iter": 1}]'),), "it answered JSON; TensorRT-LLM has its metrics at /prometheus/metrics"),
        ((whole(b"x", content_encoding=b"br"),), "packed as 'br', which was not asked for"),
        ((whole(b"no gzip", content_encoding=b"gzip"),), "incorrect header check"),
        ((whole(gzip.compress(TEXT)[:-9], content_encoding=b"gzip"),), "its body ends in the middle"),
        ((head(content_length=b"99"), TEXT, End.CLOSE), "its body ends in the middle"),
        ((head(transfer_encoding=b"chunked"), chunk(TEXT), End.CLOSE), "IncompleteRead"),
        ((b"SSH-2.0-OpenSSH_9.6\r\n", End.CLOSE), "SSH-2.0"),
        ((End.CLOSE,), "closed connection without response"),
        ((End.RESET,), "[Rr]eset|closed connection"),
        ((whole(b"x" * 2_000_000),), "larger than 1 MiB"),
        ((whole(gzip.compress(b"\0" * 200_000_000, 1), content_encoding=b"gzip"),), "larger than 1 MiB"),
    ],
)
def test_answers_that_are_no_page(script: tuple[Step, ...], words: str) -> None:
    with pytest.raises(PageFailed, match=words):
        ask(*script)


@pytest.mark.parametrize(
    "script",
    [
        (End.BY_CLIENT,),
        (head(content_length=b"99"), TEXT, End.BY_CLIENT),
        (head(content_length=b"99"), *(step for _ in range(30) for step in (b"#", 0.1))),
        (*(step for byte in b"HTTP/1.1 200 OK and so on" for step in (bytes([byte]), 0.1)),),
        (head(), *(step for _ in range(30) for step in (b"#", 0.1))),
    ],
    ids=["silence", "half a body", "a dripping body", "a dripping head", "no end"],
)
def test_a_server_that_takes_too_long(script: tuple[Step, ...]) -> None:
    began = time.monotonic()
    with pytest.raises(PageFailed, match=r"it did not answer within 0\.3 s"):
        ask(*script, timeout_s=0.3)
    assert time.monotonic() - began < 2.5, "each byte must not buy more time"


def test_nobody_is_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        page = page_of(unused)
        with pytest.raises(PageFailed, match="Connection refused"):
            request_page(page, tls=TLS, timeout_s=5)


def test_tls_is_checked(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_tls.load_cert_chain(certificate.cert, certificate.key)
    with serving({"GET": (whole(TEXT), End.CLOSE)}, tls=server_tls) as server:
        page = page_of(server.listener, "https")
        known = tls_context(TlsFiles(ca_file=str(certificate.ca)))
        assert request_page(page, tls=known, timeout_s=5).text.encode() == TEXT
        assert request_page(page, tls=tls_context(TlsFiles(insecure=True)), timeout_s=5).text.encode() == TEXT
        with pytest.raises(PageFailed, match="CERTIFICATE_VERIFY_FAILED"):
            request_page(page, tls=TLS, timeout_s=5)


def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with serving({"GET": (whole(TEXT),)}, family=socket.AF_UNIX, address=path) as server:
        assert request_page(MetricsPage.parse(f"unix://{path}"), tls=TLS, timeout_s=5).text.encode() == TEXT
        assert server.requests[0].head.startswith(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n")
