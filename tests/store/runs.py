"""A whole run of the store in one test: a server, a recorder process, workers' shippers, and what must be in the
result.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

from tests.store.servers import Server, in_s, request
from vllm_locust.record import FlushReport
from vllm_locust.store.finalize import finalize
from vllm_locust.store.intake import RecorderReport
from vllm_locust.store.recorder import RecorderConfig
from vllm_locust.store.recorder_process import RecorderProcess, start_recorder
from vllm_locust.store.rundir import RunDirectory
from vllm_locust.store.schema import BatchKind
from vllm_locust.store.shipper import Shipper
from vllm_locust.store.shipper_config import ShipperConfig

MILLISECOND_NS = 1_000_000


@dataclass
class Run:
    server: Server
    run_dir: RunDirectory
    spool_dir: Path
    run_id: str = "run"
    sent: list[str] = field(default_factory=list)
    shippers: list[Shipper] = field(default_factory=list)
    recorder: RecorderProcess | None = None

    def start_recorder(self) -> RecorderProcess:
        config = RecorderConfig(
            run_id=self.run_id,
            redis_url=self.server.url,
            part_age_ns=30 * MILLISECOND_NS,
            control_interval_ns=50 * MILLISECOND_NS,
            orphan_silence_ns=500 * MILLISECOND_NS,
        )
        self.recorder = start_recorder(config, self.run_dir)
        return self.recorder

    def shipper(
        self, worker_id: str = "w1", memory_bytes: int = 1 << 20, batch_rows: int = 5, stream_bytes: int = 32 << 20
    ) -> Shipper:
        shipper = Shipper(
            self.server.store(self.run_id),
            ShipperConfig(
                worker_id=worker_id,
                spool_dir=self.spool_dir,
                batch_rows=batch_rows,
                batch_interval_ns=20 * MILLISECOND_NS,
                memory_bytes=memory_bytes,
                stream_bytes=stream_bytes,
                probe_after_ns=300 * MILLISECOND_NS,
            ),
        )
        self.shippers.append(shipper)
        return shipper

    def put(self, shipper: Shipper, count: int, worker_id: str = "w1", chunks: int = 3) -> None:
        for _ in range(count):
            record = request(len(self.sent), worker_id, chunks)
            self.sent.append(record.request_id)
            shipper.put_request(record)

    def finish(self, timeout_s: float = 10.0) -> RecorderReport:
        assert self.recorder is not None
        return self.recorder.finish(timeout_s)

    def request_ids(self) -> Counter[str]:
        finalize(self.run_dir.parts, BatchKind.REQUESTS, self.run_dir.requests_parquet)
        names = pq.read_table(self.run_dir.requests_parquet).column("request_id").to_pylist()
        return Counter(map(str, names))

    def assert_complete(self) -> None:
        assert self.sent
        assert self.request_ids() == Counter(self.sent)

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.kill()
        for shipper in self.shippers:
            shipper.close()


def assert_durable(flushed: FlushReport) -> None:
    assert 0 < flushed.last_seq == flushed.durable_seq
    assert flushed.spool_path is None


def flush(shipper: Shipper, seconds: float = 10.0) -> FlushReport:
    return shipper.flush(in_s(seconds))
