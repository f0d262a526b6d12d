"""``experiments.csv`` and ``vllm-locust report --export``, from run directories whose latencies are known."""

from __future__ import annotations

import csv
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.run.run_directories import write_run
from vllm_locust.cli import main

LATENCIES = np.random.default_rng(0).lognormal(-2, 0.2, 50)


def experiments(directory: Path) -> list[dict[str, str]]:
    with (directory / "experiments.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def summary_of(run: Path) -> Any:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def test_each_run_has_one_line_of_its_own_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / name, LATENCIES, tags={"kv": "=cmd()"}) for name in ("one", "two")]
    for run in (*runs, runs[0]):
        main(["report", str(run)])
    capsys.readouterr()
    rows = experiments(tmp_path)
    assert [row["run_id"] for row in rows] == ["one", "two"]
    for row, run in zip(rows, runs, strict=True):
        totals = summary_of(run)["totals"]
        assert float(row["ttft_p99_s"]) == totals["ttft_s"]["p99"]
        assert float(row["output_tokens_per_s"]) == totals["output_tokens_per_s"]
        assert row["goodput_rps"] == str(totals["goodput_rps"])
        assert row["gpu_utilization"] == ""
        assert row["tags"] == '{"kv": "=cmd()"}'
        assert row["verdict"] == summary_of(run)["verdict"]["status"]


def test_the_same_run_in_another_directory_has_a_line_of_its_own(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", LATENCIES)
    main(["report", str(run)])
    poorer = write_run(tmp_path / "again", LATENCIES[:0])
    again = json.loads((poorer / "run.json").read_text(encoding="utf-8")) | {"run_id": "run"}
    (poorer / "run.json").write_text(json.dumps(again), encoding="utf-8")
    main(["report", str(poorer)])
    assert [(row["run_id"], row["run_dir"], row["requests"]) for row in experiments(tmp_path)] == [
        ("run", "run", "50"),
        ("run", "again", "0"),
    ]


def test_runs_that_end_at_once_do_not_lose_lines(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run{k}", LATENCIES) for k in range(4)]
    command = [sys.executable, "-m", "vllm_locust", "report"]
    reports = [subprocess.Popen([*command, str(run)], stdout=subprocess.DEVNULL) for run in runs]
    for report in reports:
        report.wait(timeout=100)
    assert sorted(row["run_id"] for row in experiments(tmp_path)) == [f"run{k}" for k in range(4)]


def test_a_table_of_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", LATENCIES)
    (tmp_path / "experiments.csv").write_text("colour\nred\n", encoding="utf-8")
    main(["report", str(run)])
    assert "experiments.csv cannot take the run's line: it has no column run_id" in capsys.readouterr().err
    assert (tmp_path / "experiments.csv").read_text(encoding="utf-8") == "colour\nred\n"
    assert (run / "report.html").exists()


def test_a_table_that_a_spreadsheet_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", LATENCIES)
    table = tmp_path / "experiments.csv"
    table.write_bytes("\ufeffrun_id,run_dir,note\nother,other,é\n".encode())
    main(["report", str(run)])
    assert [(row["run_id"], row["note"]) for row in experiments(tmp_path)] == [("other", "é"), ("run", "")]
    table.write_text("run_id;run_dir\nother;x\n", encoding="utf-8")
    main(["report", str(run)])
    assert "its cells are parted by semicolons" in capsys.readouterr().err
    assert table.read_text(encoding="utf-8") == "run_id;run_dir\nother;x\n"


@pytest.mark.filterwarnings("error")
def test_text_that_is_no_unicode_ends_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "a\ud800\u202eb\x1b"
    server = {"model": hostile, "max_model_len": 4096, "is_vllm": True, "version": hostile}
    run = write_run(tmp_path / "run", LATENCIES, run_name=hostile, tags={"k": hostile}, server=server)
    assert main(["report", str(run), "--export", "csv", "--export", "openmetrics"]) in (0, 4)
    assert capsys.readouterr().err == ""
    for name in ("report.html", "report.txt"):
        page = (run / name).read_text(encoding="utf-8")
        assert "a  b" in page
        assert not set(page) & set("\u202e\x1b")
    (row,) = experiments(tmp_path)
    assert row["run_name"].startswith("a\ufffd")
    assert 'model="a?' in (run / "openmetrics.txt").read_text(encoding="utf-8")


def test_csv_jsonl_and_openmetrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", LATENCIES, failed=[3])
    main(["report", str(run), "--export", "csv", "--export", "jsonl", "--export", "openmetrics"])
    assert f"openmetrics: {run}/openmetrics.txt" in capsys.readouterr().out
    (stage,) = summary_of(run)["stages"]
    with (run / "stages.csv").open(encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["stage_name"], row["requests"], row["failed"]) == ("window", "50", "1")
    # 49 requests, each with 2 gaps.
    few = [f"{metric}_{p}_s" for metric in ("ttft", "tpot", "itl", "chunk_gap", "e2e") for p in ("p90", "p99")]
    assert row["few_samples"].split(" ") == few
    assert experiments(tmp_path)[0]["few_samples"].split(" ") == few
    assert float(row["ttft_p50_s"]) == stage["ttft_s"]["p50"]
    lines = [json.loads(line) for line in (run / "requests.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["ttft_ns"] for line in lines] == [
        None if k == 3 else round(value * 1e9) for k, value in enumerate(LATENCIES.tolist())
    ]
    text = (run / "openmetrics.txt").read_text(encoding="utf-8")
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]  # type: ignore[no-untyped-call]
    (p99,) = (
        one.value for one in samples if one.name == "vllm_locust_run_ttft_seconds" and one.labels["statistic"] == "p99"
    )
    assert p99 == stage["ttft_s"]["p99"]
    assert {one.labels["run_id"] for one in samples} == {"run"}
    assert not any("ttft_from_schedule" in one.name for one in samples)
    flagged = [one for one in samples if one.name == "vllm_locust_run_few_samples"]
    assert [f"{one.labels['metric']}_{one.labels['statistic']}_s" for one in flagged] == few
    assert {one.value for one in flagged} == {1}
    assert {one.labels["model"] for one in samples} == {"m"}


def test_a_model_that_is_not_known_is_no_label(tmp_path: Path) -> None:
    server = {"model": None, "max_model_len": None, "is_vllm": False, "version": None}
    run = write_run(tmp_path / "run", LATENCIES, server=server)
    main(["report", str(run), "--export", "openmetrics"])
    text = (run / "openmetrics.txt").read_text(encoding="utf-8")
    assert 'model=""' in text
    assert "None" not in text


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    run = write_run(tmp_path / "run", LATENCIES)
    assert main(["report", str(run), "--export", tracker]) == 2
    assert f"pip install 'vllm-locust[{tracker}]'" in capsys.readouterr().err


def report_in_its_own_process(run: Path, tracker: str, **variables: str) -> str:
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed: pip install 'vllm-locust[{tracker}]'")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(run.parent), **variables}
    command = [sys.executable, "-m", "vllm_locust", "report", str(run), "--export", tracker]
    done = subprocess.run(
        command, env=environment, cwd=run.parent, capture_output=True, text=True, timeout=110, check=False
    )
    assert f"{tracker}: run" in done.stdout, done.stderr
    return done.stdout


def test_wandb_offline(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", LATENCIES)
    assert "mode offline" in report_in_its_own_process(run, "wandb", WANDB_MODE="offline")
    (kept,) = (run / "wandb").glob("offline-run-*-run/run-run.wandb")
    assert b"ttft_p99_s" in kept.read_bytes()


@pytest.mark.filterwarnings("ignore")  # of its own libraries
def test_mlflow_in_a_local_database(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", LATENCIES, tags={"kv": "fp8"})
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    report_in_its_own_process(run, "mlflow", MLFLOW_TRACKING_URI=uri)
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("vllm-locust")
    assert experiment is not None
    (kept,) = client.search_runs([experiment.experiment_id])
    (stage,) = summary_of(run)["stages"]
    assert kept.data.metrics["ttft_p99_s"] == pytest.approx(stage["ttft_s"]["p99"])
    assert kept.data.params["workload"] == "sharegpt"
    assert kept.data.tags["tag.kv"] == "fp8"
    assert {one.path for one in client.list_artifacts(kept.info.run_id)} == {"run.json", "summary.json", "report.html"}
