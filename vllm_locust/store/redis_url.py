"""Where Redis is and how to reach it: the URL, the password file and the time limits, checked before anything
connects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from vllm_locust.errors import StoreError, UsageError


class Transport(StrEnum):
    TCP = "redis"
    TLS = "rediss"
    UNIX = "unix"


_DATABASE_DIGITS: Final = 9
"""A server has at most 2**31 - 1 databases."""
_TLS_PARAMETERS: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisOptions:
    """A checked ``--redis-url``. No secret is in it: the password stays in its file."""

    url: str
    where: str
    """The address for messages."""
    transport: Transport
    connection: Mapping[str, str | int | bool]
    """What the client's connection is made with."""
    username: str | None = None
    password_file: Path | None = None
    connect_timeout_s: float = 3.0
    timeout_s: float = 5.0

    def password(self) -> str:
        """The password file's text without its last line end. Any character may be in it."""
        assert self.password_file is not None
        try:
            text = self.password_file.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise StoreError(f"--redis-password-file {self.password_file} cannot be read: {exc}") from exc
        return text.removesuffix("\n").removesuffix("\r")


def redis_options(
    url: str, password_file: Path | None = None, *, connect_timeout_s: float = 3.0, timeout_s: float = 5.0
) -> RedisOptions:
    """Check a URL (``redis://``, ``rediss://`` or ``unix://``), or raise ``UsageError`` with every fault in it."""
    problems: list[str] = []
    try:
        parts = urlsplit(url)
        transport = Transport(parts.scheme)
        port = None if transport is Transport.UNIX else parts.port
        if port == 0:
            raise ValueError
    except ValueError:
        raise UsageError(
            "--redis-url is not usable: write redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///PATH"
        ) from None
    if parts.password is not None:
        problems.append(
            "--redis-url has a password in it, which every process list shows: "
            "write it to a file and give --redis-password-file"
        )
    username = unquote(parts.username) if parts.username else None
    if username is not None and password_file is None and parts.password is None:
        problems.append("--redis-url names a user without a password: give --redis-password-file")
    connection, where = _address(parts, transport, port, problems)
    options = RedisOptions(
        url=url,
        where=where,
        transport=transport,
        connection=connection,
        username=username,
        password_file=password_file,
        connect_timeout_s=connect_timeout_s,
        timeout_s=timeout_s,
    )
    problems += _password_problems(options)
    if problems:
        raise UsageError(*problems)
    return options


def _address(
    parts: SplitResult, transport: Transport, port: int | None, problems: list[str]
) -> tuple[dict[str, str | int | bool], str]:
    parameters = dict(parse_qsl(parts.query, keep_blank_values=True))
    connection: dict[str, str | int | bool] = {}
    if transport is Transport.UNIX:
        connection["path"] = unquote(parts.path)
        database = parameters.pop("db", "0")
        where = f"unix://{connection['path']}"
        if not parts.path or parts.hostname:
            problems.append("--redis-url needs a path for a unix socket: write unix:///PATH, with three slashes")
    else:
        connection |= {"host": parts.hostname or "localhost", "port": port or 6379, "socket_keepalive": True}
        database = parts.path.strip("/") or "0"
        where = f"{transport.value}://{connection['host']}:{connection['port']}"
    if database.isascii() and database.isdigit() and len(database) <= _DATABASE_DIGITS:
        connection["db"] = int(database)
    else:
        # What stands there may be the end of an address with a password.
        problems.append("--redis-url names a database that is no number, or is too large for one: write it as /0")
    if transport is Transport.TLS:
        connection |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
        connection |= {name: parameters.pop(name) for name in _TLS_PARAMETERS if name in parameters}
    if parameters:
        problems.append(
            f"--redis-url has the unknown parameter {', '.join(sorted(parameters))}: "
            f"known are db (unix://) and {', '.join(_TLS_PARAMETERS)} (rediss://)"
        )
    return connection, where


def _password_problems(options: RedisOptions) -> list[str]:
    if options.password_file is None:
        return []
    try:
        empty = not options.password()
    except StoreError as exc:
        return [str(exc)]
    return [f"--redis-password-file {options.password_file} is empty: put the password in it"] if empty else []
