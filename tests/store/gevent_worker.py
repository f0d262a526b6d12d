"""A process like a Locust worker's: patched by gevent first, then the store used from greenlets. Prints what it saw."""

from __future__ import annotations

# ruff: noqa: E402
import gevent.monkey

gevent.monkey.patch_all()

import json
import sys
from pathlib import Path

import gevent

from tests.store.servers import in_s, request
from vllm_locust import clock
from vllm_locust.store.embedded import start_embedded
from vllm_locust.store.recorder import RecorderConfig
from vllm_locust.store.recorder_process import start_recorder
from vllm_locust.store.redis_store import RunStore
from vllm_locust.store.redis_url import redis_options
from vllm_locust.store.rundir import RunDirectory
from vllm_locust.store.shipper import Shipper
from vllm_locust.store.shipper_config import ShipperConfig


def main(directory: Path) -> None:
    stall_ns = 0

    def watch_loop() -> None:
        nonlocal stall_ns
        while True:
            before_ns = clock.monotonic_ns()
            gevent.sleep(0.001)
            stall_ns = max(stall_ns, clock.monotonic_ns() - before_ns)

    embedded = start_embedded()
    run_dir = RunDirectory.create(directory / "run")
    recorder = start_recorder(
        RecorderConfig(run_id="run", redis_url=embedded.url, part_age_ns=50_000_000), run_dir, spawn=gevent.spawn
    )
    shipper = Shipper(
        RunStore(redis_options(embedded.url), "run"),
        ShipperConfig(worker_id="w", spool_dir=directory / "spool"),
        spawn=gevent.spawn,
        offload=gevent.get_hub().threadpool.apply,
    )
    watcher = gevent.spawn(watch_loop)
    for number in range(300):
        shipper.put_request(request(number, "w"))
        gevent.sleep(0.002)
    flushed = shipper.flush(in_s(20))
    watcher.kill()
    shipper.close()
    nowhere = Shipper(
        RunStore(redis_options(f"unix://{directory}/absent"), "run"),
        ShipperConfig(worker_id="x", spool_dir=directory / "spool"),
        spawn=gevent.spawn,
        offload=gevent.get_hub().threadpool.apply,
    )
    nowhere.put_request(request(1, "x"))
    spooled = nowhere.flush(in_s(0.5)).spool_path
    nowhere.close()
    report = recorder.finish(20)
    embedded.stop()
    durable = flushed.durable_seq == flushed.last_seq
    print(json.dumps({"durable": durable, "rows": report.rows, "stall_ns": stall_ns, "spooled": spooled}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
