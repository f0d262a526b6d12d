from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.store.servers import wait_until
from vllm_locust.errors import StoreError
from vllm_locust.store.embedded import start_embedded
from vllm_locust.store.redis_store import RunStore
from vllm_locust.store.redis_url import redis_options
from vllm_locust.store.schema import BatchKind

REPOSITORY = Path(__file__).parents[2]
STARTER = "from vllm_locust.store.embedded import start_embedded as s; e = s(); print(e.url, flush=True); input()"


def commands_with(text: str) -> list[int]:
    """The processes whose command line holds ``text``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if text.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_it_is_private_holds_no_port_and_leaves_nothing() -> None:
    embedded = start_embedded()
    store = RunStore(redis_options(embedded.url), "run")
    assert stat.S_IMODE(embedded.directory.stat().st_mode) == 0o700
    info = store.check_server()
    assert (info.maxmemory_bytes, info.maxmemory_policy) == (1 << 30, "noeviction")
    assert store._do("tell", "CONFIG", "GET", "port") == [b"port", b"0"]
    (server,) = commands_with(str(embedded.directory))
    store.close()
    embedded.stop()
    assert not embedded.directory.exists()
    wait_until(lambda: not Path(f"/proc/{server}").exists())


def test_beyond_its_memory_it_refuses_and_evicts_nothing() -> None:
    embedded = start_embedded(maxmemory_bytes=4 << 20)
    store = RunStore(redis_options(embedded.url), "run")
    replies = store.add_batches([(BatchKind.REQUESTS, bytes(100_000))] * 100)
    refused = [reply for reply in replies if isinstance(reply, StoreError)]
    assert refused
    assert all("maxmemory" in str(reply) for reply in refused)
    kept = store.read_batches({BatchKind.REQUESTS: "0"}, block_ms=0, count=1000)
    assert 0 < len(kept) == len(replies) - len(refused)
    store.close()
    embedded.stop()


def test_it_stays_where_it_is_told_to_and_holds_nobodys_output_open() -> None:
    leave = STARTER.replace("; input()", "; e.leave(2)")
    parent = subprocess.run(
        [sys.executable, "-c", leave], cwd=REPOSITORY, capture_output=True, text=True, timeout=20, check=True
    )
    store = RunStore(redis_options(parent.stdout.strip()), "run")
    store.check_server()
    store.close()
    directory = Path(parent.stdout.strip().removeprefix("unix://")).parent
    wait_until(lambda: not directory.exists(), 20)
    assert not commands_with(str(directory))


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_its_parent_however_that_ends(ending: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", STARTER],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert parent.stdout is not None
    directory = Path(parent.stdout.readline().decode().strip().removeprefix("unix://")).parent
    assert directory.exists()
    parent.send_signal(ending)
    parent.communicate()
    wait_until(lambda: not directory.exists() and not commands_with(str(directory)))


def test_who_is_connected_when_the_parent_dies_may_finish() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", STARTER], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    url = parent.stdout.readline().decode().strip()
    store = RunStore(redis_options(url), "run")
    store.publish_control({"a": "1"})
    parent.kill()
    parent.communicate()
    with pytest.raises(AssertionError, match="in vain"):
        wait_until(lambda: not Path(url.removeprefix("unix://")).exists(), timeout_s=1.0)
    assert store.read_control() == {"a": "1"}
    store.close()
    wait_until(lambda: not Path(url.removeprefix("unix://")).parent.exists())


def test_the_server_dies_with_a_guard_that_is_killed() -> None:
    embedded = start_embedded()
    assert len(commands_with(str(embedded.directory))) == 1
    os.kill(embedded._guard.pid, signal.SIGKILL)
    wait_until(lambda: not commands_with(str(embedded.directory)))
    embedded.stop()
    assert not embedded.directory.exists()


def test_all_of_it_works_in_a_gevent_process_and_the_loop_goes_on(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.store.gevent_worker", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert (seen["durable"], seen["rows"]) == (True, 300)
    # Not a measurement: a loop that waits for a fsync, an exec or a reply in full would stand for longer than this.
    assert seen["stall_ns"] < 1_000_000_000
    assert list(map(str, tmp_path.glob("spool/*"))) == [seen["spooled"]]
