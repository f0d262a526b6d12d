"""A worker process's side of the run's life cycle: prepare, report, drain."""

from __future__ import annotations

import gc
import json
import logging
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gevent
from gevent.event import Event

from vllm_locust.arrival import ArrivalProcess, Piece, Schedule
from vllm_locust.clock import WallAxis
from vllm_locust.config import RunConfig, TransportName
from vllm_locust.errors import StoreError, UsageError, VllmLocustError
from vllm_locust.load import limits
from vllm_locust.load.dispatcher import Dispatcher
from vllm_locust.load.users import POST
from vllm_locust.load.worker import Assignment, LoadWorker
from vllm_locust.record import FlushReport
from vllm_locust.run.agreement import disagreements, version_problems, versions
from vllm_locust.run.common_clock import shift_ns
from vllm_locust.run.messenger import ABANDON, BEGIN, DRAIN, EXTEND, FLUSHED, PREPARE, READY, SNAPSHOT, STAGE, Messenger
from vllm_locust.run.results.recovery import flushed_field
from vllm_locust.run.secrets import Secrets
from vllm_locust.store.clock_offset import measure_clock_offset
from vllm_locust.store.redis_store import RunStore
from vllm_locust.store.redis_url import redis_options
from vllm_locust.store.shipper import Shipper
from vllm_locust.store.shipper_config import ShipperConfig
from vllm_locust.worker_message import Ready
from vllm_locust.workload.load import load_workload

logger = logging.getLogger(__name__)

SNAPSHOT_INTERVAL_S = 1.0


class WorkerSide:
    """Answers the master's messages. In a local run it lives beside the master's side in the same process."""

    def __init__(
        self,
        messenger: Messenger,
        secrets: Secrets,
        own_redis_url: str | None,
        own_flags: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """``own_flags``: that this process was started with, see ``agreement.given_flags``."""
        self._own_flags = own_flags
        self._messenger = messenger
        self._secrets = secrets
        self._own_redis_url = own_redis_url
        self._shipper: Shipper | None = None
        self._store: RunStore | None = None
        self._snapshots: gevent.Greenlet | None = None
        self._sequence = 0
        self._schedule: Schedule | None = None
        self._clock_shift_ns = 0
        """From this process's axis to the common clock."""
        self._left = Event()
        self._draining = False
        self._abandoned: str | None = None
        """The last run that never began; it may have been told while this worker was still being prepared for it."""
        messenger.on(PREPARE, self._on_prepare)
        messenger.on(BEGIN, self._on_begin)
        messenger.on(EXTEND, self._on_extend)
        messenger.on(STAGE, self._on_stage)
        messenger.on(DRAIN, self._on_drain)
        messenger.on(ABANDON, self._on_abandon)

    def _on_prepare(self, _sender: str, payload: Any) -> None:
        try:
            self._prepare(payload)
        except VllmLocustError as error:
            if not self._messenger.is_alone:
                # The master tells it too, in its own log.
                logger.error("This worker cannot take part in the run: %s", error)
            self._refuse(payload, "; ".join(error.problems))
            return
        except Exception as error:
            logger.exception("This worker could not get ready")
            self._refuse(payload, f"{type(error).__name__}: {error}")
            return
        if self._abandoned == payload["run_id"]:
            self.close()
            return
        fingerprint = None if self._schedule is None else self._schedule.fingerprint()
        self._answer(Ready(run_id=payload["run_id"], schedule_fingerprint=fingerprint, host=socket.gethostname()))

    def _refuse(self, payload: Any, reason: str) -> None:
        self._answer(Ready(run_id=payload["run_id"], error=reason, host=socket.gethostname()))
        self.close()

    def _answer(self, ready: Ready) -> None:
        self._messenger.to_master(READY, ready.to_message())

    def _prepare(self, payload: Any) -> None:
        if self._draining:
            self._left.wait()
        # An older master names its version in another way.
        masters = payload.get("versions") or {"vllm-locust": payload.get("version")}
        differing = version_problems(versions(), masters) or disagreements(self._own_flags, payload["flags"])
        if differing:
            raise UsageError(*differing)
        if payload["needs_api_key"] and self._secrets.api_key is None:
            raise UsageError("this worker has no API key but the master has; set OPENAI_API_KEY or --api-key-file here")
        self.close()
        config = RunConfig.from_json(payload["config"])
        workload = load_workload(
            config.workload,
            tokenizer=config.tokenizer,
            max_model_len=payload["max_model_len"],
            max_tokens=config.max_tokens,
            seed=config.seed,
        )
        if workload.fingerprint != payload["workload_fingerprint"]:
            raise UsageError(
                f"--workload {config.workload}: this worker's has the hash {workload.fingerprint[:16]}, the master's "
                f"{payload['workload_fingerprint'][:16]}; copy its file to the worker's host anew"
            )
        if problems := limits.problems(payload["users"], config.targets, config.proxy):
            raise UsageError(*problems)
        if self._messenger.sessions_wanted:
            # Their later turns are counted at the first call, which takes long with a tokenizer.
            workload.sessions(seed=payload["prompt_seed"], share=payload["share"], shares=payload["shares"])
        worker_id = self._messenger.own_id
        url = self._own_redis_url or payload["redis_url"]
        self._check_reachable(url)
        options = redis_options(url, self._secrets.redis_password_file)
        self._store = RunStore(options, payload["run_id"])
        server = self._store.check_server()
        axis = WallAxis()
        self._clock_shift_ns = shift_ns(
            measure_clock_offset(self._store.server_time_unix_ns, server.run_id, unix_ns=axis.unix_ns)
        )
        self._shipper = Shipper(
            self._store,
            ShipperConfig(worker_id=worker_id, spool_dir=Path(payload["spool_dir"])),
            spawn=gevent.spawn,
            offload=_in_thread_pool,
            unix_ns=axis.unix_ns,
        )
        assignment = Assignment(
            run_id=payload["run_id"],
            worker_id=worker_id,
            share=payload["share"],
            shares=payload["shares"],
            prompt_seed=payload["prompt_seed"],
            model=payload["model"],
            token_detail=payload["token_detail"],
            first_arrival=payload.get("first_arrival", 0),
        )
        planned = payload.get("schedule")
        self._schedule = None
        if planned is not None:
            trace = workload.offsets_ns() if planned["process"] == ArrivalProcess.TRACE else None
            self._schedule = Schedule.from_json(planned, trace_offsets_ns=trace)
        self._draining = False
        self._left.clear()
        _calm_garbage_collector(config.transport)
        load = LoadWorker(
            config,
            assignment,
            workload,
            self._shipper,
            self._secrets.api_key,
            axis,
            self._schedule,
            clock_shift_ns=self._clock_shift_ns,
        )
        POST.put(load)
        self._snapshots = gevent.spawn(self._report, load)

    @staticmethod
    def _check_reachable(url: str) -> None:
        if url.startswith("unix://") and not Path(url.removeprefix("unix://")).exists():
            raise UsageError(
                "--redis-url: the master uses an embedded Valkey, which a worker on another host cannot reach; start "
                "Redis or Valkey where all hosts reach it and give --redis-url to the master"
            )

    def _report(self, load: LoadWorker) -> None:
        while True:
            gevent.sleep(SNAPSHOT_INTERVAL_S)
            self._send_snapshot(load)

    def _send_snapshot(self, load: LoadWorker) -> None:
        self._sequence += 1
        self._messenger.to_master(SNAPSHOT, load.snapshot(self._sequence))

    def _on_begin(self, _sender: str, payload: Any) -> None:
        load = self._load_of(payload)
        if load is not None and load.dispatcher is not None:
            self._extend(load.dispatcher, payload)
            t0_unix_ns = int(payload["t0_unix_ns"])
            load.dispatcher.begin(t0_unix_ns - self._clock_shift_ns - load.axis.offset_ns, t0_unix_ns)

    def _on_extend(self, _sender: str, payload: Any) -> None:
        load = self._load_of(payload)
        if load is not None and load.dispatcher is not None:
            self._extend(load.dispatcher, payload)

    def _extend(self, dispatcher: Dispatcher, payload: Any) -> None:
        """The message has the whole plan: one that is late or comes again adds nothing."""
        assert self._schedule is not None
        for piece in payload["pieces"][len(self._schedule.pieces) :]:
            dispatcher.extend(Piece(**piece))

    def _on_stage(self, _sender: str, payload: Any) -> None:
        load = self._load_of(payload)
        if load is not None:
            load.open_stage(int(payload["stage"]), payload["start_unix_ns"], payload["end_unix_ns"])

    def _on_drain(self, _sender: str, payload: Any) -> None:
        if self._load_of(payload) is not None:
            self._drain()

    def _on_abandon(self, _sender: str, payload: Any) -> None:
        self._abandoned = payload["run_id"]
        if self._load_of(payload) is not None:
            logger.info("The run could not begin: this worker waits for the next")
            self.close()

    @staticmethod
    def _load_of(payload: Any) -> LoadWorker | None:
        """None where this process has no part in that run, or has it no more."""
        load = POST.worker
        return load if load is not None and load.assignment.run_id == payload["run_id"] else None

    def _drain(self) -> None:
        load = POST.worker
        if load is None or self._draining:
            return
        self._draining = True
        try:
            report = load.drain()
            self._end_snapshots()
            self._send_snapshot(load)
            last_words = flush_message(report, load.assignment.run_id, load.axis.moved_ns())
            self._publish(last_words)
            self._messenger.to_master(FLUSHED, last_words)
        finally:
            POST.put(None)
            self.close()
            self._left.set()

    def _end_snapshots(self) -> None:
        if self._snapshots is not None:
            self._snapshots.kill()
            self._snapshots = None

    def _publish(self, last_words: dict[str, Any]) -> None:
        """For a merge without the master, should it be gone."""
        try:
            if self._store is not None:
                self._store.publish_control({flushed_field(last_words["worker_id"]): json.dumps(last_words)})
        except StoreError as error:
            logger.warning("%s", error)

    def leave(self) -> None:
        """This process was told to end: drain and flush as at the end of a run, then return."""
        if POST.worker is None:
            return
        if not self._draining:
            logger.info("This worker leaves the run: it drains and flushes first")
            self._drain()
        self._left.wait()

    def close(self) -> None:
        """Let go of the run. Where it was not drained, as its start failed or its master died, of its load too."""
        self._end_snapshots()
        load = POST.worker
        if load is not None:
            POST.put(None)
            load.abandon()
        if self._shipper is not None:
            self._shipper.close()
            self._shipper = None
        if self._store is not None:
            self._store.close()
            self._store = None
        self._schedule = None
        # A workload refers to itself: frozen, it would never be freed.
        gc.unfreeze()


def _in_thread_pool(call: Callable[[], None]) -> None:
    """Wait for it without stopping the loop. The pool would print a traceback of a full disk."""

    def attempt() -> OSError | None:
        try:
            call()
        except OSError as error:
            return error
        return None

    error = gevent.get_hub().threadpool.apply(attempt)
    if error is not None:
        raise error


def _calm_garbage_collector(transport: TransportName) -> None:
    """What lives until the end of the run is not worth walking through again: a full collection would stop the loop.

    The kernel transport leaves no garbage behind (``tests/load/test_memory.py``), so that only the youngest objects are
    looked at, in passes of a few milliseconds; all that live, with thousands of streams, would take ten times as long.
    The official SDK leaves some with each request.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*((25_000, 1000, 1000) if transport == "kernel" else (20_000, 20, 100)))


def flush_message(report: FlushReport, run_id: str, wall_clock_moved_ns: int) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "worker_id": report.worker_id,
        "last_seq": report.last_seq,
        "durable_seq": report.durable_seq,
        "requests": report.requests,
        "unstorable_values": report.unstorable_values,
        "spool_path": report.spool_path,
        "wall_clock_moved_ns": wall_clock_moved_ns,
    }
