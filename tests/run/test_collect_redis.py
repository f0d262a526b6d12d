"""``vllm-locust collect`` and a Redis behind TLS, with the rights of the shipped ACL and no more, which goes away and
comes back.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from tests.certificates import Certificate, make_certificate
from tests.run.simulated import ROOT, environment
from tests.store.servers import Server, wait_until
from vllm_locust.store.redis_url import redis_options
from vllm_locust.store.telemetry_schema import TelemetryBatch, decode_telemetry
from vllm_locust.store.telemetry_store import TelemetryStore

PASSWORD = "p@ss:/word #1"
PIECE = 1 << 16


class TlsDoor:
    """A TLS port before a server's unix socket, which can be shut: then nobody is connected and nobody gets in."""

    def __init__(self, server: Server, certificate: Certificate) -> None:
        self._path = server.url.removeprefix("unix://")
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate.cert, certificate.key)
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._serve()

    def open(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._serve()

    def shut(self) -> None:
        for one in (self._listener, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._sockets.clear()

    def _serve(self) -> None:
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            try:
                outer = self._context.wrap_socket(plain, server_side=True)
            except OSError:
                plain.close()
                continue
            inner = socket.socket(socket.AF_UNIX)
            inner.connect(self._path)
            self._sockets += [outer, inner]
            for ends in ((outer, inner), (inner, outer)):
                threading.Thread(target=_pump, args=ends, daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(PIECE):
            target.sendall(data)
    for one in (source, target):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    rules = (ROOT / "k8s" / "secrets" / "redis.acl").read_text(encoding="utf-8").splitlines()
    (collector,) = [line for line in rules if line.startswith("user collector ")]
    digest = hashlib.sha256(PASSWORD.encode()).hexdigest()
    acl = tmp_path / "users.acl"
    acl.write_text(f"user default on nopass ~* &* +@all\n{collector.format(collector=digest)}\n", encoding="utf-8")
    (tmp_path / "password").write_text(PASSWORD, encoding="utf-8")
    server = Server("--aclfile", str(acl))
    yield server
    server.close()


def start(directory: Path, door: TlsDoor, ca: Path) -> subprocess.Popen[str]:
    url = f"rediss://collector@localhost:{door.port}/0?ssl_ca_certs={ca}"
    flags = ("--redis-url", url, "--redis-password-file", str(directory / "password"))
    return subprocess.Popen(
        [sys.executable, "-m", "vllm_locust", "collect", "--host-only", "--interval", "50ms", *flags],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
    )


def batches(server: Server) -> list[TelemetryBatch]:
    store = TelemetryStore(redis_options(server.url))
    entries = store.read_telemetry({"host": "0-0"}, count=1000)
    store.close()
    return [decode_telemetry(entry.payload or b"") for entry in entries]


def test_it_goes_away_and_comes_back(server: Server, tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    door = TlsDoor(server, certificate)
    process = start(tmp_path, door, certificate.ca)
    try:
        wait_until(lambda: len(batches(server)) >= 2)
        door.shut()
        before = len(batches(server))
        with pytest.raises(AssertionError, match="in vain"):
            wait_until(lambda: len(batches(server)) > before, 3.0)
        door.open()
        wait_until(lambda: len(batches(server)) >= before + 4, 20.0)
        process.terminate()
        _, said = process.communicate(timeout=20)
    finally:
        process.kill()
        door.shut()
    assert process.returncode == 0, said
    found = batches(server)
    # What the server took while its answer was lost comes twice, and is known by its number.
    numbers = {batch.header.seq for batch in found}
    assert numbers == set(range(1, max(numbers) + 1)), "also those of the time between"
    times = sorted({row["time_unix_ns"] for batch in found for row in batch.rows.to_pylist()})
    assert max(b - a for a, b in pairwise(times)) < 2_500_000_000
    assert "what is sampled meanwhile is kept for a while" in said
    assert "Telemetry is published again" in said
    assert PASSWORD not in said


def test_a_certificate_of_somebody_else_is_refused(server: Server, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    door = TlsDoor(server, make_certificate(tmp_path))
    process = start(tmp_path, door, make_certificate(other).ca)
    _, said = process.communicate(timeout=30)
    door.shut()
    assert process.returncode == 2
    assert "--redis-url: Redis at rediss://localhost" in said
    assert "certificate" in said
    assert "Traceback" not in said
    assert batches(server) == []
