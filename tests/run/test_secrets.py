from __future__ import annotations

from pathlib import Path

import pytest

from vllm_locust.errors import UsageError
from vllm_locust.run.secrets import Secrets


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.mark.parametrize(("text", "key"), [("sk-1", "sk-1"), (" sk-1\n", "sk-1"), ("", None)])
def test_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, key: str | None) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", text)
    assert Secrets.read({}).api_key == key


@pytest.mark.parametrize("text", ["hunter2\nX-Other: 1", "hunter2\u00e9", "hunter2\x07", " \n"])
def test_what_is_no_key_is_refused_by_its_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    file = tmp_path / "key"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setenv("OPENAI_API_KEY", text)
    for options, place in (({}, "OPENAI_API_KEY"), ({"api_key_file": str(file)}, f"--api-key-file {file}")):
        with pytest.raises(UsageError) as caught:
            Secrets.read(options)
        assert str(caught.value) == f"{place} does not hold one line with a key; write the key alone into it"


def test_bytes_that_are_no_text_are_not_told(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"hunter2\xff")
    with pytest.raises(UsageError) as caught:
        Secrets.read({"api_key_file": str(file)})
    assert str(caught.value) == f"--api-key-file {file} is no UTF-8 text; write the key alone into it"


def test_the_file_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("of-the-file\n")
    monkeypatch.setenv("OPENAI_API_KEY", "of the\nenvironment")
    secrets = Secrets.read({"api_key_file": str(file)})
    assert secrets.api_key == "of-the-file"
    assert "of-the-file" not in repr(secrets)
