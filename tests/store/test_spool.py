from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from vllm_locust.errors import StoreError
from vllm_locust.store.spool import Spool, read_spool, spool_path, spools_of_run

HOSTILE = ["../../x", "a/b", "a\\b", ".", "..", "-rf", "ünï😀", "a b", "x" * 256, "\ud800", "a.b", "run.w"]


def test_what_is_written_is_read_by_position_and_in_order(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "deep" / "s.spool")
    payloads = [bytes([number]) * number for number in range(1, 50)] + [b""]
    positions = spool.append(payloads[:20]) + spool.append(payloads[20:])
    assert [spool.read(position) for position in positions] == payloads
    assert list(read_spool(spool.path)) == payloads
    assert stat.S_IMODE(spool.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(spool.path.parent.stat().st_mode) == 0o700
    spool.close(remove=True)
    assert not spool.path.exists()


def test_a_cleared_spool_takes_new_batches(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s.spool")
    spool.append([b"old" * 1000])
    spool.clear()
    assert list(read_spool(spool.path)) == []
    (position,) = spool.append([b"new"])
    assert (spool.read(position), list(read_spool(spool.path))) == (b"new", [b"new"])
    spool.close(remove=False)
    assert spool.path.exists()


def test_a_spool_cut_anywhere_gives_every_whole_batch_before_the_cut(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s.spool")
    payloads = [b"one", b"two two", b"three"]
    ends = [*spool.append(payloads)[1:], spool.path.stat().st_size]
    whole = spool.path.read_bytes()
    begin = whole.index(b"one") - 8
    for cut in range(begin, len(whole) + 1):
        (tmp_path / "cut").write_bytes(whole[:cut])
        assert list(read_spool(tmp_path / "cut")) == payloads[: sum(end <= cut for end in ends)]
    spool.close(remove=True)


def test_a_flipped_bit_ends_the_file_before_it(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s.spool")
    _, second = spool.append([b"one", b"two"])
    damaged = bytearray(spool.path.read_bytes())
    damaged[-1] ^= 1
    spool.path.write_bytes(damaged)
    assert list(read_spool(spool.path)) == [b"one"]
    with pytest.raises(OSError, match="damaged at byte"):
        spool.read(second)
    spool.close(remove=True)


def test_names_are_safe_and_never_meet(tmp_path: Path) -> None:
    paths = [spool_path(tmp_path, "run", worker_id) for worker_id in HOSTILE]
    assert len(set(paths)) == len(HOSTILE)
    for path in paths:
        assert path.parent == tmp_path
        path.touch()
    spool_path(tmp_path, "run2", "w").touch()
    spool_path(tmp_path, "run.w", "w").touch()
    assert spools_of_run(tmp_path, "run") == sorted(paths)


def test_a_file_that_is_no_spool_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello")
    with pytest.raises(StoreError, match="is no spool"):
        list(read_spool(tmp_path / "x"))
    with pytest.raises(StoreError, match="cannot be read"):
        list(read_spool(tmp_path / "absent"))


def test_a_link_in_the_place_of_a_spool_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    os.symlink(tmp_path / "victim", tmp_path / "s.spool")
    with pytest.raises(OSError, match="exists"):
        Spool(tmp_path / "s.spool").append([b"x"])
    assert (tmp_path / "victim").read_text() == "precious"
