from __future__ import annotations

import json
import secrets
import subprocess
from pathlib import Path

import pytest

from tests.store.servers import Server, wait_until
from vllm_locust.errors import StoreError, UsageError
from vllm_locust.store.clock_offset import ClockOffset, measure_clock_offset
from vllm_locust.store.redis_probe import round_trip
from vllm_locust.store.redis_store import KEY_PREFIX, RunStore
from vllm_locust.store.redis_url import redis_options
from vllm_locust.store.schema import BatchKind

ALL_CHARACTERS = "".join(map(chr, range(1, 128))).replace("\n", "").replace("\r", "") + "pä ß😀 :@/?#%[]"


def test_a_url_becomes_options_without_a_secret() -> None:
    options = redis_options("redis://[::1]:7000/3")
    assert dict(options.connection) == {"host": "::1", "port": 7000, "db": 3, "socket_keepalive": True}
    assert redis_options("redis://").where == "redis://localhost:6379"
    assert dict(redis_options("unix:///run/r%20s.sock?db=2").connection) == {"path": "/run/r s.sock", "db": 2}
    tls = redis_options("rediss://host?ssl_ca_certs=/ca.pem").connection
    assert (tls["ssl_ca_certs"], tls["ssl_cert_reqs"], tls["ssl_check_hostname"]) == ("/ca.pem", "required", True)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("redis://:hunter2@host", "has a password in it"),
        ("redis://user:hunter2@host", "has a password in it"),
        ("rediss://host?password=hunter2", "unknown parameter password"),
        ("redis://user@host", "without a password"),
        ("http://host", "write redis://"),
        ("host:6379", "write redis://"),
        ("redis://host:port", "write redis://"),
        ("redis://host:0", "write redis://"),
        (f"redis://host:{'9' * 5000}", "write redis://"),
        ("redis://host/zero", "names a database that is no number"),
        (f"redis://host/{'1' * 5000}", "names a database that is no number, or is too large for one"),
        ("unix:///run/r.sock?db=1234567890", "names a database that is no number, or is too large for one"),
        ("redis://u/hunter2@host", "names a database that is no number"),
        ("redis://hunter2@host", "names a user without a password"),
        ("unix://relative/path", "three slashes"),
        ("rediss://host?ssl_cert_reqs=none", "unknown parameter ssl_cert_reqs"),
    ],
)
def test_a_url_that_cannot_be_used_is_bad_usage_and_shows_no_secret(url: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as refused:
        redis_options(url)
    assert refused.value.exit_code == 2
    assert "hunter2" not in str(refused.value)


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        redis_options("redis://u:p@h/x?y=1", tmp_path / "absent")
    assert len(refused.value.problems) == 4


def test_an_empty_password_file_is_bad_usage(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        redis_options("redis://h", tmp_path / "p")


@pytest.mark.parametrize("username", [None, "loader"])
def test_a_password_of_any_characters_from_a_file(server: Server, tmp_path: Path, username: str | None) -> None:
    server.command("ACL", "SETUSER", "loader", "on", "~*", "+@all", f">{ALL_CHARACTERS}")
    server.command("CONFIG", "SET", "requirepass", ALL_CHARACTERS)
    password_file = tmp_path / "password"
    password_file.write_bytes(ALL_CHARACTERS.encode() + b"\n")
    url = server.url if username is None else server.url.replace("unix://", f"unix://{username}@")
    store = RunStore(redis_options(url, password_file), "run")
    store.publish_control({"a": "1"})
    assert store.read_control() == {"a": "1"}
    with pytest.raises(StoreError, match=r"Authentication required.*; give its password with --redis-password-file$"):
        RunStore(redis_options(server.url), "run").read_control()
    # A password that is changed while the run goes on: the next connect reads the file again.
    password_file.write_text("new\r\n")
    server.command_as(store, "ACL", "SETUSER", "loader", "resetpass", ">new")
    server.command_as(store, "CONFIG", "SET", "requirepass", "new")
    store.close()
    assert store.read_control() == {"a": "1"}
    store.close()


def test_the_secret_is_not_in_an_error(tmp_path: Path, server: Server) -> None:
    (tmp_path / "p").write_text("hunter2")
    store = RunStore(redis_options(server.url, tmp_path / "p"), "run")
    with pytest.raises(StoreError) as refused:
        store.read_control()
    assert "hunter2" not in str(refused.value)
    assert server.url in str(refused.value)


def test_control_durable_and_ttl_touch_one_run_only(shared_server: Server) -> None:
    one, other = shared_server.store(f"a-{secrets.token_hex(4)}"), shared_server.store(f"b-{secrets.token_hex(4)}")
    for store in (one, other):
        store.publish_control({"t0": "5", "ü": "ß"})
        store.publish_durable({"w:1": 7})
        store.add_batches([(BatchKind.REQUESTS, b"x"), (BatchKind.HEALTH, b"y")])
    assert one.durable() == {"w:1": 7}
    assert one.read_control() == {"t0": "5", "ü": "ß"}
    one.ttl(3600)
    # There is no stream of arrivals, since none were put there.
    assert [shared_server.command("TTL", key) for key in one._keys()] == [3600, 3600, -2, 3600, 3600]
    assert [shared_server.command("TTL", key) for key in other._keys()] == [-1, -1, -2, -1, -1]
    assert (other.durable(), len(other.read_batches({BatchKind.REQUESTS: "0"}, block_ms=0, count=9))) == ({"w:1": 7}, 1)
    assert one._keys() == [
        f"vllm_locust:1:run:{one.run_id}:{name}" for name in ("records", "health", "arrivals", "durable", "control")
    ]
    one.close()
    other.close()


def test_each_refused_batch_is_told_apart_from_the_others(shared_server: Server) -> None:
    store = shared_server.store(f"r-{secrets.token_hex(4)}")
    shared_server.command("SET", store._keys()[1], "not a stream")
    taken, refused = store.add_batches([(BatchKind.REQUESTS, b"x"), (BatchKind.HEALTH, b"y")])
    assert isinstance(taken, str)
    assert isinstance(refused, StoreError)
    assert "WRONGTYPE" in str(refused)
    assert store.has_entry(BatchKind.REQUESTS, taken)
    store.delete_entries(BatchKind.REQUESTS, [taken])
    assert not store.has_entry(BatchKind.REQUESTS, taken)
    store.close()


def test_a_server_that_is_away_is_a_store_error_and_returns_at_once(server: Server) -> None:
    store = server.store("run")
    first = store.run_id_of_server()
    server.kill()
    with pytest.raises(StoreError, match="could not tell its run_id"):
        store.run_id_of_server()
    server.start()
    wait_until(lambda: store.run_id_of_server() != first)
    store.close()


def test_what_the_durable_hash_holds_is_checked(shared_server: Server) -> None:
    store = shared_server.store(f"d-{secrets.token_hex(4)}")
    shared_server.command("HSET", store._keys()[-2], "w", "-1")
    with pytest.raises(StoreError, match="not a batch number"):
        store.worker_status("w")
    shared_server.command("HSET", store._keys()[-2], "v", "7")
    assert store.durable() == {"v": 7}, "a stranger's field stops nobody else"
    store.close()


def test_a_server_that_evicts_is_refused(server: Server) -> None:
    store = server.store("run")
    assert store.check_server().maxmemory_bytes is None
    server.command("CONFIG", "SET", "maxmemory", "100mb")
    assert store.check_server().maxmemory_bytes == 100 * 1024 * 1024
    server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(UsageError, match="evicts keys"):
        store.check_server()
    store.close()


def test_a_cluster_is_refused() -> None:
    server = Server("--cluster-enabled", "yes")
    store = server.store("run")
    try:
        with pytest.raises(UsageError, match="Cluster, which is not supported"):
            store.check_server()
    finally:
        store.close()
        server.close()


def test_the_probe_of_least_round_trip_gives_the_offset() -> None:
    # Local wall = monotonic + 1,000,000, server = local + 5,000. Round trips of 400, 100 and 900.
    times = iter([1_000, 1_400, 2_000, 2_100, 3_000, 3_900])
    walls = iter([1_001_000, 1_002_000, 1_003_000])
    server = iter([1_001_000 + 5_000 + 100, 1_002_000 + 5_000 + 50, 1_003_000 + 5_000 + 1])
    measured = measure_clock_offset(
        lambda: next(server), "r", probes=3, unix_ns=lambda: next(walls), monotonic_ns=lambda: next(times)
    )
    assert measured == ClockOffset(
        measured_unix_ns=1_002_050,
        measured_monotonic_ns=2_050,
        offset_ns=5_000 + 500,
        uncertainty_ns=50 + 500,
        redis_run_id="r",
    )


def test_the_real_server_on_this_host_is_within_the_uncertainty(shared_server: Server) -> None:
    store = shared_server.store(f"c-{secrets.token_hex(4)}")
    measured = measure_clock_offset(store.server_time_unix_ns, store.run_id_of_server(), probes=20)
    assert abs(measured.offset_ns) <= measured.uncertainty_ns
    store.publish_clock("w|1:x", [measured, measured])
    store.publish_control({"t0": "1"})
    lines = store.read_control()["clock:w|1:x"].splitlines()
    assert [ClockOffset(**json.loads(line)) for line in lines] == [measured, measured]
    store.close()


def test_only_one_module_imports_the_client() -> None:
    package = Path(__file__).parents[2] / "vllm_locust"
    found = subprocess.run(["grep", "-rlE", r"^\s*(import|from) redis", package], capture_output=True, text=True)
    assert found.stdout.split() == [str(package / "store" / "redis_store.py")]


@pytest.mark.parametrize("step", ["publish_control", "read_batches"])
def test_a_trial_that_fails_half_way_leaves_nothing_for_long(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def refused(*_: object, **__: object) -> None:
        raise StoreError("half-way")

    server = Server()
    try:
        monkeypatch.setattr(RunStore, step, refused)
        with pytest.raises(StoreError, match="half-way"):
            round_trip(redis_options(server.url))
        wait_until(lambda: not server.command("KEYS", f"{KEY_PREFIX}doctor-*"), 5)
    finally:
        server.close()
