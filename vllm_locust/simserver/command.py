"""``vllm-locust simserver``: listen, say READY, and end cleanly on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import ssl
import sys
from collections.abc import Sequence
from contextlib import suppress

from vllm_locust.errors import UsageError
from vllm_locust.simserver.server import SimServer
from vllm_locust.simserver.settings import Settings, parse_settings

_BACKLOG = 4096
_GC_THRESHOLD = 100_000


def main(argv: Sequence[str]) -> int:
    try:
        settings = parse_settings(argv)
        asyncio.run(serve(settings))
    except UsageError as error:
        print(f"simserver: {error}", file=sys.stderr)
        return error.exit_code
    return 0


async def serve(settings: Settings) -> None:
    """Until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    _raise_descriptor_limit()
    try:
        server = SimServer(settings, loop)
    except OSError as error:
        raise UsageError(f"the truth log {settings.truth_log} cannot be written: {error.strerror}") from error
    listeners = await _listen(settings, server, loop)
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    port = listeners[0].sockets[0].getsockname()[1]
    scheme = "http" if settings.ssl_certfile is None else "https"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    print(f"READY {scheme}://{host}:{port}/v1 model={settings.model}", flush=True)
    await stop.wait()
    for listener in listeners:
        listener.close()
    await server.shutdown()
    if settings.uds is not None:
        with suppress(FileNotFoundError):
            os.unlink(settings.uds)


async def _listen(settings: Settings, server: SimServer, loop: asyncio.AbstractEventLoop) -> list[asyncio.Server]:
    context = _ssl_context(settings)
    try:
        listeners = [
            await loop.create_server(
                server.connection, settings.host, settings.port, ssl=context, backlog=_BACKLOG, reuse_address=True
            )
        ]
    except OSError as error:
        raise UsageError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; choose another --port"
        ) from error
    if settings.uds is not None:
        try:
            listeners.append(await loop.create_unix_server(server.connection, settings.uds, backlog=_BACKLOG))
        except OSError as error:
            raise UsageError(f"cannot listen on the unix socket {settings.uds}: {error.strerror}") from error
    return listeners


def _ssl_context(settings: Settings) -> ssl.SSLContext | None:
    if settings.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"--ssl-certfile {settings.ssl_certfile} cannot be used: {error}") from error
    return context


def _raise_descriptor_limit() -> None:
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
