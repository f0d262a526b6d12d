from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.servers import health, request
from vllm_locust.errors import StoreError, UsageError
from vllm_locust.store.columns import RequestColumns, health_to_arrow
from vllm_locust.store.finalize import REQUESTS_PARQUET_ORDER, finalize
from vllm_locust.store.parts import PartStore, WorkerLedger, list_parts
from vllm_locust.store.rundir import RunDirectory, read_json, write_json
from vllm_locust.store.schema import SCHEMAS, Batch, BatchHeader, BatchKind

DESIGN_COLUMNS = re.findall(
    r"\w+",
    """request_id response_id host worker_id user_id target task transport streamed stage phase conversation_id turn
    prompt_id scheduled_unix_ns sent_unix_ns connect_ns headers_ns ttft_ns ttft_answer_ns e2e_ns done_ns
    schedule_lag_ns receive_lag_max_ns chunk_ns chunk_tokens prompt_tokens cached_prompt_tokens output_tokens
    reasoning_tokens max_tokens token_source stamp_source coalesced finish_reason outcome http_status error attempts
    retry_wait_ns good""",
)


def requests_batch(worker_id: str, seq: int, rows: int = 2, chunks: int = 3) -> Batch:
    columns = RequestColumns()
    for row in range(rows):
        columns.append(request(seq * 1000 + row, worker_id, chunks))
    return Batch(BatchHeader("run", worker_id, seq, BatchKind.REQUESTS), columns.to_arrow())


def health_batch(worker_id: str, seq: int) -> Batch:
    return Batch(BatchHeader("run", worker_id, seq, BatchKind.HEALTH), health_to_arrow([health(seq, worker_id)]))


def lost_batch(worker_id: str, seq: int, lost_rows: int) -> Batch:
    empty = RequestColumns()
    empty.append(request(0))
    return Batch(BatchHeader("run", worker_id, seq, BatchKind.REQUESTS, lost_rows), empty.to_arrow().slice(0, 0))


def write(parts_dir: Path, *parts: list[Batch]) -> None:
    store = PartStore(parts_dir, "run")
    for batches in parts:
        store.write(batches)
    store.close()


def with_verdicts(rows: pa.RecordBatch) -> pa.RecordBatch:
    good = pc.greater(rows.column("user_id"), pa.scalar(2000))
    phase = pa.array(["window"] * rows.num_rows, pa.string())
    stage = pa.array([0] * rows.num_rows, pa.int64())
    return rows.append_column("good", good).append_column("phase", phase).append_column("stage", stage)


@settings(max_examples=100)
@given(st.permutations(range(1, 9)), st.integers(0, 8))
def test_a_ledger_is_contiguous_up_to_the_first_gap_in_any_order(order: list[int], taken: int) -> None:
    ledger = WorkerLedger()
    for seq in order[:taken]:
        assert ledger.add(seq)
        assert not ledger.add(seq)
    held = set(order[:taken])
    assert {seq for seq in range(1, 10) if seq in ledger} == held
    assert ledger.contiguous == next(seq for seq in range(9) if seq + 1 not in held)
    assert ledger.highest == max(held, default=0)


def test_a_store_that_opens_again_knows_what_it_has(run_dir: RunDirectory) -> None:
    write(
        run_dir.parts, [requests_batch("a", 1), health_batch("a", 2)], [requests_batch("a", 4), requests_batch("b", 1)]
    )
    (run_dir.parts / ".requests-000003.parquet.1.tmp").write_bytes(b"cut off")
    store = PartStore(run_dir.parts, "run")
    assert store.durable() == {"a": 2, "b": 1}
    assert [("a", seq) in store for seq in range(1, 6)] == [True, True, False, True, False]
    assert ("c", 1) not in store
    store.write([requests_batch("a", 3), requests_batch("a", 4)])
    assert (store.durable(), store.batches, store.rows) == ({"a": 4, "b": 1}, 5, 8)
    store.close()
    assert sorted(path.name for path in run_dir.parts.glob("*.parquet")) == [
        "requests-000001.parquet",
        "requests-000002.parquet",
        "requests-000003.parquet",
        "workers-000001.parquet",
    ]
    assert not list(run_dir.parts.glob(".*.tmp"))


def test_two_recorders_in_one_directory_are_refused(run_dir: RunDirectory) -> None:
    store = PartStore(run_dir.parts, "run")
    with pytest.raises(StoreError, match="another recorder or merge is at work"):
        PartStore(run_dir.parts, "run")
    store.close()
    PartStore(run_dir.parts, "run").close()


def test_parts_of_another_run_and_damaged_parts_are_refused(run_dir: RunDirectory) -> None:
    write(run_dir.parts, [requests_batch("a", 1)])
    with pytest.raises(StoreError, match="is of run 'run', not 'other'"):
        PartStore(run_dir.parts, "other")
    (part,) = list_parts(run_dir.parts)
    part.path.write_bytes(part.path.read_bytes()[:-10])
    with pytest.raises(StoreError, match="is damaged"):
        list_parts(run_dir.parts)


def test_the_result_is_in_order_whatever_the_parts_were(run_dir: RunDirectory, tmp_path: Path) -> None:
    batches = [requests_batch(worker_id, seq, rows=seq) for worker_id in ("b", "a", "ä") for seq in range(1, 6)]
    write(run_dir.parts, batches)
    write(tmp_path / "other", *([batch] for batch in reversed(batches)))
    expected = [
        f"{worker_id}/{seq * 1000 + row}" for worker_id in ("a", "b", "ä") for seq in range(1, 6) for row in range(seq)
    ]
    files = []
    for index, (parts_dir, pass_bytes) in enumerate(
        ((run_dir.parts, 1), (tmp_path / "other", 1), (run_dir.parts, 1 << 30))
    ):
        out = tmp_path / f"{index}.parquet"
        report = finalize(
            parts_dir, BatchKind.REQUESTS, out, with_verdicts, pass_bytes=pass_bytes, row_group_bytes=2000
        )
        assert (report.rows, report.batches, report.lost_rows) == (45, 15, 0)
        table = pq.read_table(out)
        assert table.column("request_id").to_pylist() == expected
        assert table.column("good").to_pylist() == [int(name.split("/")[1]) > 2000 for name in expected]
        files.append(out.read_bytes())
    assert pq.ParquetFile(tmp_path / "0.parquet").num_row_groups > 3
    assert files[0] == files[1] == files[2]


def test_the_columns_are_those_of_the_design(run_dir: RunDirectory) -> None:
    write(run_dir.parts, [requests_batch("a", 1), health_batch("a", 2)])
    finalize(run_dir.parts, BatchKind.REQUESTS, run_dir.requests_parquet, with_verdicts)
    names = pq.read_schema(run_dir.requests_parquet).names
    assert [name for name in names if name in DESIGN_COLUMNS] == DESIGN_COLUMNS
    assert set(names) - set(DESIGN_COLUMNS) == {
        "arrival",
        "chunk_width_ns",
        "ended_ns",
        "prompt_tokens_planned",
        "slot_wait_ns",
    }
    assert tuple(names) == REQUESTS_PARQUET_ORDER
    finalize(run_dir.parts, BatchKind.HEALTH, run_dir.workers_parquet)
    (row,) = pq.read_table(run_dir.workers_parquet).to_pylist()
    assert (row["worker_id"], row["time_unix_ns"], row["run_delay_ns"]) == ("a", 2, None)


def test_a_run_without_a_request_has_a_file_with_all_columns(run_dir: RunDirectory) -> None:
    report = finalize(run_dir.parts, BatchKind.REQUESTS, run_dir.requests_parquet, with_verdicts)
    assert (report.rows, report.batches) == (0, 0)
    assert pq.read_table(run_dir.requests_parquet).num_rows == 0
    assert tuple(pq.read_schema(run_dir.requests_parquet).names) == REQUESTS_PARQUET_ORDER


def test_a_part_of_the_version_before_is_read_with_nulls_for_what_it_lacks(run_dir: RunDirectory) -> None:
    write(run_dir.parts, [requests_batch("a", 1)], [requests_batch("a", 2)])
    old = pq.read_table(run_dir.parts / "requests-000001.parquet")
    schema = SCHEMAS[1][BatchKind.REQUESTS]
    before = old.select(schema.names).cast(schema).replace_schema_metadata(old.schema.metadata)
    pq.write_table(before, run_dir.parts / "requests-000001.parquet")
    report = finalize(run_dir.parts, BatchKind.REQUESTS, run_dir.requests_parquet, with_verdicts)
    assert (report.rows, pq.read_table(run_dir.requests_parquet).column("arrival").null_count) == (4, 4)
    pq.write_table(old.drop_columns(["turn"]), run_dir.parts / "requests-000001.parquet")
    with pytest.raises(StoreError, match="other columns than this version"):
        finalize(run_dir.parts, BatchKind.REQUESTS, run_dir.requests_parquet, with_verdicts)


def test_lost_rows_have_a_number(run_dir: RunDirectory) -> None:
    write(run_dir.parts, [requests_batch("a", 1), lost_batch("a", 2, lost_rows=7)])
    report = finalize(run_dir.parts, BatchKind.REQUESTS, run_dir.requests_parquet)
    assert (report.rows, report.batches, report.lost_rows) == (2, 2, 7)


def test_columns_of_another_length_are_refused_and_leave_no_file(run_dir: RunDirectory) -> None:
    write(run_dir.parts, [requests_batch("a", 1)])
    with pytest.raises(StoreError, match="came with 1 rows for 2"):
        finalize(run_dir.parts, BatchKind.REQUESTS, run_dir.requests_parquet, lambda rows: rows.slice(0, 1))
    assert [path.name for path in run_dir.path.iterdir()] == ["parts"]


def test_json_is_strict_and_whole_or_absent(run_dir: RunDirectory) -> None:
    write_json(run_dir.summary_json, {"a": [1, None, "\ud800ü"]})
    assert read_json(run_dir.summary_json) == {"a": [1, None, "\ud800ü"]}
    for value in (float("nan"), float("inf"), {1, 2}):
        with pytest.raises(StoreError, match="cannot be written as JSON"):
            write_json(run_dir.summary_json, {"a": value})
    assert read_json(run_dir.summary_json) == {"a": [1, None, "\ud800ü"]}
    assert [path.name for path in run_dir.path.iterdir()] == ["summary.json"]


def test_a_directory_with_a_run_in_it_is_not_used_again(run_dir: RunDirectory) -> None:
    RunDirectory.create(run_dir.path)
    write_json(run_dir.run_json, {})
    with pytest.raises(UsageError, match="holds a run already"):
        RunDirectory.create(run_dir.path)


def test_one_of_many_runs_takes_the_next_free_directory(run_dir: RunDirectory) -> None:
    assert RunDirectory.create_next(run_dir.path) == run_dir
    write_json(run_dir.run_json, {})
    second = RunDirectory.create_next(run_dir.path)
    assert second.path == run_dir.path.with_name("run-2")
    second.parts.mkdir()
    (run_dir.path.with_name("run-3")).mkdir()
    assert RunDirectory.create_next(run_dir.path).path == run_dir.path.with_name("run-3")
