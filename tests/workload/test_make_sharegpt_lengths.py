"""The script that makes ``workloads/sharegpt_lengths.csv``, run on data whose distribution is known."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.workload.conftest import conversation, write_json
from tests.workload.test_generated import ks, rank_correlation
from vllm_locust.workload.lengths import read_length_pairs
from vllm_locust.workload.spec import workload_path


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = workload_path("sharegpt").parent / "make_sharegpt_lengths.py"
    spec = importlib.util.spec_from_file_location("make_sharegpt_lengths", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("correlation", [0.0, 0.6, -0.9])
def test_thinned_pairs_keep_marginals_and_relation(script: ModuleType, correlation: float) -> None:
    rng = np.random.default_rng(1)
    normal = rng.multivariate_normal([0, 0], [[1, correlation], [correlation, 1]], 20_000)
    prompt, output = (np.maximum(1, np.exp(3 + 1.5 * column)).astype(np.int64) for column in normal.T)
    thin_prompt, thin_output = script.thin(prompt, output)
    assert thin_prompt.size == thin_output.size == 4096
    assert ks(thin_prompt, prompt) < 0.01
    assert ks(thin_output, output) < 0.01
    assert rank_correlation(thin_prompt, thin_output) == pytest.approx(rank_correlation(prompt, output), abs=0.02)
    assert set(zip(thin_prompt.tolist(), thin_output.tolist(), strict=True)) <= set(
        zip(prompt.tolist(), output.tolist(), strict=True)
    )


def test_fewer_pairs_than_strata_are_all_kept(script: ModuleType) -> None:
    prompt, output = np.array([3, 1, 2]), np.array([30, 10, 20])
    pairs = zip(*(lengths.tolist() for lengths in script.thin(prompt, output)), strict=True)
    assert sorted(pairs) == [(1, 10), (2, 20), (3, 30)]


def test_the_script_writes_a_file_that_can_be_read(
    script: ModuleType,
    tmp_path: Path,
    tokenizer_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chats = write_json(
        tmp_path / "chats.json", [conversation(f"c{i}", " time" * i, " data" * 2 * i) for i in range(1, 6)]
    )
    monkeypatch.setattr(sys, "argv", ["make", str(chats), str(tokenizer_file), "a tiny one"])
    script.main()
    made = tmp_path / "made.csv"
    made.write_text(capsys.readouterr().out)
    prompt, output = read_length_pairs(made)
    assert (prompt.tolist(), output.tolist()) == ([1, 2, 3, 4, 5], [2, 4, 6, 8, 10])
    assert str(tmp_path) not in made.read_text()


def test_the_committed_file_is_small_and_says_where_it_comes_from() -> None:
    path = workload_path("sharegpt").parent / "sharegpt_lengths.csv"
    assert path.stat().st_size < 100_000
    assert path.read_text().startswith("# Token lengths of 17,379 first messages and their answers in ShareGPT_V3")
    prompt, output = read_length_pairs(path)
    # Figures of the source, counted once over all its rows: median, 90th and 99th percentile.
    assert np.percentile(prompt, [50, 90, 99]) == pytest.approx([24, 441, 2578], rel=0.03, abs=1)
    assert np.percentile(output, [50, 90, 99]) == pytest.approx([272, 625, 827], rel=0.03)
