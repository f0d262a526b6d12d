"""Redis or Valkey, and one run's keys in it. The only module that imports the Redis client.

Every failure, whether the server is away, full, read-only or refuses the password, is a ``StoreError`` that names it:
for a caller they are all the same, the data is not there. The client never retries by itself, so that no failure
hides. Works in a process patched by gevent, where its sockets yield, and in a plain one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry

from vllm_locust.errors import StoreError, UsageError
from vllm_locust.store.clock_offset import ClockOffset
from vllm_locust.store.redis_url import RedisOptions, Transport
from vllm_locust.store.schema import BatchKind, check_run_id

KEY_PREFIX: Final = "vllm_locust:1:run:"
_CONNECTION_CLASSES: Final = {
    Transport.TCP: Connection,
    Transport.TLS: SSLConnection,
    Transport.UNIX: UnixDomainSocketConnection,
}
_CLOCK_FIELD = "clock:"
_REFUSALS: Final = (
    redis.exceptions.NoPermissionError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.OutOfMemoryError,
)
_REFUSAL_WORDS: Final = ("MISCONF", "NOREPLICAS")
_BATCH_FIELD = b"b"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the server says about itself. ``maxmemory_bytes`` is None when it has no limit."""

    run_id: str
    version: str
    maxmemory_bytes: int | None
    maxmemory_policy: str


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    server_run_id: str
    durable_seq: int


@dataclass(frozen=True, slots=True)
class StreamEntry:
    kind: BatchKind
    entry_id: str
    payload: bytes | None
    """None when the entry has no batch in it."""


def _is_seq(text: bytes) -> bool:
    return text.isdigit() and len(text) <= 20


def _seq(text: bytes) -> int:
    if not _is_seq(text):
        raise StoreError(f"the durable hash holds {text[:40]!r} for a worker, which is not a batch number")
    return int(text)


class _PasswordFile(redis.CredentialProvider):
    """Reads the file at each connect, so that a changed password needs no restart."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._options.password()
        if self._options.username is None:
            return (password,)
        return (self._options.username, password)


def _client(options: RedisOptions) -> redis.Redis:
    connection: dict[str, Any] = dict(options.connection)
    if options.password_file is not None:
        connection["credential_provider"] = _PasswordFile(options)
    pool = ConnectionPool(
        connection_class=_CONNECTION_CLASSES[options.transport],
        protocol=2,
        socket_connect_timeout=options.connect_timeout_s,
        socket_timeout=options.timeout_s,
        health_check_interval=15,
        retry=Retry(NoBackoff(), 0),
        retry_on_timeout=False,
        client_name="vllm-locust",
        # No CLIENT SETINFO: a Redis before 7.2 knows no such command, nor a rule that would allow it.
        driver_info=None,
        **connection,
    )
    return redis.Redis(connection_pool=pool)


class RedisServer:
    """One server, asked in whole commands. What several kinds of callers need; keys are for those who extend it."""

    def __init__(self, options: RedisOptions) -> None:
        self._where = options.where
        # Untyped: the client's replies are unions with awaitables.
        self._redis: Any = _client(options)

    @property
    def where(self) -> str:
        """The server's address, without a secret in it."""
        return self._where

    def close(self) -> None:
        self._redis.connection_pool.disconnect()

    @contextmanager
    def _naming(self, action: str) -> Iterator[None]:
        try:
            yield
        except redis.AuthenticationError as exc:
            raise StoreError(
                f"Redis at {self._where} could not {action}: {exc}; give its password with --redis-password-file"
            ) from exc
        except (redis.RedisError, OSError) as exc:
            raise StoreError(f"Redis at {self._where} could not {action}: {exc}") from exc

    def _do(self, action: str, *command: Any) -> Any:
        with self._naming(action):
            return self._redis.execute_command(*command)

    def refusal(self, *command: str) -> str | None:
        """Why the server does not let this user do this now; None where it does, or finds another fault in it."""
        try:
            self._redis.execute_command(*command)
        except redis.ResponseError as exc:
            refused = isinstance(exc, _REFUSALS) or str(exc).startswith(_REFUSAL_WORDS)
            return str(exc) if refused else None
        except (redis.RedisError, OSError) as exc:
            raise StoreError(f"Redis at {self._where} could not be asked for its rights: {exc}") from exc
        return None

    def check_server(self) -> ServerInfo:
        """Whether this server can hold a run: raises ``UsageError`` where it is a cluster, too old, or evicts keys."""
        info = self._do("describe itself", "INFO")
        version = str(info["redis_version"])
        if info.get("cluster_enabled"):
            raise UsageError(f"Redis at {self._where} is a Redis Cluster, which is not supported: give a single server")
        if int(version.split(".")[0]) < 6:
            raise UsageError(f"Redis at {self._where} is version {version}: 6 or newer, or Valkey, is needed")
        limit = int(info.get("maxmemory", 0)) or None
        policy = str(info.get("maxmemory_policy", "noeviction"))
        if limit is not None and policy.startswith("allkeys"):
            raise UsageError(
                f"Redis at {self._where} evicts keys when it is full (maxmemory-policy {policy}), which loses records: "
                "set maxmemory-policy noeviction"
            )
        return ServerInfo(str(info["run_id"]), version, limit, policy)

    def run_id_of_server(self) -> str:
        return str(self._do("tell its run_id", "INFO", "server")["run_id"])

    def server_time_unix_ns(self) -> int:
        seconds, microseconds = self._do("tell the time", "TIME")
        return int(seconds) * 1_000_000_000 + int(microseconds) * 1_000


class RunStore(RedisServer):
    """The keys of one run: its streams of batches, its ``durable`` hash and its ``control`` hash."""

    def __init__(self, options: RedisOptions, run_id: str) -> None:
        super().__init__(options)
        self._run_id = check_run_id(run_id)
        base = f"{KEY_PREFIX}{run_id}:"
        self._streams = {kind: f"{base}{kind.value}" for kind in BatchKind}
        self._durable = f"{base}durable"
        self._control = f"{base}control"

    @property
    def run_id(self) -> str:
        return self._run_id

    # What everyone asks

    def durable(self) -> dict[str, int]:
        """Worker to the highest batch number up to which every batch is on disk. What somebody else wrote there, and is
        no number, is left out.
        """
        reply = self._do("read what is durable", "HGETALL", self._durable)
        return {worker.decode("utf-8", "replace"): int(seq) for worker, seq in reply.items() if _is_seq(seq)}

    def ttl(self, seconds: int) -> None:
        """Let the run's keys expire, once the merge has what they hold."""
        with self._naming("set the time to live"):
            pipe = self._redis.pipeline(transaction=False)
            for key in self._keys():
                pipe.expire(key, seconds)
            pipe.execute()

    def _keys(self) -> list[str]:
        return [*self._streams.values(), self._durable, self._control]

    # Control

    def publish_control(self, fields: Mapping[str, str]) -> None:
        if fields:
            self._do("take control fields", "HSET", self._control, *(part for pair in fields.items() for part in pair))

    def read_control(self) -> dict[str, str]:
        reply = self._do("read control fields", "HGETALL", self._control)
        return {key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, value in reply.items()}

    def has_control(self, field: str) -> bool:
        return self._do("read a control field", "HGET", self._control, field) is not None

    def publish_clock(self, name: str, offsets: Sequence[ClockOffset]) -> None:
        """All of ``name``'s clock measurements, so that a server that lost its data gets them back with the next
        one.
        """
        self.publish_control({f"{_CLOCK_FIELD}{name}": "\n".join(json.dumps(asdict(offset)) for offset in offsets)})

    # What a worker does

    def worker_status(self, worker_id: str) -> WorkerStatus:
        with self._naming("tell what is durable"):
            pipe = self._redis.pipeline(transaction=False)
            pipe.info("server")
            pipe.hget(self._durable, worker_id)
            info, seq = pipe.execute()
        return WorkerStatus(str(info["run_id"]), _seq(seq or b"0"))

    def add_batches(self, batches: Sequence[tuple[BatchKind, bytes]]) -> list[str | StoreError]:
        """Send batches in one round trip: for each its entry id, or why the server refused it."""
        with self._naming("take a batch"):
            pipe = self._redis.pipeline(transaction=False)
            for kind, payload in batches:
                pipe.execute_command("XADD", self._streams[kind], "*", _BATCH_FIELD, payload)
            replies = pipe.execute(raise_on_error=False)
        return [
            StoreError(f"Redis at {self._where} could not take a batch: {reply}")
            if isinstance(reply, Exception)
            else reply.decode()
            for reply in replies
        ]

    def has_entry(self, kind: BatchKind, entry_id: str) -> bool:
        return bool(self._do("look for a batch", "XRANGE", self._streams[kind], entry_id, entry_id))

    # What the recorder does

    def read_batches(self, after: Mapping[BatchKind, str], *, block_ms: int, count: int) -> list[StreamEntry]:
        """Entries after the given ids, oldest first. ``block_ms`` 0 does not wait."""
        blocking = ("BLOCK", block_ms) if block_ms else ()
        keys = [self._streams[kind] for kind in after]
        reply = self._do("read batches", "XREAD", "COUNT", count, *blocking, "STREAMS", *keys, *after.values())
        kinds = {key.encode(): kind for kind, key in self._streams.items()}
        return [
            StreamEntry(kinds[key], entry_id.decode(), (fields or {}).get(_BATCH_FIELD))
            for key, entries in reply or []
            for entry_id, fields in entries
        ]

    def publish_durable(self, seqs: Mapping[str, int]) -> None:
        self._do("take what is durable", "HSET", self._durable, *(part for pair in seqs.items() for part in pair))

    def delete_entries(self, kind: BatchKind, entry_ids: Sequence[str]) -> None:
        for start in range(0, len(entry_ids), 1000):
            self._do("trim a stream", "XDEL", self._streams[kind], *entry_ids[start : start + 1000])
