"""A whole run over TLS, with the users of the shipped ACL and passwords of any characters, and what it shows to others:
nothing listens but what Locust itself opens, and no secret is anywhere to be read.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.certificates import make_certificate
from tests.run.processes import arguments, listeners, variables, with_children
from tests.run.simulated import (
    FAST,
    LocustRun,
    end_of,
    environment,
    free_port,
    get,
    simserver,
    start_locust,
    wait_for_text,
)
from tests.store.servers import Server, wait_until
from tests.store.tls_relay import TlsRelay
from vllm_locust.shipped import shipped_path
from vllm_locust.store.redis_store import RunStore
from vllm_locust.store.redis_url import redis_options
from vllm_locust.store.schema import decompress_stream

pytestmark = pytest.mark.timeout(180)

KEY = "sk-closed-5b1f0c"
PASSWORDS = {name: f"{name} p@:/?#%& ü\"' \\$(x)`" for name in ("master", "worker", "collector")}
LOAD = ("-u", "4", "-r", "4", "-t", "6s", "--warmup-requests", "4", "--max-tokens", "20", "--force-length")


class ClosedRedis:
    """A Valkey with the shipped users, reached over TLS only."""

    def __init__(self, directory: Path) -> None:
        rules = shipped_path("redis.acl").read_text(encoding="utf-8")
        for name, password in PASSWORDS.items():
            rules = rules.replace(f"{{{name}}}", sha256(password.encode()).hexdigest())
            (directory / name).write_text(password + "\n", encoding="utf-8")
        (directory / "users.acl").write_text(rules + "user watcher on nopass ~* +@all\n", encoding="utf-8")
        (directory / "nothing").write_text("any")
        certificate = make_certificate(directory)
        self.server = Server("--aclfile", str(directory / "users.acl"), "--unixsocketperm", "700")
        self.relay = TlsRelay(certificate, Path(self.server.url.removeprefix("unix://")))
        self._directory = directory
        self._ca = certificate.ca

    def flags(self, user: str) -> tuple[str, ...]:
        url = f"rediss://{user}@localhost:{self.relay.port}/0?ssl_ca_certs={self._ca}"
        return ("--redis-url", url, "--redis-password-file", str(self._directory / user))

    def keys_and_values(self) -> dict[str, bytes]:
        """All that is in it, unpacked."""
        url = self.server.url.replace("unix://", "unix://watcher@")
        store = RunStore(redis_options(url, self._directory / "nothing"), "r")
        found = {}
        for key in Server.command_as(store, "KEYS", "*"):  # type: ignore[attr-defined]
            if Server.command_as(store, "TYPE", key) == b"hash":
                found[key.decode()] = repr(Server.command_as(store, "HGETALL", key)).encode()
            else:
                entries = Server.command_as(store, "XRANGE", key, "-", "+")
                packed = [fields[b"b"] for _, fields in entries]  # type: ignore[attr-defined]
                found[key.decode()] = b"".join(decompress_stream(payload).to_pybytes() for payload in packed)
        store.close()
        return found

    def denials(self) -> list[object]:
        url = self.server.url.replace("unix://", "unix://watcher@")
        store = RunStore(redis_options(url, self._directory / "nothing"), "r")
        denied = Server.command_as(store, "ACL", "LOG")
        store.close()
        assert isinstance(denied, list)
        return denied

    def close(self) -> None:
        self.relay.close()
        self.server.close()


def secrets_in(text: bytes) -> list[str]:
    secrets = [KEY, *PASSWORDS.values()]
    return [secret for secret in secrets if secret.encode() in text or secret.encode("unicode_escape") in text]


def pids_of(*processes: subprocess.Popen[str]) -> set[int]:
    return {pid for process in processes for pid in with_children(process.pid)}


def test_over_tls_with_the_shipped_users(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "key").write_text(KEY)
    redis = ClosedRedis(tmp_path / "secret")
    port, web = free_port(), free_port()
    key = ("--api-key-file", str(tmp_path / "key"))
    bind = ("--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", str(port), "--expect-workers", "1")
    collector = subprocess.Popen(
        [sys.executable, "-m", "vllm_locust", "collect", "--host-only", *redis.flags("collector")],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with simserver(tmp_path, *FAST, VLLM_API_KEY=KEY) as server:
            page = ("--metrics-url", f"{server.url}/metrics", "--run-dir", "run", "--autostart", "--autoquit", "0")
            view = ("--web-host", "127.0.0.1", "--web-port", str(web))
            master = start_locust(tmp_path, server.url, *bind, *LOAD, *page, *view, *key, *redis.flags("master"))
            to_master = ("--worker", "--master-host", "127.0.0.1", "--master-port", str(port))
            worker = start_locust(tmp_path, None, *to_master, *key, *redis.flags("worker"))
            wait_for_text(server.truth_log, 100)
            pids = pids_of(master, worker, collector)
            shown = {pid: (arguments(pid), variables(pid)) for pid in pids}
            ports, paths = listeners(pids)
            pages = b"".join(get(f"http://127.0.0.1:{web}{path}") for path in ("/", "/stats/requests", "/logs"))
            in_redis = redis.keys_and_values()
            run = end_of(master, tmp_path)
            run.workers = [end_of(worker, tmp_path, 30)]
            server.stop()
            truth = {row["request_id"] for row in server.truth()}
        collector.send_signal(signal.SIGTERM)
        _, said = collector.communicate(timeout=20)
        assert redis.denials() == [], "every command that was needed is allowed"
        assert redis.relay.connections >= 4
    finally:
        collector.kill()
        redis.close()
    look_at(run, truth)
    assert len(pids) >= 5, "master, recorder, scraper, worker, collector"
    assert (ports, paths) == ({port, web}, set())
    assert len(shown) == len(pids)
    assert any(b"vllm_locust.store.recorder" in command for command, _ in shown.values())
    for command, variable in shown.values():
        assert not secrets_in(command), command
        assert not secrets_in(variable), command
    assert len(pages) > 5000
    assert not secrets_in(pages)
    names = {key.rpartition(":")[2] for key in in_redis}
    assert {"control", "durable", "host", "server"} <= names
    for name, value in in_redis.items():
        assert not secrets_in(value), name
    files = [path for path in run.run_dir.rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files:
        assert not secrets_in(path.read_bytes()), path
    for output in (run.output, *run.worker_outputs, said):
        assert not secrets_in(output.encode()), output


def look_at(run: LocustRun, truth: set[str]) -> None:
    """The run is whole: every request, the host's and the server's telemetry, and no complaint."""
    assert {row["request_id"] for row in run.requests()} == truth, run.output
    assert len(truth) > 100
    assert run.json("run.json")["records"] == {"lost": 0, "batches_lost": 0, "spooled_batches": 0}
    assert "could not" not in run.output + "".join(run.worker_outputs), run.output
    for table in ("host", "server"):
        assert pq.read_metadata(run.run_dir / f"{table}.parquet").num_rows > 0
    assert run.exit_code in (0, 4), run.output


def test_one_machine_opens_nothing_but_locusts_port(tmp_path: Path) -> None:
    """With the embedded Valkey, whose socket is the user's own. The key of the environment goes to no other program."""
    port = free_port()
    local = ("--master-bind-host", "127.0.0.1", "--master-bind-port", str(port), "--master-port", str(port))
    flags = ("--headless", "--only-summary", "--run-dir", "run", "--processes", "2", *local, *LOAD)
    with simserver(tmp_path, *FAST) as server:
        load = start_locust(tmp_path, server.url, *flags, OPENAI_API_KEY=KEY)
        wait_for_text(server.truth_log, 50)
        pids = pids_of(load)
        ports, paths = listeners(pids)
        (valkey,) = paths
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (Path(valkey), Path(valkey).parent)]
        with_key = {arguments(pid) for pid in pids if KEY.encode() in variables(pid)}
        without = {arguments(pid) for pid in pids if KEY.encode() not in variables(pid)}
        run = end_of(load, tmp_path)
    assert run.exit_code in (0, 4), run.output
    assert ports == {port}
    assert re.fullmatch(r"/tmp/vllm-locust-\w+/valkey\.sock", valkey)
    assert modes == [0o700, 0o700]
    assert all(b"locust" in command and b"store" not in command for command in with_key)
    for name in (b"vllm_locust.store.recorder", b"vllm_locust.store.embedded", b"valkey-server"):
        assert any(name in command for command in without), name
    wait_until(lambda: not Path(valkey).parent.exists())
    assert os.path.exists(run.run_dir / "report.html")
