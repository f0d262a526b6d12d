"""The samples of data sets in the README are read as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_locust.workload.load import load_workload
from vllm_locust.workload.workload import Workload

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def sample(pattern: str) -> str:
    (found,) = re.findall(pattern, README, re.DOTALL)
    assert isinstance(found, str)
    return found


def load(directory: Path, name: str, content: str) -> Workload:
    path, cache = directory / name, directory / "cache"
    path.write_text(content, encoding="utf-8")
    return load_workload(str(path), tokenizer=None, max_model_len=None, max_tokens=None, seed=0, cache_dir=cache)


def test_azures_columns(tmp_path: Path) -> None:
    trace = load(tmp_path, "trace.csv", sample(r"```csv\n(TIMESTAMP.*?)```"))
    assert [values.tolist() for values in trace.length_reference()] == [[374, 396, 879], [44, 109, 55]]
    offsets_ns = trace.offsets_ns()
    assert offsets_ns is not None
    assert offsets_ns.tolist() == [0, 4_314_579_000, 4_541_877_000]


def test_burstgpts_columns(tmp_path: Path) -> None:
    columns = re.findall("`(.*?)`", sample(r"BurstGPT's columns are (.*?);"))
    trace = load(tmp_path, "trace.csv", f"{','.join(columns)}\n5,472,18\n45.5,1087,230\n")
    assert [values.tolist() for values in trace.length_reference()] == [[472, 1087], [18, 230]]
    assert trace.offsets_ns() == pytest.approx([0, 40.5e9])


def test_a_line_of_mooncakes(tmp_path: Path) -> None:
    trace = load(tmp_path, "trace.jsonl", sample(r'`(\{"timestamp": [^`]*\})`'))
    assert [values.tolist() for values in trace.length_reference()] == [[6955], [52]]


def test_a_sharegpt_file(tmp_path: Path) -> None:
    chats = load(tmp_path, "chats.json", sample(r'```json\n(\[\{"id".*?)```'))
    session = next(chats.sessions(seed=0, share=0, shares=1))
    assert [turn.text for turn in session.turns] == ["My order has not arrived.", "It is number 4711."]
