"""What each user of ``users.acl`` may do in a real server, and what it may not."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.k8s.directories import K8S
from tests.run.simulated import ROOT
from tests.store.servers import Server
from vllm_locust.errors import StoreError
from vllm_locust.store.redis_store import RunStore
from vllm_locust.store.redis_url import redis_options
from vllm_locust.store.schema import BatchKind

RUN = "vllm_locust:1:run:r1"
TELEMETRY = "vllm_locust:1:telemetry"
REFUSED: dict[str, list[tuple[str, ...]]] = {
    "worker": [
        ("HSET", f"{RUN}:durable", "w1", "9"),
        ("HGETALL", f"{RUN}:control"),
        ("HSET", "vllm_locust:1:other", "a", "b"),
        ("XADD", f"{TELEMETRY}:gpu", "*", "b", "x"),
        ("XREAD", "STREAMS", f"{RUN}:records", "0"),
        ("XDEL", f"{RUN}:records", "1-1"),
        ("EXPIRE", f"{RUN}:records", "1"),
    ],
    "collector": [
        ("XADD", f"{RUN}:records", "*", "b", "x"),
        ("XADD", f"{TELEMETRY}:server", "*", "b", "x"),
        ("XREAD", "STREAMS", f"{TELEMETRY}:gpu", "0"),
        ("HSET", f"{RUN}:control", "a", "b"),
    ],
    "master": [("HSET", "of_others", "a", "b"), ("XREAD", "STREAMS", "of_others", "0")],
}
REFUSED_TO_ALL: list[tuple[str, ...]] = [
    ("FLUSHALL",),
    ("KEYS", "*"),
    ("CONFIG", "GET", "*"),
    ("ACL", "LIST"),
    ("EVAL", "return 1", "0"),
    ("DEL", f"{RUN}:records"),
    ("SHUTDOWN",),
    ("PUBLISH", "c", "m"),
]


SERVERS = [None, *filter(None, [shutil.which("redis-server")])]
"""The embedded Valkey, and the Redis of the machine where there is one: it may be older, and know fewer commands."""


@pytest.fixture(scope="module", params=SERVERS, ids=lambda binary: "valkey" if binary is None else "redis")
def server(secrets_dir: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server("--aclfile", str(secrets_dir / "users.acl"), binary=request.param)
    yield server
    server.close()


def store_of(server: Server, user: str | None, password_file: Path | None) -> RunStore:
    address = server.url if user is None else server.url.replace("unix://", f"unix://{user}@", 1)
    return RunStore(redis_options(address, password_file), "r1")


@pytest.mark.parametrize("user", REFUSED)
def test_refused(server: Server, secrets_dir: Path, user: str) -> None:
    store = store_of(server, user, secrets_dir / user)
    for command in [*REFUSED[user], *REFUSED_TO_ALL]:
        with pytest.raises(StoreError, match=r"[Nn]o permission"):
            Server.command_as(store, *command)
    store.close()


def test_a_worker_and_its_recorder(server: Server, secrets_dir: Path) -> None:
    worker, master = (store_of(server, user, secrets_dir / user) for user in ("worker", "master"))
    worker.check_server()
    kinds = list(BatchKind)
    ids = worker.add_batches([(kind, b"batch") for kind in kinds])
    assert all(isinstance(entry, str) for entry in ids)
    assert all(worker.has_entry(kind, str(entry)) for kind, entry in zip(kinds, ids, strict=True))
    worker.publish_control({"flushed:w1": "{}"})
    assert worker.server_time_unix_ns() > 0
    entries = master.read_batches(dict.fromkeys(kinds, "0"), block_ms=0, count=9)
    assert {entry.kind for entry in entries} == set(kinds)
    master.publish_durable({"w1": 3})
    assert worker.worker_status("w1").durable_seq == 3
    assert master.read_control() == {"flushed:w1": "{}"}
    for entry in entries:
        master.delete_entries(entry.kind, [entry.entry_id])
    master.ttl(60)
    worker.close()
    master.close()


@pytest.mark.parametrize(("user", "password_of"), [(None, None), (None, "worker"), ("worker", "collector")])
def test_nobody_else_comes_in(server: Server, secrets_dir: Path, user: str | None, password_of: str | None) -> None:
    store = store_of(server, user, None if password_of is None else secrets_dir / password_of)
    with pytest.raises(StoreError, match=r"[Aa]uthentication|invalid username-password"):
        store.check_server()
    store.close()


def test_no_rule_is_of_a_redis_newer_than_7_0() -> None:
    """Such a server does not start with a rule that it does not know: CLIENT SETINFO came with 7.2."""
    rules = (K8S / "secrets" / "redis.acl").read_text(encoding="utf-8")
    assert set(re.findall(r"\+(\w+\|\w+)", rules)) == {"client|setname"}


def test_every_command_that_the_program_sends_is_in_the_rights_of_some_user() -> None:
    """One that a later version adds would else be missed only where Redis has users."""
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "vllm_locust" / "store").glob("*.py"))
    sent = {
        word
        for source in sources
        for call in re.findall(r'(?:_do\("[^"]*", |execute_command\()"([A-Z]+)"|pipe\.([a-z]+)\(', source)
        for word in call
        if word
    } - {"execute"}
    allowed = set(re.findall(r"\+([a-z]+)", (K8S / "secrets" / "redis.acl").read_text(encoding="utf-8")))
    assert {"XADD", "XREAD", "HGETALL", "expire"} <= sent
    assert {word.lower() for word in sent} - {"close"} <= allowed
