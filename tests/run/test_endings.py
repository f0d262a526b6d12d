"""Every way in which a run may end writes a complete, merged run of what was done."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.run.simulated import (
    CHAT,
    FAST,
    Distributed,
    LocustRun,
    SimServer,
    end_of,
    environment,
    free_port,
    get,
    processes,
    run_locust,
    simserver,
    start_locust,
    wait_for_text,
    wait_for_web,
)

pytestmark = pytest.mark.timeout(120)

FILES = ("run.json", "requests.parquet", "workers.parquet", "summary.json", "report.txt", "report.html")
LOAD = ("-u", "8", "-r", "8", "--warmup-requests", "8", "--max-tokens", "20", "--force-length", "--run-dir", "run")


def assert_complete(run: LocustRun, server: SimServer) -> None:
    for name in FILES:
        assert (run.run_dir / name).stat().st_size > 0, run.output
    server.stop()
    sent = {row["request_id"] for row in server.truth()}
    recorded = [row["request_id"] for row in run.requests()]
    assert len(recorded) == len(set(recorded)) > 20, run.output
    assert set(recorded) == sent
    assert {row["outcome"] for row in run.requests()} == {"ok"}


@pytest.mark.parametrize("workers", [0, 2], ids=["one process", "two workers"])
@pytest.mark.parametrize("word", ["INT", "TERM"])
def test_a_signal_ends_the_run_and_keeps_its_records(tmp_path: Path, word: str, workers: int) -> None:
    distributed = processes(workers) if workers else ()
    with simserver(tmp_path, *FAST) as server:
        load = start_locust(tmp_path, server.url, "--headless", "--only-summary", "-t", "60s", *LOAD, *distributed)
        # Enough for the warm-up to be over: the master learns of completions once a second.
        wait_for_text(server.truth_log, 250)
        # Ctrl-C reaches the whole foreground group, kill -TERM the one process that it names.
        signal_to = os.killpg if word == "INT" else os.kill
        signal_to(load.pid, getattr(signal, f"SIG{word}"))
        run = end_of(load, tmp_path, 40)
        assert_complete(run, server)
    summary = run.summary
    # 4 where the machine is so busy that the generator itself says so.
    assert run.exit_code in (0, 4), run.output
    assert summary["verdict"]["status"] != "valid"
    assert "stopped_early" in [reason["code"] for reason in summary["verdict"]["reasons"]]
    assert summary["stages"][0]["requests"]["ok"] > 0


def test_a_master_whose_workers_are_all_lost_merges_and_ends(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        load = ("-u", "8", "-r", "8", "-t", "60s", "--warmup-requests", "0", "--max-tokens", "20", "--force-length")
        test = Distributed(tmp_path, server.url, 2, *load, "--drain-timeout", "1s", locustfile=CHAT)
        wait_for_text(server.truth_log, 250)
        for worker in test.workers:
            os.killpg(worker.pid, signal.SIGKILL)
        run = test.end()
    assert "The last worker went missing" in run.output
    assert run.exit_code == 1, run.output
    assert all((run.run_dir / name).exists() for name in FILES)
    described = run.json("run.json")
    assert sorted(described["workers"]["missing"]) == sorted(described["workers"]["ids"])
    assert {"workers_missing", "stopped_early"} <= {reason["code"] for reason in run.summary["verdict"]["reasons"]}


@pytest.mark.parametrize("workers", [0, 2], ids=["one process", "two workers"])
def test_ctrl_c_before_the_run_is_one_line(tmp_path: Path, workers: int) -> None:
    distributed = processes(workers) if workers else ()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        load = start_locust(tmp_path, url, "--headless", "--only-summary", "-t", "1s", *LOAD, *distributed)
        silent.settimeout(30)
        asked, _ = silent.accept()
        with asked:
            os.killpg(load.pid, signal.SIGINT)
            run = end_of(load, tmp_path, 40)
    assert run.exit_code == 1, run.output
    assert "vllm-locust: interrupted before the run began; no load was sent\n" in run.output
    assert "Traceback" not in run.output
    assert not run.run_dir.exists()


def test_stop_in_the_web_ui_merges_and_a_second_run_can_follow(tmp_path: Path) -> None:
    port = free_port()
    web = f"http://127.0.0.1:{port}"
    with simserver(tmp_path, *FAST) as server:
        flags = ("--web-host", "127.0.0.1", "--web-port", str(port), "--warmup-requests", "8", "--max-tokens", "20")
        load = start_locust(tmp_path, server.url, *flags, *processes(2), "--run-dir", "runs/web")
        try:
            wait_for_web(web, load)
            for number in (1, 2):
                wait_for_workers(web)
                get(f"{web}/swarm", f"user_count=8&spawn_rate=8&host={server.url}".encode())
                wait_for_text(server.truth_log, 250 * number)
                assert b"Test stopped" in get(f"{web}/stop", b"")
            load.send_signal(signal.SIGTERM)
            ended = end_of(load, tmp_path, 40)
        finally:
            if load.poll() is None:
                os.killpg(load.pid, signal.SIGKILL)
        found = sorted(path.parent for path in (tmp_path / "runs").glob("*/run.json"))
        runs = [LocustRun(ended.exit_code, ended.output, path) for path in found]
        assert [run.run_dir.name for run in runs] == ["web", "web-2"], ended.output
        server.stop()
        sent = [row["request_id"] for row in server.truth()]
    recorded = [row["request_id"] for run in runs for row in run.requests()]
    assert sorted(recorded) == sorted(sent)
    assert all((run.run_dir / name).exists() for run in runs for name in FILES)
    (first, second) = (line for line in ended.output.splitlines() if "Run 2" in line and "warm-up of" in line)
    assert f"{server.url}, model sim, workload sharegpt, 8 users; warm-up of 8 requests or 60 s, then a " in first
    assert first.endswith("window of no set length, until it is stopped; results in runs/web")
    assert second.endswith("results in runs/web-2")
    assert ended.exit_code in (0, 4), ended.output


def wait_for_workers(web: str) -> None:
    for _ in range(100):
        if get(f"{web}/stats/requests").count(b'"ready"') >= 2:
            return
        time.sleep(0.1)
    raise AssertionError("two workers did not get ready")


def test_requests_still_running_at_the_end_of_the_drain_are_censored(tmp_path: Path) -> None:
    with simserver(tmp_path, "--first-token-ms", "5", "--token-interval-ms", "200") as server:
        flags = ("-t", "1s", "--warmup-requests", "0", "--drain-timeout", "1s", "--max-tokens", "1000")
        run = run_locust(tmp_path, server.url, "-u", "4", "-r", "4", "--force-length", *flags)
    rows = run.requests()
    assert [row["outcome"] for row in rows] == ["censored"] * 4, run.output
    assert all(row["chunk_ns"] and row["ttft_ns"] for row in rows), "what had arrived is kept"
    (stage,) = run.summary["stages"]
    assert stage["requests"]["censored"] == 4
    assert stage["ttft_s"]["n"] == 0
    assert stage["ttft_adjusted_s"]["n"] == 4
    assert run.exit_code == 1, "nothing was measured"


def test_a_run_whose_requests_all_fail_writes_everything_and_exits_1(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST, "--fault", "status:share=1") as server:
        run = run_locust(tmp_path, server.url, "-u", "2", "-r", "2", "-t", "1s", "--warmup-requests", "2")
    assert run.exit_code == 1, run.output
    assert all((run.run_dir / name).exists() for name in FILES)
    summary = run.summary
    assert summary["verdict"]["status"] == "invalid"
    assert summary["stages"][0]["ttft_s"] | {"n": 0, "p50": None, "max": None} == summary["stages"][0]["ttft_s"]
    assert {row["outcome"] for row in run.requests()} == {"http_error"}
    assert "500" in (run.run_dir / "report.txt").read_text()


def test_a_run_that_measured_nothing_says_so(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST, "--first-token-ms", "60000") as server:
        flags = ("-t", "1s", "--warmup-requests", "0", "--drain-timeout", "0s")
        run = run_locust(tmp_path, server.url, "-u", "1", "-r", "1", *flags)
    assert run.exit_code == 1, run.output
    assert "nothing_measured" in [reason["code"] for reason in run.summary["verdict"]["reasons"]]
    assert all((run.run_dir / name).exists() for name in FILES)


def test_nobody_reads_the_progress(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        command = [sys.executable, "-m", "locust", "-f", CHAT, "--host", server.url, "--headless", "--only-summary"]
        load = subprocess.Popen(
            [*command, "-t", "2s", "--progress", "json", *LOAD],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env=environment(),
        )
        assert load.stderr is not None
        load.stderr.readline()
        load.stderr.close()
        assert load.wait(timeout=60) in (0, 4)
        assert_complete(LocustRun(0, "", tmp_path / "run"), server)


def test_the_run_time_of_the_start_form_is_the_window(tmp_path: Path) -> None:
    port = free_port()
    web = f"http://127.0.0.1:{port}"
    with simserver(tmp_path, *FAST) as server:
        flags = ("--web-host", "127.0.0.1", "--web-port", str(port), "--warmup-requests", "300", "--max-tokens", "20")
        load = start_locust(tmp_path, server.url, *flags, "--run-dir", "run")
        try:
            wait_for_web(web, load)
            get(f"{web}/swarm", f"user_count=4&spawn_rate=4&run_time=3s&host={server.url}".encode())
            for _ in range(400):
                if (tmp_path / "run" / "report.html").exists():
                    break
                time.sleep(0.1)
            load.send_signal(signal.SIGTERM)
            run = end_of(load, tmp_path, 40)
        finally:
            if load.poll() is None:
                os.killpg(load.pid, signal.SIGKILL)
    window = run.json("run.json")["window"]
    assert 2.9 < (window["end_unix_ns"] - window["start_unix_ns"]) / 1e9 < 3.5, run.output
    assert run.json("run.json")["stopped_early"] is None


def test_the_key_does_not_go_to_a_server_that_only_the_start_form_names(tmp_path: Path) -> None:
    port = free_port()
    web = f"http://127.0.0.1:{port}"
    with simserver(tmp_path, *FAST, VLLM_API_KEY="right") as server, socket.create_server(("127.0.0.1", 0)) as thief:
        thief.settimeout(3)
        flags = ("--web-host", "127.0.0.1", "--web-port", str(port))
        load = start_locust(tmp_path, server.url, *flags, OPENAI_API_KEY="right")
        try:
            wait_for_web(web, load)
            elsewhere = f"http://127.0.0.1:{thief.getsockname()[1]}"
            get(f"{web}/swarm", f"user_count=1&spawn_rate=1&host={elsewhere}".encode())
            with pytest.raises(TimeoutError):
                thief.accept()
        finally:
            os.killpg(load.pid, signal.SIGKILL)
            output = load.communicate()[0]
    assert "the API key goes only to a server named on the command line" in output


@pytest.mark.parametrize(
    ("shell", "says"),
    [('exec "$@" >&-', ""), ('"$@" | true; exit ${PIPESTATUS[0]}', "standard output cannot be written: Broken pipe")],
    ids=["closed", "reader gone"],
)
def test_the_exit_code_is_the_runs_whoever_reads_its_output(tmp_path: Path, shell: str, says: str) -> None:
    flags = ("--headless", "--only-summary", "--run-dir", "run", "-u", "2", "-r", "2", "-t", "1s")
    load = (*flags, "--warmup-requests", "2", "--max-tokens", "5", "--slo", "p50(e2e)<=1ms")
    with simserver(tmp_path, *FAST) as server:
        run = end_of(start_locust(tmp_path, server.url, *load, on=("bash", "-c", shell, "bash")), tmp_path, 60)
    assert run.exit_code == run.summary["exit_code"] != 0, run.output
    assert says in run.output
    assert "Traceback" not in run.output


def test_users_without_a_connection_pause(tmp_path: Path) -> None:
    load = ("-u", "4", "-r", "4", "-t", "5s", "--warmup-requests", "4", "--max-tokens", "5")
    with simserver(tmp_path, *FAST) as server:
        process = start_locust(tmp_path, server.url, "--headless", "--only-summary", "--run-dir", "run", *load)
        wait_for_text(server.truth_log, 20)
        server.process.kill()
        run = end_of(process, tmp_path)
    refused = [row for row in run.requests() if row["outcome"] == "connect_error"]
    assert len(refused) >= 4, run.output
    (stage,) = run.summary["stages"]
    in_window = sum(row["phase"] == "window" for row in refused)
    assert stage["requests"]["failed_by_outcome"]["connect_error"] == in_window
    for user in range(4):
        sent_ns = sorted(row["sent_unix_ns"] for row in refused if row["user_id"] == user)
        assert sent_ns, "it goes on"
        assert all(after - before >= 990_000_000 for before, after in pairwise(sent_ns))


BLIND = """
from locust import task
from vllm_locust import ChatUser
from vllm_locust.run.web import live_run

look = live_run._Course.look

def look_badly(self, *, last=False):
    if last:
        raise RuntimeError("blind")
    look(self)

live_run._Course.look = look_badly

class Chat(ChatUser):
    @task
    def ask_next(self):
        self.ask(self.next_prompt())
"""


def test_a_live_view_that_fails_at_the_end_leaves_the_run_its_exit_code(tmp_path: Path) -> None:
    locustfile = tmp_path / "blind.py"
    locustfile.write_text(BLIND)
    own = ("--autostart", "--autoquit", "0", "--web-host", "127.0.0.1", "--web-port", str(free_port()))
    load = (*own, "--run-dir", "run", "-u", "2", "-r", "2", "-t", "1s", "--warmup-requests", "2", "--max-tokens", "5")
    with simserver(tmp_path, *FAST) as server:
        process = start_locust(tmp_path, server.url, *load, "--slo", "p50(e2e)<=1ms", locustfile=str(locustfile))
        run = end_of(process, tmp_path, 60)
    assert "RuntimeError: blind" in run.output
    assert run.exit_code == run.summary["exit_code"] != 0, run.output
