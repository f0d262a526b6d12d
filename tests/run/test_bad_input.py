"""Bad input: one clear message, exit 2, and no request sent."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from tests.run.simulated import FAST, SimServer, free_port, processes, run_locust, simserver
from tests.store.servers import Server
from vllm_locust.store.rundir import RunDirectory

SHORT = ("-u", "1", "-r", "1", "-t", "1s")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> object:
    with simserver(tmp_path_factory.mktemp("server"), *FAST, VLLM_API_KEY="right") as running:
        yield running


CASES = {
    "unknown model": (("--model", "nope"), "--model: 'nope' is not served"),
    "unreadable workload": (("--workload", "missing.json"), "--workload missing.json"),
    "unknown workload": (("--workload", "missing"), "--workload missing"),
    "unknown transport": (("--transport", "carrier-pigeon"), "--transport: 'carrier-pigeon' is not one of"),
    "unknown api": (("--api", "telepathy"), "--api"),
    "bad duration": (("--drain-timeout", "soon"), "--drain-timeout"),
    "bad number": (("--max-tokens", "0"), "--max-tokens"),
    "bad SLO": (("--slo", "ttft<2s"), "--slo"),
    "bad JSON": (("--extra-body", "{"), "--extra-body"),
    "a flag's key in the extra body": (("--extra-body", '{"model": "x"}'), "--extra-body"),
    "certificate without key": (("--cert-file", "x"), "--cert-file and --key-file"),
    "password in the Redis address": (("--redis-url", "redis://:secret@127.0.0.1/0"), "--redis-password-file"),
    "no Redis there": (("--redis-url", f"redis://127.0.0.1:{free_port()}/0"), "127.0.0.1"),
    "missing key file": (("--api-key-file", "missing.key"), "--api-key-file missing.key"),
    "bad tag": (("--tag", "novalue"), "--tag"),
}


@pytest.mark.parametrize(("flags", "message"), CASES.values(), ids=CASES)
def test_one_message_exit_2_and_nothing_sent(
    server: SimServer, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    before = len(server.truth())
    run = run_locust(tmp_path, server.url, *SHORT, *flags, OPENAI_API_KEY="right")
    assert run.exit_code == 2, run.output
    said = [line for line in run.output.splitlines() if line.startswith("vllm-locust: ")]
    assert len(said) == 1, run.output
    assert message in said[0]
    assert "Traceback" not in run.output
    assert "secret" not in run.output
    assert len(server.truth()) == before


def test_all_faults_are_told_at_once(server: SimServer, tmp_path: Path) -> None:
    run = run_locust(tmp_path, server.url, *SHORT, "--max-tokens", "-3", "--api", "x", OPENAI_API_KEY="right")
    assert run.exit_code == 2
    assert len([line for line in run.output.splitlines() if line.startswith("vllm-locust: ")]) == 2


@pytest.mark.parametrize("key", ["wrong", None])
def test_a_wrong_or_missing_key(server: SimServer, tmp_path: Path, key: str | None) -> None:
    extra = {} if key is None else {"OPENAI_API_KEY": key}
    run = run_locust(tmp_path, server.url, *SHORT, **extra)
    assert run.exit_code == 2, run.output
    assert "401" in run.output
    assert "OPENAI_API_KEY or --api-key-file" in run.output


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://127.0.0.1:{free}", "cannot be reached"),
        ("{server}/elsewhere", "base address"),
        ("127.0.0.1:8000", "is not a server address"),
        ("http://user:secret@127.0.0.1", "--api-key-file"),
        ("ftp://user:secret@127.0.0.1", "--api-key-file"),
        ("http://a..b:8000", "'http://a..b:8000' names no possible host"),
        (None, "no server is given"),
    ],
)
def test_a_wrong_address(server: SimServer, tmp_path: Path, address: str | None, words: str) -> None:
    url = None if address is None else address.format(free=free_port(), server=server.url)
    run = run_locust(tmp_path, url, *SHORT, OPENAI_API_KEY="right")
    assert run.exit_code == 2, run.output
    assert words in run.output
    assert "secret" not in run.output
    assert "Traceback" not in run.output
    assert len([line for line in run.output.splitlines() if line.startswith("vllm-locust: ")]) == 1


def test_a_key_that_no_header_can_hold(server: SimServer, tmp_path: Path) -> None:
    run = run_locust(tmp_path, server.url, *SHORT, OPENAI_API_KEY="secret\nX-Other: 1")
    assert run.exit_code == 2, run.output
    assert "vllm-locust: OPENAI_API_KEY does not hold one line with a key" in run.output
    assert "secret" not in run.output


@pytest.mark.parametrize("flag", ["-t", "--stop-timeout"])
def test_a_time_that_no_clock_can_hold(server: SimServer, tmp_path: Path, flag: str) -> None:
    run = run_locust(tmp_path, server.url, *SHORT, flag, "9999999999999999h", OPENAI_API_KEY="right")
    assert run.exit_code == 2, run.output
    assert run.output.count("'9999999999999999h' is too long a time; write a shorter one") == 1
    assert "Traceback" not in run.output


def test_too_few_descriptors_are_told_once(server: SimServer, tmp_path: Path) -> None:
    """Though the process is master and worker in one."""
    before = len(server.truth())
    run = run_locust(tmp_path, server.url, "-u", "2000000", "-t", "1s", OPENAI_API_KEY="right")
    assert run.exit_code == 2, run.output
    assert run.output.count("file descriptors") == 1, run.output
    assert len(server.truth()) == before
    # It left nothing, so the corrected command may name the same directory.
    assert not run.run_dir.exists()


def test_a_refused_start_leaves_a_directory_as_it_was(tmp_path: Path) -> None:
    kept = tmp_path / "run" / "spool" / "of-another-host"
    kept.parent.mkdir(parents=True)
    kept.touch()
    with simserver(tmp_path, *FAST) as running:
        redis = Server()
        try:
            refused = run_locust(tmp_path, running.url, "-u", "2000000", "-t", "1s", "--redis-url", redis.url)
            keys = cast("list[bytes]", redis.command("KEYS", "*"))
            assert [cast("int", redis.command("TTL", key)) > 0 for key in keys] == [True]
        finally:
            redis.close()
        assert (refused.exit_code, running.truth()) == (2, [])
    assert [path for path in (tmp_path / "run").rglob("*") if path.is_file()] == [kept]
    assert RunDirectory.create(tmp_path / "run").path == tmp_path / "run"


def test_a_replica_without_the_model_of_the_first_is_named(server: SimServer, tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST, "--served-model-name", "another", VLLM_API_KEY="right") as replica:
        targets = ("--target", server.url, "--target", replica.url)
        run = run_locust(tmp_path, server.url, *SHORT, *targets, OPENAI_API_KEY="right")
        assert run.exit_code == 2, run.output
        assert f"--target: GET {replica.url}/v1/models lists another, and not 'sim'" in run.output
        assert replica.truth() == []


def test_workers_end_with_a_master_that_refuses(server: SimServer, tmp_path: Path) -> None:
    run = run_locust(tmp_path, server.url, *SHORT, *processes(2), "--model", "nope", OPENAI_API_KEY="right")
    assert run.exit_code == 2, run.output


def test_the_key_is_nowhere_in_the_results(server: SimServer, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("right\n", encoding="utf-8")
    flags = ("--api-key-file", str(key_file), "--warmup-requests", "1", *processes(2))
    run = run_locust(tmp_path, server.url, "-u", "2", "-r", "2", "-t", "1s", *flags)
    assert run.exit_code in (0, 4), run.output
    assert run.requests()
    for path in run.run_dir.rglob("*"):
        if path.is_file():
            assert b"Bearer" not in path.read_bytes(), path
            assert b"right\n" not in path.read_bytes(), path
    assert "Bearer" not in run.output


def test_a_redis_that_wants_a_password_names_the_flag(server: SimServer, tmp_path: Path) -> None:
    redis = Server("--requirepass", "secret")
    try:
        run = run_locust(tmp_path, server.url, *SHORT, "--redis-url", redis.url, OPENAI_API_KEY="right")
    finally:
        redis.close()
    assert run.exit_code == 2, run.output
    (said,) = (line for line in run.output.splitlines() if line.startswith("vllm-locust: "))
    assert said.endswith("; give its password with --redis-password-file")


def test_a_directory_that_holds_a_run_is_not_written_to(server: SimServer, tmp_path: Path) -> None:
    before = len(server.truth())
    (tmp_path / "run" / "parts").mkdir(parents=True)
    run = run_locust(tmp_path, server.url, *SHORT, OPENAI_API_KEY="right")
    assert run.exit_code == 2, run.output
    assert "vllm-locust: --run-dir run: the directory holds a run already; give another one\n" in run.output
    assert list((tmp_path / "run").iterdir()) == [tmp_path / "run" / "parts"]
    assert len(server.truth()) == before
