"""A Valkey on a host of its own, reached over TCP by the run, and by the test over a unix socket that no fault of the
network touches.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from shutil import rmtree

from tests.faults.network import Host
from vllm_locust.store.embedded import server_binary

PORT = 6379
_START_S = 15.0


class RedisHost:
    def __init__(self, host: Host, password: str | None = None) -> None:
        """``password``: what it asks for each time it has started."""
        self._host = host
        self._password = password
        self._dir = Path(tempfile.mkdtemp(prefix="vl-fault-"))
        self._socket = self._dir / "s"
        self._process: subprocess.Popen[bytes] | None = None
        self._admin: socket.socket | None = None
        self.url = f"redis://{host.address}:{PORT}/0"
        self.start()

    def start(self) -> None:
        """With no data in it, whatever was there before."""
        options = ["--port", str(PORT), "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""]
        options += ["--unixsocket", str(self._socket), "--dir", str(self._dir), "--maxmemory-policy", "noeviction"]
        if self._password is not None:
            options += ["--requirepass", self._password]
        self._process = subprocess.Popen(
            [*self._host.on(), str(server_binary()), *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + _START_S
        while True:
            self._admin = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._admin.settimeout(10)
            try:
                self._admin.connect(str(self._socket))
                if self._password is not None:
                    self.ask("AUTH", self._password)
                assert self.command("PING") == "PONG"
            except OSError:
                self._admin.close()
                assert time.monotonic() < deadline, "Valkey did not start"
                time.sleep(0.02)
            else:
                return

    def command(self, *words: str) -> str:
        """One command with a reply of one line or one text; the connection stays, so a new password does not shut the
        test out.
        """
        assert self._admin is not None
        parts = [word.encode() for word in words]
        self._admin.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts))
        reply = b""
        while not reply.endswith(b"\r\n"):
            received = self._admin.recv(65536)
            if not received:
                raise OSError("Valkey has closed the connection")
            reply += received
        kind, text = chr(reply[0]), reply[1:-2].decode()
        assert kind != "-", text
        return text

    def ask(self, *words: str) -> None:
        assert self.command(*words) == "OK", words

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            assert self._admin is not None
            self._admin.close()
            self._process.kill()
            self._process.wait()
            self._process = None
            self._socket.unlink(missing_ok=True)

    def close(self) -> None:
        self.kill()
        rmtree(self._dir)
