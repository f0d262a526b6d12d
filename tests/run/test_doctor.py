"""``vllm-locust doctor`` against real servers, and against what is missing or wrong."""

from __future__ import annotations

import json
import re
import resource
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import make_certificate
from tests.collect.fake_nvml import FakeDevice, FakeNvml
from tests.load.scripted_server import serving, whole
from tests.run.simulated import environment, free_port, simserver
from tests.store.servers import Server, wait_until


def doctor(*flags: str, nofile: int | None = None, **extra: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the checks by name."""

    def limit() -> None:
        if nofile is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (nofile, nofile))

    done = subprocess.run(
        [sys.executable, "-m", "vllm_locust", "doctor", "--json", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment(**extra),
        preexec_fn=limit,
    )
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert told["failed"] == (done.returncode == 1)
    return done.returncode, {check["name"]: check for check in told["checks"]}


def failing(checks: dict[str, Any]) -> list[str]:
    return sorted(name for name, check in checks.items() if check["status"] == "failed")


@pytest.fixture
def redis() -> Iterator[Server]:
    server = Server("--maxmemory", "64mb", "--maxmemory-policy", "noeviction")
    yield server
    server.close()


def test_one_machine_with_a_server(tmp_path: Path) -> None:
    with simserver(tmp_path, VLLM_API_KEY="key") as server:
        run_dir = ("--run-dir", str(tmp_path / "deep" / "runs"))
        code, checks = doctor("--host", server.url, *run_dir, OPENAI_API_KEY="key")
        refused_code, refused = doctor("--host", server.url, *run_dir, OPENAI_API_KEY="wrong")
    assert (code, failing(checks)) == (0, [])
    assert checks["kernel stamps"]["figures"]["stamped"] == 200
    assert checks["server"]["figures"]["is_vllm"] is True
    assert "accepts the API key" in checks["server"]["found"]
    assert checks["server health"]["figures"]["status"] == 200
    assert checks["server metrics"]["status"] == "ok"
    assert checks["run directory"]["figures"]["directory"] == str(tmp_path)
    assert not (tmp_path / "deep").exists()
    assert checks["Redis"]["found"].startswith("the embedded Valkey starts")
    assert (refused_code, failing(refused)) == (1, ["server"])
    assert "refuses this API key" in refused["server"]["found"]
    assert not server.truth(), "it never sends a request"


def test_a_worker(tmp_path: Path, redis: Server) -> None:
    flags = ("--role", "worker", "--redis-url", redis.url, "--run-dir", str(tmp_path))
    nobody = str(free_port())
    code, checks = doctor(*flags, "--users", "4000", "--master-host", "127.0.0.1", "--master-port", nobody, nofile=1024)
    assert code == 1
    assert failing(checks) == ["descriptors", "master"]
    assert "set ulimit -Hn 4096" in checks["descriptors"]["fix"]
    assert checks["Redis rights"]["status"] == "ok"
    assert abs(checks["clock offset"]["figures"]["offset_s"]) < 0.1
    assert redis.command("DBSIZE") == 0, "nothing is left of it"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        _, checks = doctor(*flags, "--processes", "8", "--master-host", "127.0.0.1", "--master-port", port)
    assert checks["master"]["found"] == f"what listens on 127.0.0.1:{port} is no Locust master"
    assert checks["CPU"]["status"] == "warning"


MASTER = """
import sys
from locust.rpc import zmqrpc
server = zmqrpc.Server("127.0.0.1", 0)
print(server.port, flush=True)
sys.stdin.read()
"""


def test_the_master_is_known_by_its_greeting() -> None:
    with subprocess.Popen([sys.executable, "-c", MASTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as master:
        assert master.stdout is not None
        port = master.stdout.readline().decode().strip()
        _, checks = doctor("--role", "worker", "--master-host", "127.0.0.1", "--master-port", port)
        code, own = doctor("--role", "master", "--master-port", port)
        master.communicate(b"")
    assert checks["master"]["status"] == "ok"
    assert (code, failing(own)) == (1, ["master port"])
    assert checks["Redis"]["status"] == "skipped"


def test_a_redis_that_will_not_do(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("p@:/?#%& ü\"'\n", encoding="utf-8")
    wrong = tmp_path / "wrong"
    wrong.write_text("hunter2")
    server = Server("--maxmemory", "64mb", "--maxmemory-policy", "noeviction")
    try:
        server.command("CONFIG", "SET", "requirepass", password.read_text(encoding="utf-8").rstrip("\n"))
        flags = ("--role", "redis", "--redis-url", server.url, "--redis-password-file")
        assert doctor(*flags, str(password))[0] == 0
        code, checks = doctor(*flags, str(wrong))
        assert (code, failing(checks)) == (1, ["Redis"])
        assert "give its password with --redis-password-file" in checks["Redis"]["found"]
        assert "hunter2" not in json.dumps(checks)
    finally:
        server.close()
    code, checks = doctor("--role", "redis", "--redis-url", f"redis://127.0.0.1:{free_port()}/0")
    assert (code, failing(checks)) == (1, ["Redis"])
    assert "refused" in checks["Redis"]["found"]


@pytest.mark.parametrize(
    ("setting", "name", "status", "words"),
    [
        (("maxmemory-policy", "allkeys-lru"), "Redis", "failed", "evicts keys"),
        (("maxmemory-policy", "volatile-lru"), "Redis", "warning", "may be evicted"),
        (("maxmemory", "0"), "Redis", "warning", "set maxmemory"),
        (("appendonly", "yes"), "Redis", "warning", "no second copy"),
        (("maxmemory", "1"), "Redis rights", "failed", "when used memory >"),
        (("min-replicas-to-write", "1"), "Redis rights", "failed", "NOREPLICAS"),
    ],
)
def test_a_setting_of_redis_that_hurts(
    redis: Server, setting: tuple[str, str], name: str, status: str, words: str
) -> None:
    redis.command("CONFIG", "SET", *setting)
    code, checks = doctor("--role", "redis", "--redis-url", redis.url)
    assert checks[name]["status"] == status
    assert words in f"{checks[name]['found']} {checks[name]['fix']}"
    assert code == (1 if status == "failed" else 0)


def test_a_replica_is_refused(redis: Server) -> None:
    redis.command("REPLICAOF", "127.0.0.1", str(free_port()))
    code, checks = doctor("--role", "master", "--redis-url", redis.url, "--master-port", str(free_port()))
    assert code == 1
    assert "give the address of its primary" in checks["Redis"]["fix"]
    assert "read only replica" in checks["Redis rights"]["found"]


def test_each_user_of_the_acl_has_what_its_role_needs_and_no_more(redis: Server, tmp_path: Path) -> None:
    rules = (Path(__file__).parents[2] / "k8s" / "secrets" / "redis.acl").read_text(encoding="utf-8")
    for name, rights in re.findall(r"^user (\w+) on #\{\w+\} (.*)$", rules, re.MULTILINE):
        redis.command("ACL", "SETUSER", name, "on", f">{name}", *rights.split())
        (tmp_path / name).write_text(name)
    found = {}
    for role, user in (("master", "master"), ("worker", "worker"), ("gpu", "collector"), ("master", "worker")):
        url = redis.url.replace("unix://", f"unix://{user}@")
        flags = ("--redis-url", url, "--redis-password-file", str(tmp_path / user))
        _, checks = doctor("--role", role, *flags, "--master-port", str(free_port()))
        found[role, user] = checks["Redis rights"]["status"], checks["Redis rights"]["figures"]["refused"]
    assert [found[pair] for pair in list(found)[:3]] == [("ok", {})] * 3
    status, refused = found["master", "worker"]
    assert status == "failed"
    assert "HSET vllm_locust:1:run:*:durable" in refused
    assert "XREAD vllm_locust:1:run:*:records" in refused
    assert "XADD vllm_locust:1:run:*:records" not in refused
    wait_until(lambda: redis.command("DBSIZE") == 0)


def gpu_checks(device: FakeDevice | None) -> dict[str, Any]:
    """In this process, since the driver is one of the tests."""
    from vllm_locust.run.doctor.host import check_gpus

    assert device is not None
    check = check_gpus(lambda: FakeNvml(device), required=True)
    return {"status": check.status.value, "found": check.found, "figures": check.figures}


def test_gpus() -> None:
    told = gpu_checks(FakeDevice())
    assert told["status"] == "ok"
    assert told["figures"]["driver"] == "580.95.05"
    assert list(told["figures"]["gpm"].values()) == [True]
    old = gpu_checks(FakeDevice(gpm_supported=False, fails={"temperature": "NOT_SUPPORTED"}))
    assert old["status"] == "warning"
    assert "no temperature_c: Not Supported" in old["found"]
    assert list(old["figures"]["gpm"].values()) == [False]


def test_no_driver_fails_a_gpu_host_only(redis: Server) -> None:
    code, checks = doctor("--role", "gpu", "--redis-url", redis.url, CUDA_VISIBLE_DEVICES="")
    if checks["GPUs"]["status"] == "ok":
        pytest.skip("this machine has a GPU")
    assert (code, failing(checks)) == (1, ["GPUs"])
    assert checks["GPUs"]["fix"] == "run it on the GPU host (in a container: with the NVIDIA runtime)"


def test_a_certificate_is_checked(tmp_path: Path) -> None:
    made = make_certificate(tmp_path)
    answers = {"GET": (whole(b'{"data":[{"id":"m"}]}'),)}
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(made.cert, made.key)
    with serving(answers, tls=tls) as server:
        url = f"https://127.0.0.1:{server.listener.getsockname()[1]}"
        flags = ("--role", "worker", "--host", url)
        _, unknown = doctor(*flags)
        _, known = doctor(*flags, "--ca-file", str(made.ca))
        _, unchecked = doctor(*flags, "--insecure")
    assert failing(unknown) == ["server"]
    assert "certificate" in unknown["server"]["found"]
    assert known["server"]["status"] == "ok"
    assert unchecked["server"]["status"] == "warning"


def test_bad_usage_is_told_at_once() -> None:
    flags = ("--role", "gpu", "--users", "0", "--master-port", "70000", "--host", "ftp://x")
    done = subprocess.run(
        [sys.executable, "-m", "vllm_locust", "doctor", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment(),
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 4, done.stderr
    for words in ("--users", "--master-port", "--role gpu", "--host"):
        assert words in done.stderr
