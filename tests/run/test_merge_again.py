"""A merge that is repeated, killed, or not alone: the results are the same bytes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.synthetic_run import RUN_ID, Shape, workers_of, write_run
from tests.run.simulated import environment
from tests.store.servers import Server
from vllm_locust.store.lock_file import try_lock
from vllm_locust.store.rundir import RunDirectory
from vllm_locust.store.schema import encode_batch
from vllm_locust.store.spool import Spool, spool_path

pytestmark = pytest.mark.timeout(180)

SHAPE = Shape(workers=2, tokens=20, rows=40, coalesced=0)
RESULTS = ("run.json", "requests.parquet", "workers.parquet", "summary.json", "report.txt", "report.html")


def command(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=directory,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def contents(run_dir: Path) -> dict[str, bytes]:
    return {name: (run_dir / name).read_bytes() for name in RESULTS}


@pytest.fixture(scope="module")
def unmerged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers, whose batches are in parts, and of a third one, whose are in a spool."""
    directory = tmp_path_factory.mktemp("unmerged")
    written = write_run(RunDirectory(directory / "run"), 8_000, SHAPE)
    assert written.parts == 5
    far = workers_of(RUN_ID, 100_000.0, replace(SHAPE, workers=3))[2]
    spool = Spool(spool_path(directory / "run" / "spool", RUN_ID, far.id))
    made = [far.next_batch() for _ in range(3)]
    spool.append([encode_batch(batch.header, batch.rows) for batch in made])
    spool.close(remove=False)
    return directory


@pytest.fixture(scope="module")
def merged(unmerged: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("merged")
    shutil.copytree(unmerged / "run", directory / "run")
    code, out, err = ended(command(directory, "vllm_locust", "merge", "run"))
    assert (code, err) == (0, ""), out
    assert "requests attempted" in out
    return directory


def test_a_second_merge_and_a_report_give_the_same_bytes(merged: Path) -> None:
    once = contents(merged / "run")
    for words in (("merge", "run"), ("report", "run"), ("merge", "run")):
        code, _, err = ended(command(merged, "vllm_locust", *words))
        assert (code, err) == (0, "")
        assert contents(merged / "run") == once, words


def test_a_merge_that_was_killed_anywhere_is_completed_by_the_next(
    unmerged: Path, merged: Path, tmp_path: Path
) -> None:
    """Each file is written beside its place and renamed, so between two renames nothing else can be seen."""
    expected = contents(merged / "run")
    cut_short = []
    for step in range(1, 20):
        directory = tmp_path / str(step)
        shutil.copytree(unmerged / "run", directory / "run")
        code, out, err = ended(command(directory, "tests.run.killed_merge", "run", str(step)))
        if code == 0:
            break
        assert code == -signal.SIGKILL, out + err
        cut_short.append({name for name in RESULTS if (directory / "run" / name).exists()})
        code, out, err = ended(command(directory, "vllm_locust", "merge", "run"))
        assert (code, err) == (0, ""), out
        assert contents(directory / "run") == expected, step
        assert not [*directory.rglob("*.tmp")], "what was half written is gone"
    # A part of the spool, then at least each result after the other.
    assert {1, 2, 3, 4, 5} <= {len(there) for there in cut_short}
    assert len(cut_short) >= 7


def test_of_two_merges_one_waits(merged: Path) -> None:
    expected = contents(merged / "run")
    lock = try_lock(RunDirectory(merged / "run").merge_lock)
    assert lock is not None
    assert try_lock(RunDirectory(merged / "run").merge_lock) is None
    waiting = [command(merged, "vllm_locust", words, "run") for words in ("merge", "report", "merge")]
    try:
        for process in waiting:
            assert process.stderr is not None
            assert process.stderr.readline() == "vllm-locust: waiting for another merge of run to end\n"
    finally:
        os.close(lock)
    for process in waiting:
        code, out, err = ended(process)
        assert (code, err) == (0, ""), out
    assert contents(merged / "run") == expected


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    redis = Server()
    store = redis.store(RUN_ID)
    try:
        store.publish_control({"run": "{}"})
        (tmp_path / "file").touch()
        words = ("merge", RUN_ID, "--redis-url", redis.url, "--run-dir", "file/run")
        code, _, err = ended(command(tmp_path, "vllm_locust", *words))
    finally:
        store.close()
        redis.close()
    assert (code, err) == (1, "vllm-locust: the run directory file/run cannot be made: Not a directory\n")
