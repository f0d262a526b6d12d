"""What an output file may be already: a file, a link, a device or a pipe."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from vllm_locust.errors import StoreError
from vllm_locust.store.rundir import write_text

pytestmark = pytest.mark.timeout(30)


def test_what_a_link_points_to_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "file", tmp_path / "link"
    link.symlink_to(target)
    for text in ("new", "again"):
        write_text(link, text)
        assert (link.readlink(), target.read_text(), target.is_symlink()) == (target, text, False)
    assert [path.name for path in target.parent.iterdir()] == ["file"]


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "text")
    reader.join(10)
    assert (read, pipe.is_fifo()) == (["text"], True)


def test_a_full_device_is_an_error_and_stays(tmp_path: Path) -> None:
    link = tmp_path / "full"
    link.symlink_to("/dev/full")
    with pytest.raises(StoreError, match="No space left"):
        write_text(link, "text")
    assert Path("/dev/full").is_char_device()
