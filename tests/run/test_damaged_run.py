"""Files of a run directory that are damaged, gone, or no files: one line names them, and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.bench.synthetic_run import RUN_ID, Shape, write_run
from vllm_locust import cli
from vllm_locust.store.rundir import RunDirectory

pytestmark = pytest.mark.timeout(120)

SHAPE = Shape(workers=2, tokens=5, rows=10, coalesced=0)
ROWS = 40


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("merged") / "run"
    assert write_run(RunDirectory(directory), ROWS * SHAPE.tokens, SHAPE).requests == ROWS
    (directory / "parts" / "control.json").write_text("{}")
    (directory / "parts" / "recorder.json").write_text('{"refused": {}}')
    assert cli.main(["merge", str(directory)]) == 0
    return directory


@pytest.fixture
def run(merged: Path, tmp_path: Path) -> Path:
    shutil.copytree(merged, tmp_path / "run")
    return tmp_path / "run"


def rows(run: Path) -> int:
    return pq.read_metadata(run / "requests.parquet").num_rows


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the command says."""
    capsys.readouterr()
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    assert code in (1, 2), out
    assert err.startswith("vllm-locust: ")
    assert err.count("\n") == 1, err
    return err


JSON_DAMAGE = ["", "null", "[]", '"x"', "7", "[" * 100_000, "\x00garbage", '{"a": 1']


@pytest.mark.parametrize("damage", JSON_DAMAGE, ids=range(len(JSON_DAMAGE)))
@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("run.json", ["merge", "report"]),
        ("parts/control.json", ["merge"]),
        ("parts/recorder.json", ["merge"]),
        ("capacity.json", ["merge", "report"]),
    ],
)
def test_damaged_json_is_named(
    run: Path, capsys: pytest.CaptureFixture[str], name: str, commands: list[str], damage: str
) -> None:
    (run / name).write_text(damage)
    for command in commands:
        assert str(run / name) in refused(capsys, command, str(run))
    assert rows(run) == ROWS


def _places(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Each field that ``run.json`` has, down to the third level."""
    if isinstance(value, dict) and len(path) < 3:
        for key, inside in value.items():
            yield (*path, key)
            yield from _places(inside, (*path, key))


WRONG: list[Any] = [None, "x", [], 1e400, {"a": None}]


def test_no_wrong_value_in_a_run_json_ends_in_a_traceback(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the value is one that may be, the command does its work; else it says what is wrong."""
    good = json.loads((run / "run.json").read_text())
    refusals = 0
    for place in _places(good):
        for value in (*WRONG, "gone"):
            changed = json.loads(json.dumps(good))
            inside = changed
            for key in place[:-1]:
                inside = inside[key]
            if value == "gone":
                del inside[place[-1]]
            else:
                inside[place[-1]] = value
            (run / "run.json").write_text(json.dumps(changed))
            code = cli.main(["report", str(run)])
            err = capsys.readouterr().err
            assert code in (0, 1, 2, 3, 4), place
            if code == 1 and err:
                refusals += 1
                assert str(run / "run.json") in err, (place, value)
    assert refusals > 150


@pytest.mark.parametrize("schema", [2, 99, "x", None])
def test_a_run_json_of_another_version_is_refused(run: Path, capsys: pytest.CaptureFixture[str], schema: Any) -> None:
    content = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(content | {"schema": schema}))
    for command in ("merge", "report"):
        assert f"has schema {schema}, and this version reads 1" in refused(capsys, command, str(run))


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _garbage(path: Path) -> None:
    path.write_bytes(b"\x00" * 5_000)


def _scribbled(path: Path) -> None:
    """The footer is whole, the pages are not."""
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * (len(content) // 3) + content[4 + len(content) // 3 :])


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _without_a_column(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["host"]), path)


def _of_another_type(path: Path) -> None:
    table = pq.read_table(path)
    index = table.schema.get_field_index("host")
    pq.write_table(table.set_column(index, "host", table.column("worker_id").dictionary_encode()), path)


@pytest.mark.parametrize("damage", [_cut, _garbage, _scribbled, _directory, _without_a_column, _of_another_type])
@pytest.mark.parametrize("name", ["requests.parquet", "workers.parquet"])
def test_a_damaged_table_is_named_by_a_report(
    run: Path, capsys: pytest.CaptureFixture[str], name: str, damage: Callable[[Path], None]
) -> None:
    damage(run / name)
    said = refused(capsys, "report", str(run))
    assert (str(run / name) in said) or ("holds no merged run" in said)
    assert "merge" in said


@pytest.mark.parametrize("damage", [_cut, _garbage, _without_a_column])
def test_a_damaged_part_is_named_with_what_to_do(
    run: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    part = run / "parts" / "requests-000001.parquet"
    damage(part)
    said = refused(capsys, "merge", str(run))
    assert str(part) in said
    assert "move it away" in said
    part.unlink()
    (run / "requests.parquet").unlink()
    assert cli.main(["merge", str(run)]) in (1, 4)
    assert rows(run) == ROWS // 2
    summary = json.loads((run / "summary.json").read_text())
    assert "records_lost" in {reason["code"] for reason in summary["verdict"]["reasons"]}, summary["verdict"]


@pytest.mark.parametrize("gone", ["parts", "parts/requests-000002.parquet", "parts/workers-000001.parquet"])
def test_a_merge_without_its_parts_keeps_the_results(run: Path, capsys: pytest.CaptureFixture[str], gone: str) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.suffix in (".parquet", ".json", ".html")}
    path = run / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    said = refused(capsys, "merge", str(run))
    assert "put the missing part files back" in said
    assert {name: (run / name).read_bytes() for name in before} == before


def test_a_merge_leaves_pipes_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "spool").mkdir()
    pipes = [run / "parts" / "requests-000009.parquet", run / "spool" / f"{RUN_ID}.w-123456789012.spool"]
    (run / "parts" / "telemetry").mkdir()
    pipes.append(run / "parts" / "telemetry" / "gpu-000001.parquet")
    for pipe in pipes:
        os.mkfifo(pipe)
    assert cli.main(["merge", str(run)]) == 0
    err = capsys.readouterr().err
    for pipe in pipes:
        assert err.count(f"{pipe} is left out: it is no regular file") == 1


def test_a_damaged_telemetry_part_is_told_and_left_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = run / "parts" / "telemetry" / "host-000001.parquet"
    part.parent.mkdir()
    part.write_bytes(b"garbage")
    assert cli.main(["merge", str(run)]) == 0
    err = capsys.readouterr().err
    assert str(part) in err
    assert "left out" in err


def test_a_name_that_is_not_utf_8_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/r\xff")
    os.mkdir(name)
    for command in ("merge", "report"):
        assert "is not UTF-8" in refused(capsys, command, name)


def test_an_output_that_takes_only_ascii_is_no_failure(merged: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vllm_locust", "report", str(merged)],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"requests attempted" in done.stdout
    assert done.stdout.isascii()
