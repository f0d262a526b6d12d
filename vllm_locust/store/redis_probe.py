"""What a Redis or Valkey is like, and whether its user may do what a role needs. It changes nothing that others see."""

from __future__ import annotations

import os
from enum import StrEnum
from statistics import median_low
from typing import Final

from vllm_locust import clock
from vllm_locust.checkup.redis import LinkFacts, RedisFacts
from vllm_locust.errors import StoreError
from vllm_locust.store.clock_offset import measure_clock_offset
from vllm_locust.store.redis_store import KEY_PREFIX, RedisServer, RunStore
from vllm_locust.store.redis_url import RedisOptions
from vllm_locust.store.schema import BatchKind
from vllm_locust.store.telemetry_store import STREAMS, TELEMETRY_PREFIX

_ROUND_TRIPS: Final = 20
_KEPT_S: Final = 1
_Command = tuple[str, ...]


class RedisRole(StrEnum):
    """Who connects, as ``redis.acl`` names its users."""

    MASTER = "master"
    WORKER = "worker"
    COLLECTOR = "collector"


class RedisProbe(RedisServer):
    def facts(self) -> RedisFacts:
        """Raises ``UsageError`` where the server cannot hold a run, ``StoreError`` where it does not answer."""
        server = self.check_server()
        info = self._do("describe itself", "INFO")
        return RedisFacts(
            version=server.version,
            role=str(info.get("role", "master")),
            maxmemory_bytes=server.maxmemory_bytes,
            maxmemory_policy=server.maxmemory_policy,
            used_bytes=int(info.get("used_memory", 0)),
            system_bytes=int(info.get("total_system_memory", 0)) or None,
            saves_to_disk=bool(info.get("aof_enabled")) or int(info.get("rdb_saves", 0)) > 0,
            last_save_ok=info.get("rdb_last_bgsave_status", "ok") == "ok",
        )

    def link(self) -> LinkFacts:
        server_run_id = self.run_id_of_server()
        times_ns = []
        for _ in range(_ROUND_TRIPS):
            began_ns = clock.monotonic_ns()
            self.server_time_unix_ns()
            times_ns.append(clock.monotonic_ns() - began_ns)
        offset = measure_clock_offset(self.server_time_unix_ns, server_run_id)
        return LinkFacts(median_low(times_ns), max(times_ns), offset.offset_ns, offset.uncertainty_ns)

    def refused(self, role: RedisRole) -> tuple[int, dict[str, str]]:
        """How many commands were tried, and those that the server refused, with its reasons.

        Each is sent in a form that changes nothing: an id that no entry can have, a field without a value, a time that
        is no number. The server looks at the user's rights, its memory and its role first.
        """
        run_id = f"doctor-{os.urandom(6).hex()}"
        commands = [command for one in _roles_in(role) for command in _commands(one, run_id)]
        refusals = {_named(command, run_id): self.refusal(*command) for command in commands}
        return len(refusals), {name: reason for name, reason in refusals.items() if reason is not None}


def _named(command: _Command, run_id: str) -> str:
    key = next((part for part in command if part.startswith("vllm_locust:")), "")
    return f"{command[0]} {key.replace(run_id, '*')}".strip()


def round_trip(options: RedisOptions) -> None:
    """A batch there and back in a run of its own, of which nothing is left a second later. Raises ``StoreError``."""
    store = RunStore(options, f"doctor-{os.urandom(6).hex()}")
    try:
        for reply in store.add_batches([(kind, b"doctor") for kind in BatchKind]):
            if isinstance(reply, StoreError):
                raise reply
        store.publish_control({"doctor": "1"})
        entries = store.read_batches(dict.fromkeys(BatchKind, "0-0"), block_ms=0, count=9)
        if {entry.kind: entry.payload for entry in entries} != dict.fromkeys(BatchKind, b"doctor"):
            raise StoreError(f"Redis at {store.where} did not give back what it was given")
    finally:
        try:
            # Whatever has come of it.
            store.ttl(_KEPT_S)
        finally:
            store.close()


def _roles_in(role: RedisRole) -> tuple[RedisRole, ...]:
    """A local run's worker lives in the master's process and uses its user."""
    return (RedisRole.WORKER, role) if role is RedisRole.MASTER else (role,)


def _commands(role: RedisRole, run_id: str) -> list[_Command]:
    run = f"{KEY_PREFIX}{run_id}:"
    streams = [f"{run}{kind.value}" for kind in BatchKind]
    durable, control = f"{run}durable", f"{run}control"
    telemetry = [f"{TELEMETRY_PREFIX}{name}" for name in sorted(set(STREAMS.values()))]
    always: list[_Command] = [("INFO", "server"), ("TIME",)]
    if role is RedisRole.WORKER:
        adds = [("XADD", stream, "0-0", "b", "x") for stream in streams]
        looks = [("XRANGE", stream, "0-1", "0-1") for stream in streams]
        return [*always, *adds, *looks, ("HGET", durable, "w"), ("HSET", control, "f", "v", "odd")]
    if role is RedisRole.COLLECTOR:
        own = [stream for stream in telemetry if not stream.endswith("server")]
    else:
        own = [f"{TELEMETRY_PREFIX}server"]
    publishes: list[_Command] = [("XADD", stream, "0-0", "b", "x") for stream in own]
    publishes += [("EXPIRE", stream, "never") for stream in own]
    if role is RedisRole.COLLECTOR:
        return [*always, *publishes]
    reads: list[_Command] = [("XREAD", "STREAMS", stream, "0-0") for stream in streams]
    reads += [("XREAD", "COUNT", "1", "STREAMS", stream, "$") for stream in telemetry]
    trims = [("XDEL", stream, "0-1") for stream in streams]
    expires = [("EXPIRE", key, "never") for key in (*streams, durable, control)]
    hashes = [("HSET", durable, "w", "1", "odd"), ("HGETALL", durable), ("HGETALL", control)]
    return [*publishes, *reads, *trims, *expires, *hashes]
