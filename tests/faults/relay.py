"""A TCP relay as a process of its own, for what a network does to a connection besides cutting it.

``python relay.py LISTEN_PORT HOST PORT`` says READY and then takes orders on standard input, one a line, which hold for
all connections, those already open too: ``delay MS``, ``jitter MS`` (each way, in order), ``rate BYTES_PER_S`` (0: no
limit), ``stall S`` (nothing passes for so long) and ``hold`` (nothing passes any more, and nobody is told: half-open).
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

_CHUNK_BYTES = 65_536
_QUEUE = 256


class _Link:
    def __init__(self) -> None:
        self.delay_s = self.jitter_s = self.rate = self.stalled_until = 0.0

    def obey(self, line: str) -> None:
        word, _, value = line.partition(" ")
        if word == "delay":
            self.delay_s = float(value) / 1e3
        elif word == "jitter":
            self.jitter_s = float(value) / 1e3
        elif word == "rate":
            self.rate = float(value)
        elif word == "stall":
            self.stalled_until = time.monotonic() + float(value)
        elif word == "hold":
            self.stalled_until = float("inf")
        else:
            raise ValueError(f"unknown order {line!r}")

    async def wait(self, due: float, size: int) -> None:
        """Until so many bytes that are due then may pass."""
        while (left_s := max(due, self.stalled_until) - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, 0.5))
        if self.rate:
            await asyncio.sleep(size / self.rate)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: _Link) -> None:
    """One direction: what was read leaves in order, each piece when it is due; the end of it too."""
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUE)

    async def take() -> None:
        due = 0.0
        data = b"-"
        while data:
            with suppress(OSError):
                data = b""
                data = await reader.read(_CHUNK_BYTES)
            due = max(due, time.monotonic() + link.delay_s + random.uniform(0, link.jitter_s))
            await queue.put((due, data))

    taking = asyncio.create_task(take())
    try:
        while True:
            due, data = await queue.get()
            await link.wait(due, len(data))
            if not data:
                return
            writer.write(data)
            await writer.drain()
    except OSError:
        return
    finally:
        taking.cancel()
        writer.close()


async def _serve(port: int, target: str, target_port: int) -> None:
    link = _Link()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(target, target_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pump(reader, far_writer, link), _pump(far_reader, writer, link))

    server = await asyncio.start_server(connected, "0.0.0.0", port, backlog=512)
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    print("READY", flush=True)
    while line := await orders.readline():
        link.obey(line.decode().strip())
    server.close()


class Relay:
    """The relay process as its test sees it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def order(self, *lines: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{line}\n" for line in lines).encode())
        self._process.stdin.flush()


@contextmanager
def relay(on: Sequence[str], port: int, target: str, target_port: int) -> Iterator[Relay]:
    command = [*on, sys.executable, __file__, str(port), target, str(target_port)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"READY\n"
        yield Relay(process)
    finally:
        process.stdin.close()
        process.kill()
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
