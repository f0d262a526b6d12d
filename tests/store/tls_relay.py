"""TLS in front of a plain server: the embedded Valkey is built without it."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path

from tests.certificates import Certificate


class TlsRelay:
    """Listens on a port of localhost, and passes what it decrypts on to a unix socket."""

    def __init__(self, certificate: Certificate, target: Path) -> None:
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(certificate.cert, certificate.key)
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.connections = 0
        """That were let in."""
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(plain,), daemon=True).start()

    def _relay(self, plain: socket.socket) -> None:
        with suppress(OSError), plain:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            outer = self._tls.wrap_socket(plain, server_side=True)
            self.connections += 1
            with outer, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as inner:
                inner.connect(str(self._target))
                back = threading.Thread(target=_pump, args=(inner, outer), daemon=True)
                back.start()
                _pump(outer, inner)
                back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for one in (source, sink):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
