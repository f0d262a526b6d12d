from __future__ import annotations

import multiprocessing
import os
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pyarrow as pa
import pytest

from vllm_locust.errors import WorkloadError
from vllm_locust.workload import dataset_cache
from vllm_locust.workload.dataset_cache import Batches, DatasetCache, cache_key
from vllm_locust.workload.table_metadata import ColumnValues, TableMetadata, metadata_of

SCHEMA = pa.schema([pa.field("n", pa.int64())])


def batches(value: int = 7) -> Batches:
    for number in (value, value + 1):
        yield pa.RecordBatch.from_pydict({"n": [number]}, SCHEMA)
    return TableMetadata("digest", {"dropped": value}, ("a warning",), ("word",))


def never() -> Batches:
    raise AssertionError("built although it is in the cache")


def test_a_table_is_built_once_and_mapped_from_then_on(cache_dir: Path) -> None:
    assert DatasetCache(cache_dir).table("t", "key", SCHEMA, batches).to_pydict() == {"n": [7, 8]}
    before = pa.total_allocated_bytes()
    again = DatasetCache(cache_dir).table("t", "key", SCHEMA, never)
    assert again.to_pydict() == {"n": [7, 8]}
    assert pa.total_allocated_bytes() - before < 1_000
    assert metadata_of(again) == TableMetadata("digest", {"dropped": 7}, ("a warning",), ("word",))
    values = ColumnValues(again, "n")
    assert [values[0], values[1]] == [7, 8]
    assert cache_dir.stat().st_mode & 0o777 == 0o700


def _build_at_once(directory: Path, barrier: Barrier, log: Path) -> None:
    def build() -> Batches:
        with log.open("a") as stream:
            stream.write("built\n")
        return batches()

    barrier.wait(20)
    assert DatasetCache(directory).table("t", "key", SCHEMA, build).num_rows == 2


def test_processes_that_start_together_build_once(cache_dir: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, log = context.Barrier(3), tmp_path / "log"
    processes = [context.Process(target=_build_at_once, args=(cache_dir, barrier, log)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert log.read_text() == "built\n"


@pytest.mark.parametrize("content", [b"", b"no arrow file", None])
def test_a_damaged_file_is_built_again(cache_dir: Path, content: bytes | None) -> None:
    cache = DatasetCache(cache_dir)
    cache.table("t", "key", SCHEMA, batches)
    path = cache_dir / "t-key.arrow"
    path.write_bytes(path.read_bytes()[:-20] if content is None else content)
    assert cache.table("t", "key", SCHEMA, lambda: batches(1)).to_pydict() == {"n": [1, 2]}


def test_a_file_without_the_metadata_of_its_table_is_built_again(cache_dir: Path) -> None:
    cache_dir.mkdir(exist_ok=True)
    with pa.ipc.new_file(str(cache_dir / "t-key.arrow"), SCHEMA) as writer:
        writer.write_table(pa.table({"n": [5]}, SCHEMA))
    assert DatasetCache(cache_dir).table("t", "key", SCHEMA, lambda: batches(1)).to_pydict() == {"n": [1, 2]}


def test_a_build_that_fails_leaves_nothing_and_can_be_repeated(cache_dir: Path) -> None:
    def fail() -> Batches:
        yield pa.RecordBatch.from_pydict({"n": [1]}, SCHEMA)
        raise WorkloadError("nothing usable")

    with pytest.raises(WorkloadError, match="nothing usable"):
        DatasetCache(cache_dir).table("t", "key", SCHEMA, fail)
    assert list(cache_dir.glob("*.arrow")) == []
    assert DatasetCache(cache_dir).table("t", "key", SCHEMA, batches).num_rows == 2


def test_the_least_recently_used_files_make_room(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_cache, "_KEPT_FILES", 3)
    cache = DatasetCache(cache_dir)
    for age, key in enumerate(["a", "b", "c"]):
        cache.table("t", key, SCHEMA, batches)
        os.utime(cache_dir / f"t-{key}.arrow", (1_000 + age, 1_000 + age))
    cache.table("t", "a", SCHEMA, never)
    cache.table("t", "d", SCHEMA, batches)
    assert {path.stem for path in cache_dir.glob("*.arrow")} == {"t-a", "t-c", "t-d"}


def test_a_directory_that_cannot_be_made_is_named_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkloadError, match=r"file/cache cannot be used .*set XDG_CACHE_HOME"):
        DatasetCache(tmp_path / "file" / "cache").table("t", "key", SCHEMA, batches)


def test_the_default_directory_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    DatasetCache().table("t", "key", SCHEMA, batches)
    assert (tmp_path / "vllm-locust" / "t-key.arrow").is_file()


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(WorkloadError, match="set XDG_CACHE_HOME"):
        DatasetCache()


def test_keys_tell_their_parts_apart() -> None:
    assert cache_key("a", "bc") != cache_key("ab", "c")
    assert cache_key("a", 1) == cache_key("a", 1)
