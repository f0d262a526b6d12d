"""The cases of large runs, small: they measure what they say."""

from __future__ import annotations

from pathlib import Path

from tests.bench import scale
from tests.bench.synthetic_run import RUN_ID, Shape, workers_of, write_run
from vllm_locust.store.parts import list_parts
from vllm_locust.store.rundir import RunDirectory
from vllm_locust.store.schema import decode_batch, encode_batch


def test_made_batches_are_such_as_a_recorder_takes() -> None:
    worker = workers_of(RUN_ID, 1e6, Shape(tokens=50, rows=30))[3]
    first, second = worker.next_batch(), worker.next_batch()
    for seq, batch in ((1, first), (2, second)):
        read = decode_batch(encode_batch(batch.header, batch.rows), RUN_ID)
        assert (read.header.seq, read.rows.num_rows) == (seq, 30)
        assert read.rows.equals(batch.rows)
        assert {len(chunks or ()) for chunks in read.rows.column("chunk_ns").to_pylist()} == {50}
    ids = [batch.rows.column("request_id").to_pylist() for batch in (first, second)]
    assert len({*ids[0], *ids[1]}) == 60


def test_the_recorder_and_the_merge_are_measured_on_whole_runs(tmp_path: Path) -> None:
    """Each raises where a request is missing in the end."""
    (recorded,) = scale.recorder(tmp_path, 200_000)
    assert recorded.what.startswith("0 M tokens (5.")
    assert recorded.cpu_s > 0
    assert recorded.peak_rss_bytes is not None
    assert recorded.peak_rss_bytes > 30 << 20
    (merged,) = scale.merge(tmp_path, 400_000)
    assert ", 2,460 requests, 3 parts" in merged.what
    assert merged.peak_rss_bytes is not None
    assert merged.peak_rss_bytes > 30 << 20
    assert merged.holds
    assert not [*tmp_path.iterdir()], "a large run leaves nothing behind"


def test_a_made_run_directory_is_listed_as_a_recorders_is(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    written = write_run(run_dir, 100_000, Shape(workers=2, tokens=50, rows=100))
    assert (written.tokens, written.requests, written.parts) == (100_000, 2_000, 10)
    parts = list_parts(run_dir.parts)
    assert sum(batch.rows for part in parts for batch in part.batches if part.kind == "records") == 2_000
    assert {len(part.batches) for part in parts} == {2}
