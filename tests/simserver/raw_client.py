"""An HTTP client that owes nothing to the package: a socket, a clock, and the chunked framing read by hand."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_COMMAND = "import sys; from vllm_locust.simserver import main; sys.exit(main(sys.argv[1:]))"


@dataclass
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    """Chunked framing removed."""
    chunks: list[bytes] = field(default_factory=list)
    """The HTTP chunks, without the last, empty one."""
    chunk_ns: list[int] = field(default_factory=list)
    """When the last byte of each chunk had been read."""
    ended: str = "complete"
    """``complete``, ``eof`` inside a framed body, ``closed`` by the end of an unframed one, ``reset``."""

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The data of each event, decoded; [DONE] stays a string. Only for the plain spelling."""
        data = [line.removeprefix("data: ") for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in data]

    def text(self) -> str:
        choices = [choice for event in self.events() if isinstance(event, dict) for choice in event.get("choices", [])]
        return "".join(choice["delta"].get("content") or "" for choice in choices)


def request_bytes(
    path: str, body: Mapping[str, object] | bytes | None, headers: Mapping[str, str] | None = None, method: str = ""
) -> bytes:
    payload = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1", "host: test"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if body is not None:
        lines.append(f"content-length: {len(payload)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + payload


class Client:
    """One connection."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.socket.settimeout(10)
        self._buffer = bytearray()
        self._read_ns = 0

    def ask(
        self,
        path: str,
        body: Mapping[str, object] | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        method: str = "",
    ) -> Answer:
        self.socket.sendall(request_bytes(path, body, headers, method))
        return self.read()

    def read(self) -> Answer:
        try:
            head = self._until(b"\r\n\r\n")
        except EOFError:
            return Answer(0, [], b"", ended="eof")
        except ConnectionResetError:
            return Answer(0, [], b"", ended="reset")
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        answer = Answer(int(status.split(" ")[1]), headers, b"")
        if answer.status == 100:
            return answer
        try:
            self._read_body(answer)
        except EOFError:
            answer.ended = "eof"
        except ConnectionResetError:
            answer.ended = "reset"
        return answer

    def _read_body(self, answer: Answer) -> None:
        length = answer.header("content-length")
        if length is not None:
            answer.body = self._exactly(int(length))
        elif answer.header("transfer-encoding") == "chunked":
            try:
                while size := int(self._until(b"\r\n"), 16):
                    answer.chunks.append(self._exactly(size + 2)[:-2])
                    answer.chunk_ns.append(self._read_ns)
                self._exactly(2)
            finally:
                answer.body = b"".join(answer.chunks)
        else:
            while data := self.socket.recv(65536):
                self._buffer += data
            answer.body, answer.ended = bytes(self._buffer), "closed"

    def _until(self, end: bytes) -> bytes:
        while end not in self._buffer:
            self._more()
        at = self._buffer.index(end)
        found = bytes(self._buffer[:at])
        del self._buffer[: at + len(end)]
        return found

    def _exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            self._more()
        found = bytes(self._buffer[:count])
        del self._buffer[:count]
        return found

    def _more(self) -> None:
        data = self.socket.recv(65536)
        self._read_ns = time.monotonic_ns()
        if not data:
            raise EOFError
        self._buffer += data

    def close(self) -> None:
        self.socket.close()


@dataclass
class Server:
    port: int
    process: subprocess.Popen[str]
    truth_path: Path
    ready: str

    def connect(self) -> Client:
        return Client(socket.create_connection(("127.0.0.1", self.port), timeout=10))

    def ask(
        self,
        path: str,
        body: Mapping[str, object] | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        method: str = "",
    ) -> Answer:
        client = self.connect()
        try:
            return client.ask(path, body, headers, method)
        finally:
            client.close()

    def truths(self) -> list[dict[str, Any]]:
        """A line that is being written at this moment is not there yet."""
        complete, _, _unfinished = self.truth_path.read_text().rpartition("\n")
        return [json.loads(line) for line in complete.splitlines()]

    def truth(self, request_id: str) -> dict[str, Any]:
        """The one line of this request, which may be written a moment after its last byte was read."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            found = [truth for truth in self.truths() if truth["request_id"] == request_id]
            if found:
                assert len(found) == 1
                return found[0]
            time.sleep(0.01)
        raise AssertionError(f"no truth about {request_id}")

    def metrics(self) -> dict[str, float]:
        """Each sample of /metrics by its name with labels."""
        text = self.ask("/metrics").body.decode()
        pairs = [line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    def metric(self, name: str) -> float:
        return sum(value for key, value in self.metrics().items() if key.split("{")[0] == f"vllm:{name}")


@contextmanager
def running(directory: Path, *flags: str) -> Iterator[Server]:
    truth_path = directory / "truth.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", _COMMAND, "--port", "0", "--truth-log", str(truth_path), *flags],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        ready = process.stdout.readline()
        port = int(ready.split("/v1 ")[0].rsplit(":", 1)[1])
        yield Server(port, process, truth_path, ready)
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()
    assert process.returncode == 0


def chat(**extra: object) -> dict[str, object]:
    """A chat request for five tokens: 2 words of the prompt make it 10 tokens long."""
    return {
        "model": "sim",
        "messages": [{"role": "user", "content": "Hello world"}],
        "max_tokens": 5,
        "ignore_eos": True,
        **extra,
    }


def stream(**extra: object) -> dict[str, object]:
    return chat(stream=True, stream_options={"include_usage": True}, **extra)
