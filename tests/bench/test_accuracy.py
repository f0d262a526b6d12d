"""The join of a report with the truth, on small numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.bench.accuracy import Reported, ReportedRequest, compare, quantiles
from tests.bench.cases import Bench
from tests.bench.clients.epoll import EpollClient
from tests.bench.measure import Plan, Run
from tests.bench.placement import default_placement
from tests.bench.truth import Schedule, TrueRequest, TruthLog

MS = 1_000_000


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def true_request(serial: int, *sent_ms: int, read_ms: int = 0, state: str = "finished") -> TrueRequest:
    sent = ints(*sent_ms) * MS
    return TrueRequest(f"id{serial}", serial, state, read_ms * MS, sent, sent, sent * 0, len(sent))


def test_errors_are_differences_to_the_request_of_the_same_id_or_serial() -> None:
    truth = TruthLog([true_request(1, 50, 70, 90), true_request(2, 60, 80, 100, read_ms=10)], 1000 * MS, 0)
    reported = Reported(
        [
            ReportedRequest("id1", 53 * MS, ints(20, 25) * MS),
            ReportedRequest(
                2, 50 * MS, ints(19, 20) * MS, sent_unix_ns=1010 * MS, own_stamp=np.array([True, False, True])
            ),
        ]
    )
    found = compare(truth, reported, 0, 1000 * MS)
    assert (found.joined, found.unjoined, found.missing, found.miscounted) == (2, 0, 0, 0)
    assert found.ttft_error is not None
    assert found.ttft_error.max == 3.0
    assert found.gap_error is not None
    assert (found.gap_error.n, found.gap_error.p50, found.gap_error.max) == (4, 0.0, 5.0)
    assert found.chunk_error is not None
    assert (found.chunk_error.n, found.chunk_error.p50, found.chunk_error.max) == (3, 1.0, 1.0)
    assert found.chunk_error_own_stamp is not None
    assert (found.chunk_error_own_stamp.n, found.own_stamp_share) == (2, 2 / 3)


def test_only_the_window_counts() -> None:
    truth = TruthLog([true_request(1, 50, 70, 90)], 0, 0)
    reported = Reported([ReportedRequest(1, 60 * MS, ints(20, 99) * MS)])
    found = compare(truth, reported, 60 * MS, 80 * MS)
    assert found.ttft_error is None
    assert found.gap_error is not None
    assert (found.gap_error.n, found.gap_error.max) == (1, 0.0)


def test_what_does_not_match_is_counted() -> None:
    truth = TruthLog([true_request(1, 50, 70), true_request(2, 50, 70), true_request(3, 50, 70)], 0, 0)
    reported = Reported(
        [
            ReportedRequest(1, 50 * MS, ints(20) * MS),
            ReportedRequest(2, 50 * MS, ints(20, 0) * MS),
            ReportedRequest("other", 50 * MS, ints(20) * MS),
        ]
    )
    found = compare(truth, reported, 0, 100 * MS)
    assert (found.joined, found.unjoined, found.missing, found.miscounted) == (2, 1, 1, 1)


def test_quantiles_are_nearest_rank() -> None:
    q = quantiles(ints(*range(1, 101)) * MS)
    assert q is not None
    assert (q.n, q.p50, q.p99, q.p99_9, q.max) == (100, 50.0, 99.0, 100.0, 100.0)


def test_a_whole_run_of_the_c_client(tmp_path: Path) -> None:
    bench = Bench(tmp_path, default_placement(False), window_s=0.5, tries=1)
    run = bench.run(EpollClient(), Plan(Schedule(tokens=50, gap_us=2000, ttft_us=5000), 10, 0.5), "test")
    assert isinstance(run, Run), run
    assert (run.exit_code, run.failed, run.accuracy.missing, run.accuracy.miscounted) == (0, 0, 0, 0)
    assert run.accuracy.joined > 50
    assert run.accuracy.chunk_error is not None
    assert run.accuracy.chunk_error.n > 1000
    assert run.accuracy.chunk_error.p50 < 50, "milliseconds on one clock, whatever the load of this machine"
