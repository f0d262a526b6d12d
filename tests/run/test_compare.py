"""``vllm-locust compare`` over run directories whose latencies are known."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
import pytest

from tests.run.run_directories import write_run
from vllm_locust.cli import main


def latencies(seed: int, factor: float = 1.0, n: int = 1_200) -> npt.NDArray[np.float64]:
    return factor * np.random.default_rng(seed).lognormal(-2, 0.2, n)


def compared(tmp_path: Path, *arguments: str, code: int = 0) -> Any:
    written = tmp_path / "result.json"
    assert main(["compare", *arguments, "--json", str(written)]) == code
    return json.loads(written.read_text(encoding="utf-8"))


def row(result: Any, quantity: str, comparison: int = 0) -> Any:
    (stage,) = result["comparisons"][comparison]["stages"]
    (found,) = (one for one in stage["differences"] if one["quantity"] == quantity)
    return found


def test_numbers_are_those_of_the_summaries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [write_run(tmp_path / name, latencies(k, 1 + k / 4)) for k, name in enumerate(("base", "new"))]
    result = compared(tmp_path, *map(str, paths))
    summaries = [json.loads((path / "summary.json").read_text()) for path in paths]
    for metric in ("ttft", "tpot", "itl", "e2e"):
        for statistic in ("mean", "p50", "p90", "p99"):
            found = row(result, f"{statistic}({metric})")
            expected = [one["stages"][0][f"{metric}_s"][statistic] for one in summaries]
            assert [found["base"], found["new"]] == pytest.approx(expected, rel=1e-9), (metric, statistic)
    for name in ("requests_per_s", "output_tokens_per_s", "goodput_rps", "good_fraction", "failed_fraction"):
        found = row(result, name)
        assert [found["base"], found["new"]] == pytest.approx([one["stages"][0][name] for one in summaries]), name
    # One token in each chunk: the gaps are the ITLs.
    (stage,) = result["comparisons"][0]["stages"]
    assert not any("chunk_gap" in one["quantity"] for one in stage["differences"])
    shift = row(result, "p50(ttft)")
    assert shift["mark"] == "worse"
    low, high = shift["change_ci95"]
    assert low < 0.25 < high
    assert row(result, "p50(tpot)")["mark"] == "no evidence"
    shown = capsys.readouterr().out
    assert "p50(ttft)" in shown
    assert "no setting differs" in shown
    assert "one run on a side" in shown


def test_a_regression_is_exit_3_with_markdown_and_junit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, slower = (write_run(tmp_path / n, latencies(k, f)) for k, n, f in ((0, "base", 1.0), (1, "new", 1.2)))
    junit, page = tmp_path / "junit.xml", tmp_path / "page.md"
    limits = ("--fail-if", "p99(ttft) +5%", "--fail-if", "p50(tpot) +5%")
    compared(tmp_path, str(base), str(slower), *limits, "--junit", str(junit), "--markdown", str(page), code=3)
    assert "a regression: p99(ttft) +5% in stage window" in capsys.readouterr().err
    (suite,) = ElementTree.parse(junit).getroot()
    assert suite.attrib["tests"] == "2"
    assert suite.attrib["failures"] == "1"
    assert [(case.attrib["name"], [one.tag for one in case]) for case in suite] == [
        ("p99(ttft) +5% [stage window]", ["failure"]),
        ("p50(tpot) +5% [stage window]", ["system-out"]),
    ]
    text = page.read_text(encoding="utf-8")
    assert "❌ failed: p99(ttft) +5%" in text
    assert "| `p50(ttft)` |" in text
    assert "**worse**" in text
    # The other way round it is an improvement.
    result = compared(tmp_path, str(slower), str(base), *limits)
    assert row(result, "p99(ttft)")["mark"] == "better"


def test_repeated_runs_are_given_by_commas(tmp_path: Path) -> None:
    base = ",".join(str(write_run(tmp_path / f"b{k}", latencies(k, n=400))) for k in range(3))
    new = ",".join(str(write_run(tmp_path / f"n{k}", latencies(9 + k, 1.3, n=400))) for k in range(3))
    result = compared(tmp_path, base, new, "--fail-if", "p99(ttft) +5%", code=3)
    (comparison,) = result["comparisons"]
    assert len(comparison["new"]["runs"]) == 3
    assert not any("one run on a side" in remark for remark in comparison["remarks"])
    assert row(result, "p99(ttft)")["n"] == 1_200


def test_the_same_schedule_is_compared_request_by_request(tmp_path: Path) -> None:
    prompts = np.random.default_rng(1).lognormal(-2, 1.0, 1_200)
    for name, fingerprint in (("base", "s"), ("new", "s"), ("other", "t")):
        noise = np.random.default_rng(len(name)).lognormal(0, 0.01, 1_200)
        write_run(tmp_path / name, prompts * noise * (1.0 if name == "base" else 1.1), schedule=fingerprint)
    base, new, other = (str(tmp_path / name) for name in ("base", "new", "other"))
    result = compared(tmp_path, base, new, other)
    assert [one["paired"] for one in result["comparisons"]] == [True, False]
    assert row(result, "p50(ttft)", 0)["p_worse"] < 0.001
    assert row(result, "p50(ttft)", 1)["p_worse"] > 0.05


def test_failed_requests_count(tmp_path: Path) -> None:
    base = write_run(tmp_path / "base", latencies(0))
    new = write_run(tmp_path / "new", latencies(1), failed=range(0, 1_200, 20))
    result = compared(tmp_path, str(base), str(new), "--fail-if", "failed_fraction +1%", code=3)
    assert row(result, "p99(ttft)")["beyond"] == ["new"]
    assert row(result, "p99(itl)")["beyond"] == ["new"]
    assert row(result, "failed_fraction")["new"] == pytest.approx(0.05)


def test_a_server_that_fails_every_request_is_a_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_run(tmp_path / "base", latencies(0))
    new = write_run(tmp_path / "new", latencies(1), failed=range(1_200))
    junit = tmp_path / "junit.xml"
    result = compared(tmp_path, str(base), str(new), "--fail-if", "p99(ttft) +5%", "--junit", str(junit), code=3)
    assert 'failures="1"' in junit.read_text(encoding="utf-8")
    for quantity in ("p50(ttft)", "p99(e2e)", "p90(ttft)"):
        found = row(result, quantity)
        assert (found["new"], found["beyond"], found["mark"]) == (None, ["new"], "worse")
    assert row(result, "p50(itl)")["beyond"] == ["new"]
    mean = row(result, "mean(ttft)")
    assert (mean["new"], mean["mark"]) == (None, "too few")
    assert mean["base"] is not None
    compared(tmp_path, str(base), str(new), "--fail-if", "mean(ttft) +5%", code=4)
    assert "every request of a run of NEW failed" in capsys.readouterr().err
    # Both fail everything: there is nothing to hold a limit against, and nothing passes.
    other = write_run(tmp_path / "other", latencies(2), failed=range(1_200))
    compared(tmp_path, str(new), str(other), "--fail-if", "p99(ttft) +5%", code=4)


def test_more_failures_than_the_percentile_leaves_room_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_run(tmp_path / "base", latencies(0))
    some = write_run(tmp_path / "some", latencies(1), failed=range(0, 1_200, 40))
    many = write_run(tmp_path / "many", latencies(2, 1.5), failed=range(0, 1_200, 2))
    compared(tmp_path, str(base), str(many), "--fail-if", "p99(ttft) +5%", "--fail-if", "p90(e2e) +5%", code=3)
    result = compared(tmp_path, str(some), str(many), "--fail-if", "p99(ttft) +5%", code=4)
    assert "of BASE is a failed request already" in capsys.readouterr().err
    assert row(result, "p99(ttft)")["mark"] == "worse"
    assert row(result, "p99(ttft)")["difference"] is None
    # The other way round it is better.
    compared(tmp_path, str(many), str(base), "--fail-if", "p99(ttft) +5%")


def test_a_stage_that_new_lacks_is_not_passed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_run(tmp_path / "base", latencies(0), stages=("4/s", "8/s"))
    new = write_run(tmp_path / "new", latencies(1), stages=("4/s",))
    arguments = (str(base), str(new), "--fail-if", "p50(ttft) +50%")
    result = compared(tmp_path, *arguments, code=4)
    assert "stage 8/s (a run of NEW has no requests in this stage, and BASE has)" in capsys.readouterr().err
    gates = [(gate["stage"], gate["status"]) for gate in result["comparisons"][0]["gates"]]
    assert gates == [("4/s", "passed"), ("8/s", "undecided")]
    compared(tmp_path, *arguments, "--expect-different", "load")
    compared(tmp_path, str(new), str(base), "--fail-if", "p50(ttft) +50%")


def test_what_cannot_be_decided_comes_before_a_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, new = (write_run(tmp_path / n, latencies(k, f, n=400)) for k, n, f in ((0, "base", 1.0), (1, "new", 1.5)))
    limits = ("--fail-if", "p50(ttft) +5%", "--fail-if", "p99(ttft) +5%")
    compared(tmp_path, str(base), str(new), *limits, code=4)
    assert "Beside it a regression: p50(ttft) +5%" in capsys.readouterr().err


def test_a_base_of_an_earlier_version_has_the_same_workload(tmp_path: Path) -> None:
    workload = {"name": "sharegpt", "fingerprint": "f", "filters": {}, "warnings": [], "token_count_method": "x"}
    base = write_run(tmp_path / "base", latencies(0, n=100), workload=workload)
    new = write_run(tmp_path / "new", latencies(1, n=100), workload=workload | {"content": "c"})
    (comparison,) = compared(tmp_path, str(base), str(new))["comparisons"]
    assert comparison["differing"] == []


@pytest.mark.parametrize(("content", "code"), [("c", 0), ("d", 2), (None, 2)])
def test_another_seed_explains_other_requests_of_the_same_workload_only(
    tmp_path: Path, content: str | None, code: int
) -> None:
    workload = {"name": "chats", "filters": {}, "warnings": [], "token_count_method": "x"}
    base = write_run(tmp_path / "base", latencies(0, n=100), workload=workload | {"fingerprint": "f", "content": "c"})
    other = workload | {"fingerprint": "g", "content": content}
    new = write_run(tmp_path / "new", latencies(1, n=100), workload=other, config={"seed": 5})
    assert main(["compare", str(base), str(new)]) == code


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("requests.parquet", b"PAR1", "cannot be read"),
        ("requests.parquet", None, "cannot be read"),
        ("summary.json", b"{}", "KeyError"),
        ("summary.json", b"[]", "TypeError"),
        ("summary.json", b'{"schema": 2}', "schema 2"),
        ("run.json", b"[]", "AttributeError"),
        ("run.json", b"{}", "KeyError"),
        ("run.json", b"{", "cannot be read"),
        ("run.json", b"\xff", "cannot be read"),
    ],
)
def test_a_run_that_cannot_be_read_is_one_line_and_exit_2(
    tmp_path: Path, name: str, content: bytes | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base, new = (write_run(tmp_path / name, latencies(k, n=100)) for k, name in enumerate(("base", "new")))
    damaged = new / name
    damaged.write_bytes(damaged.read_bytes()[:-100] if content is None else content)
    assert main(["compare", str(base), str(new)]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert str(new) in shown
    assert shown.count("\n") == 1


def test_a_directory_whose_name_is_no_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_run(tmp_path / "base", latencies(0, n=100))
    new = write_run(tmp_path / "new", latencies(1, n=100))
    renamed = new.rename(tmp_path / os.fsdecode(b"new\xff"))
    junit = tmp_path / "junit.xml"
    compared(tmp_path, str(base), str(renamed), "--fail-if", "p50(ttft) +50%", "--junit", str(junit))
    assert "new\\xff" in capsys.readouterr().out
    assert "new\\xff" in junit.read_text(encoding="utf-8")


def test_any_one_of_the_outputs_can_be_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, new = (str(write_run(tmp_path / name, latencies(k, n=100))) for k, name in enumerate(("base", "new")))
    capsys.readouterr()
    assert main(["compare", base, new, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == 1
    assert main(["compare", base, new, "--junit", "-"]) == 0
    ElementTree.fromstring(capsys.readouterr().out)
    assert main(["compare", base, new, "--json", "-", "--junit", "-"]) == 2
    assert "--junit and --json: only one of them can be -" in capsys.readouterr().err
    assert not Path("-").exists()


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("slo", {"config": {"slos": ("ttft<=3s",)}}),
        ("api", {"config": {"api": "completions"}}),
        ("transport", {"config": {"transport": "sse"}}),
        ("warmup", {"config": {"warmup_requests": 7}}),
        ("users", {"users": 9}),
        ("workload", {"workload": {"name": "other", "fingerprint": "g", "filters": {}}}),
        ("model", {"server": {"model": "x", "max_model_len": 4096, "is_vllm": True, "version": "0.20"}}),
    ],
)
def test_unlike_runs_are_refused_unless_that_is_the_point(
    tmp_path: Path, name: str, keys: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_run(tmp_path / "base", latencies(0, n=200))
    new = write_run(tmp_path / "new", latencies(1, n=200), **keys)
    assert main(["compare", str(base), str(new)]) == 2
    assert f"--expect-different {name} if that is what you compare" in capsys.readouterr().err
    result = compared(tmp_path, str(base), str(new), "--expect-different", name)
    assert [one["setting"] for one in result["comparisons"][0]["differing"]] == [name]


def test_what_is_usually_compared_is_shown(tmp_path: Path) -> None:
    base = write_run(tmp_path / "base", latencies(0, n=200), tags={"kv": "auto"})
    server = {"model": "m", "max_model_len": 4096, "is_vllm": True, "version": "0.21"}
    new = write_run(tmp_path / "new", latencies(1, n=200), tags={"kv": "fp8"}, server=server)
    (comparison,) = compared(tmp_path, str(base), str(new))["comparisons"]
    assert {one["setting"] for one in comparison["differing"]} == {"tag kv", "server_version"}
    assert any("2 settings differ" in remark for remark in comparison["remarks"])
    (comparison,) = compared(tmp_path, str(base), str(new), "--expect-different", "server_version,tag")["comparisons"]
    assert not any("settings differ" in remark for remark in comparison["remarks"])


def test_invalid_runs_are_exit_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_run(tmp_path / "base", latencies(0, n=200))
    new = write_run(tmp_path / "new", latencies(1, n=200), verdict="invalid")
    assert main(["compare", str(base), str(new)]) == 4
    assert "the measurement is invalid" in capsys.readouterr().err
    (comparison,) = compared(tmp_path, str(base), str(new), "--allow-invalid")["comparisons"]
    assert any("is invalid" in remark for remark in comparison["remarks"])


def test_a_limit_that_cannot_be_decided_is_not_passed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, new = (write_run(tmp_path / name, latencies(k, n=200)) for k, name in enumerate(("base", "new")))
    compared(tmp_path, str(base), str(new), "--fail-if", "p99(ttft) +5%", code=4)
    assert "cannot be decided" in capsys.readouterr().err
    assert main(["compare", str(base), str(new), "--fail-if", "p50(ttft_from_schedule) +5%"]) == 2
    assert "has no ttft_from_schedule" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["base"], "nothing to compare"),
        (["base", "nowhere"], "run.json is missing"),
        (["base", "new", "--fail-if", "speed +5%"], "there is no 'speed'"),
        (["base", "new", "--expect-different", "colour"], "there is no such setting"),
        (["base,base", "new"], "a run is named twice"),
        (["base", "new,base"], "run base is on both sides"),
        (["base", "base"], "run base is on both sides"),
        ([",", "base"], "names no run"),
        (["base", "base", "--scaling", "gpus"], "run base is on both sides"),
        (["base", "new", "--scaling", "gpus", "--expect-different", "colour"], "there is no such setting"),
        (["base", "new", "--scaling", "gpus"], "it has no tag gpus=NUMBER"),
        (["base", "--scaling", "gpus", "--junit", "x"], "a curve has no limits"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for k, name in enumerate(("base", "new")):
        write_run(Path(name), latencies(k, n=100))
    assert main(["compare", *arguments]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1


def test_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [
        str(write_run(tmp_path / f"tp{size}", latencies(size, n=n), tags={"tp": str(size)}))
        for size, n in ((1, 100), (2, 90), (4, 364))
    ]
    assert main(["compare", "--scaling", "tp", *paths]) == 0
    shown = capsys.readouterr().out
    assert "0.90×" in shown
    assert "3.64×" in shown
    assert "91 %" in shown
    assert "TP 2 is slower than TP 1: likely communication" in shown
    other = str(write_run(tmp_path / "tp8", latencies(8, n=700), tags={"tp": "8"}, config={"api": "completions"}))
    assert main(["compare", "--scaling", "tp", *paths, other]) == 2
    assert "is not like" in capsys.readouterr().err
    assert main(["compare", "--scaling", "tp", *paths, other, "--expect-different", "api"]) == 0


def test_text_from_outside_is_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "]]><script>|`*@team\x1b[31m\u202e"
    base = write_run(tmp_path / "base", latencies(0, n=100))
    new = write_run(tmp_path / "new", latencies(1, n=100), tags={"note": hostile})
    junit = tmp_path / "junit.xml"
    arguments = ("--fail-if", "p50(ttft) +50%", "--junit", str(junit))
    assert main(["compare", str(base), str(new), *arguments, "--markdown", "-"]) == 0
    page = capsys.readouterr().out
    assert "\\<script\\>\\|\\`\\*@\u200bteam" in page
    assert main(["compare", str(base), str(new)]) == 0
    for text in (page, capsys.readouterr().out, junit.read_text(encoding="utf-8")):
        assert "\x1b" not in text
        assert "\u202e" not in text
    ElementTree.parse(junit)
