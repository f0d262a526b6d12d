"""One test run from the master's (or the only process's) side: prepare, warm up, measure, drain, merge.

Locust's own endings lose what workers still hold, so every way to stop comes here first: ``finish`` drains and
merges, and only then does Locust quit.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gevent
from gevent.event import Event

from vllm_locust import __version__, clock
from vllm_locust.aggregate import Snapshot, Snapshots
from vllm_locust.clock import WallAxis
from vllm_locust.errors import RunFailed, StoreError, UsageError, VllmLocustError
from vllm_locust.load.worker import FLUSH_TIMEOUT_NS
from vllm_locust.run.messenger import DRAIN, PREPARE, Absences, Messenger
from vllm_locust.run.progress import Progress
from vllm_locust.run.recovery import RUN, STOPPED_EARLY, WINDOW_END, WINDOW_START
from vllm_locust.run.run_description import Checked, description
from vllm_locust.run.worker_side import last_words
from vllm_locust.store.clock_offset import ClockOffset, measure_clock_offset
from vllm_locust.store.embedded import EmbeddedValkey, start_embedded
from vllm_locust.store.intake import RecorderReport
from vllm_locust.store.recorder import RecorderConfig
from vllm_locust.store.recorder_process import RecorderProcess, start_recorder
from vllm_locust.store.redis_store import RunStore
from vllm_locust.store.redis_url import redis_options
from vllm_locust.store.rundir import RunDirectory, write_json

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 120.0
SILENT_WHILE_PREPARED_S = 30.0
"""Loading a large workload may keep a worker from its heartbeats for so long."""
WAIT_FOR_GONE_S = 5.0
RECORDER_TIMEOUT_S = 60.0
POLL_S = 0.05


class RunController:
    """One test run. ``start`` raises when it cannot begin; after that ``finish`` must be called, from anywhere."""

    def __init__(self, messenger: Messenger, checked: Checked, snapshots: Snapshots, *, one_of_many: bool) -> None:
        """``one_of_many``: further runs may follow in this process, and share its ``--run-dir`` with a number each."""
        self._messenger = messenger
        self._checked = checked
        self._config = checked.config
        self._snapshots = snapshots
        started_ns = clock.unix_ns()
        self.run_id = f"{clock.utc_stamp(started_ns)}-{os.urandom(3).hex()}"
        self.exit_code = 1
        self._started_unix_ns = started_ns
        self._window: list[int] = []
        self._ready: dict[str, str | None] = {}
        self._flushed: dict[str, dict[str, Any]] = {}
        self._workers: list[str] = []
        self._left: list[str] = []
        self._redis_url = ""
        self._users_seen = False
        self._finishing = False
        self._finished = Event()
        self._spawned = Event()
        self._valkey: EmbeddedValkey | None = None
        self._store: RunStore | None = None
        self._recorder: RecorderProcess | None = None
        self._clock_offset: ClockOffset | None = None
        self._axis = WallAxis()
        self._phase = "warmup"
        self._progress = Progress(self._config.progress)
        self._conductor: gevent.Greenlet | None = None
        create = RunDirectory.create_next if one_of_many else RunDirectory.create
        self.run_dir = create(Path(self._config.run_dir or f"runs/{self.run_id}"))

    # The beginning

    def start(self, finish_locust: Callable[[], None]) -> None:
        """Bring up the store and the recorder, and wait until every worker is ready. ``finish_locust`` is called when
        the run has ended by its own clock.
        """
        try:
            self._bring_up()
        except BaseException:
            self._tear_down()
            raise
        self._announce()
        self._conductor = gevent.spawn(self._conduct, finish_locust)

    def _bring_up(self) -> None:
        url = self._config.redis_url
        if url is None:
            self._valkey = start_embedded()
            url = self._valkey.url
        options = redis_options(url, self._checked.secrets.redis_password_file)
        self._store = RunStore(options, self.run_id)
        server = self._store.check_server()
        self._measure_clock(server.run_id)
        password_file = self._checked.secrets.redis_password_file
        self._recorder = start_recorder(
            RecorderConfig(
                run_id=self.run_id,
                redis_url=url,
                redis_password_file=None if password_file is None else str(password_file),
            ),
            self.run_dir,
            spawn=gevent.spawn,
        )
        self._workers = self._messenger.worker_ids()
        at_start = self._run_json(None, None)
        write_json(self.run_dir.run_json, at_start)
        self._store.publish_control({RUN: json.dumps(at_start)})
        self._redis_url = url
        shares = max(1, len(self._workers))
        for share, worker_id in enumerate(self._workers):
            message = self._prepare_message(share=share, shares=shares, prompt_seed=self._config.seed)
            self._messenger.to_worker(worker_id, PREPARE, message)
        self._await_ready()

    def on_worker_connected(self, worker_id: str) -> None:
        """A worker that joins while the run goes on draws from the whole workload in an order of its own: the shares of
        the others are theirs to the end. Of a finite workload nothing is left for it.
        """
        if self._conductor is None or self._finishing or worker_id in self._workers:
            return
        self._workers.append(worker_id)
        share, shares = 0, 1
        if self._checked.workload.replays_times:
            share = self._checked.workload.rows
            shares = share + 1
        logger.info("Worker %s joins the run", worker_id)
        message = self._prepare_message(share=share, shares=shares, prompt_seed=self._config.seed + len(self._workers))
        self._messenger.to_worker(worker_id, PREPARE, message)

    def _measure_clock(self, server_run_id: str) -> None:
        assert self._store is not None
        self._clock_offset = measure_clock_offset(
            self._store.server_time_unix_ns, server_run_id, unix_ns=self._axis.unix_ns
        )

    def _announce(self) -> None:
        config, window_ns = self._config, self._config.window_ns
        logger.info(
            "Run %s: %s, model %s, workload %s, %d users; warm-up of %d requests or %g s, then a window of %s; "
            "results in %s",
            self.run_id,
            ", ".join(target.url for target in config.targets),
            self._checked.server.model,
            self._checked.workload.name,
            self._messenger.users_wanted,
            config.warmup_requests,
            config.warmup_time_ns / 1e9,
            "no set length, until it is stopped" if window_ns is None else f"{window_ns / 1e9:g} s",
            self.run_dir.path,
        )

    def _prepare_message(self, *, share: int, shares: int, prompt_seed: int) -> dict[str, Any]:
        return {
            "version": __version__,
            "run_id": self.run_id,
            "config": self._config.to_json(),
            "needs_api_key": self._checked.secrets.api_key is not None,
            "model": self._checked.server.model,
            "max_model_len": self._checked.server.max_model_len,
            "token_detail": self._token_detail,
            "workload_fingerprint": self._checked.workload.fingerprint,
            "redis_url": self._redis_url,
            "spool_dir": str(self.run_dir.path.absolute() / "spool"),
            "share": share,
            "shares": shares,
            "prompt_seed": prompt_seed,
        }

    @property
    def _token_detail(self) -> bool:
        asked = self._config.token_detail
        return asked == "on" or (asked == "auto" and self._checked.server.tells_usage_per_chunk)

    def on_ready(self, worker_id: str, payload: Any) -> None:
        if payload.get("run_id") == self.run_id:
            self._ready[worker_id] = payload.get("error")
            if self._conductor is not None and payload.get("error"):
                logger.error("Worker %s cannot join the run: %s", worker_id, payload["error"])

    def on_snapshot(self, worker_id: str, payload: Any) -> None:
        try:
            snapshot = Snapshot.from_message(payload)
        except ValueError as error:
            logger.warning("A snapshot of worker %s is not usable: %s", worker_id, error)
            return
        if snapshot.worker_id == worker_id:
            self._snapshots.offer(snapshot)

    def on_flushed(self, worker_id: str, payload: Any) -> None:
        try:
            words = last_words(payload)
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("The last words of worker %s are not usable: %r", worker_id, error)
            return
        if words["run_id"] == self.run_id and worker_id in self._workers and words["worker_id"] == worker_id:
            self._flushed[worker_id] = words
            if not self._finishing:
                # Its users' load was missing, or on other workers, from here on.
                logger.warning("Worker %s has left the run before its end", worker_id)
                self._left.append(worker_id)

    def on_spawned(self) -> None:
        self._spawned.set()

    def _await_ready(self) -> None:
        deadline_ns = clock.monotonic_ns() + round(READY_TIMEOUT_S * 1e9)
        absences = Absences(self._messenger)
        while missing := [worker for worker in self._workers if worker not in self._ready]:
            silent = absences.beyond(missing, SILENT_WHILE_PREPARED_S)
            if left := [worker for worker in missing if worker in silent or self._messenger.has_left(worker)]:
                raise RunFailed(
                    f"workers left while they were prepared for the run: {', '.join(left)}; read their logs, "
                    "and start again without them or when they are back"
                )
            if clock.monotonic_ns() > deadline_ns:
                raise RunFailed(f"workers {', '.join(missing)} did not get ready within {READY_TIMEOUT_S:.0f} s")
            gevent.sleep(POLL_S)
        problems = sorted({f"worker {worker}: {error}" for worker, error in self._ready.items() if error})
        if problems:
            raise UsageError(*problems)

    # The middle

    def _conduct(self, finish_locust: Callable[[], None]) -> None:
        try:
            reason = self._run_phases()
        except Exception as error:
            logger.exception("The run was ended by a fault of its master")
            reason = f"an internal error: {type(error).__name__}: {error}"
        self.finish(reason)
        finish_locust()

    def _run_phases(self) -> str | None:
        """Warm-up and window. Why the window ended before its time, or None."""
        self._warm_up()
        start_ns = clock.monotonic_ns()
        self._window.append(self._common_unix_ns())
        self._publish({WINDOW_START: str(self._window[0])})
        self._phase = "window"
        length_ns = self._config.window_ns
        while length_ns is None or clock.monotonic_ns() - start_ns < length_ns:
            if self._all_users_ended():
                break
            left_ns = None if length_ns is None else length_ns - (clock.monotonic_ns() - start_ns)
            self._show(None if left_ns is None else left_ns / 1e9)
            gevent.sleep(POLL_S if left_ns is None else min(POLL_S, max(0, left_ns) / 1e9))
        used_up = length_ns is not None and clock.monotonic_ns() - start_ns < length_ns
        return "every user has ended: the workload is used up" if used_up else None

    def _warm_up(self) -> None:
        """Until all users are there and have completed the warm-up requests, or for the warm-up time at most."""
        started_ns = clock.monotonic_ns()
        while clock.monotonic_ns() - started_ns < self._config.warmup_time_ns or not self._spawned.is_set():
            if self._spawned.is_set() and self._completed() >= self._config.warmup_requests:
                return
            if self._spawned.is_set() and self._all_users_ended():
                return
            self._show(None)
            gevent.sleep(POLL_S)

    def _all_users_ended(self) -> bool:
        """The users of a finite workload end with it. A worker that has not reported yet or is away shows none too."""
        if self._messenger.users:
            self._users_seen = True
            return False
        return self._users_seen and set(self._workers) <= set(self._messenger.worker_ids())

    def _completed(self) -> int:
        known = [self._snapshots.of_worker(worker_id) for worker_id in self._snapshots.worker_ids]
        return sum(sum(snapshot.aggregate.finished.values()) for snapshot in known if snapshot is not None)

    def _publish(self, fields: dict[str, str]) -> None:
        """For a merge after this master's sudden end. Where it does not, run.json has the same."""
        try:
            if self._store is not None:
                self._store.publish_control(fields)
        except StoreError as error:
            logger.warning("%s", error)

    def _common_unix_ns(self) -> int:
        """Now on the Redis server's clock, which is the common one. An offset within its own uncertainty is none."""
        offset = self._clock_offset
        known = offset is not None and abs(offset.offset_ns) > offset.uncertainty_ns
        return self._axis.unix_ns() + (offset.offset_ns if offset is not None and known else 0)

    def _show(self, left_s: float | None) -> None:
        self._progress.show(clock.monotonic_ns(), self._phase, left_s, self._snapshots.merged)

    # The end

    def finish(self, reason: str | None) -> None:
        """End the run and wait until its results are written. ``reason`` is None where the window ran its full
        length.
        """
        if self._finishing:
            self._finished.wait()
            return
        self._finishing = True
        if self._conductor is not None and self._conductor is not gevent.getcurrent():
            self._conductor.kill(block=False)
        try:
            self._finish(reason)
        except VllmLocustError as error:
            logger.error("%s", error)
            self.exit_code = error.exit_code
        except Exception:
            logger.exception("The run could not be finished; its records are in %s", self.run_dir.path)
            self.exit_code = 1
        finally:
            self._finished.set()

    def _finish(self, reason: str | None) -> None:
        stopped_early = reason if self._config.window_ns is not None or not self._window else None
        if self._window:
            self._window.append(self._common_unix_ns())
            self._publish({WINDOW_END: str(self._window[1])})
        self._publish({STOPPED_EARLY: stopped_early or ""})
        self._phase = "drain"
        self._messenger_to_all(DRAIN)
        missing = self._await_flushed()
        report = self._end_recorder()
        write_json(
            self.run_dir.run_json, self._run_json(report, stopped_early, missing) | {"ended_unix_ns": clock.unix_ns()}
        )
        self._progress.end()
        self._merge()
        if self._store is not None and report is not None and report.drained:
            self._store.ttl(max(1, self._config.ttl_ns // 1_000_000_000))
        self._tear_down()

    def _messenger_to_all(self, kind: str) -> None:
        for worker_id in self._messenger.worker_ids():
            self._messenger.to_worker(worker_id, kind, {"run_id": self.run_id})

    def _await_flushed(self) -> list[str]:
        """Wait for the workers' last words. Returns those that were lost without, or had left before the end."""
        limit_ns = self._config.drain_timeout_ns + FLUSH_TIMEOUT_NS + 15_000_000_000
        deadline_ns = clock.monotonic_ns() + limit_ns
        absences = Absences(self._messenger)
        while clock.monotonic_ns() < deadline_ns:
            waiting = [worker for worker in self._workers if worker not in self._flushed]
            if len(absences.beyond(waiting, WAIT_FOR_GONE_S)) == len(waiting):
                break
            self._show(None)
            gevent.sleep(POLL_S)
        return [worker for worker in self._workers if worker not in self._flushed or worker in self._left]

    def _end_recorder(self) -> RecorderReport | None:
        if self._recorder is None:
            return None
        try:
            report = self._recorder.finish(RECORDER_TIMEOUT_S)
        except StoreError as error:
            logger.error("%s", error)
            report = None
        self._recorder = None
        return report

    def _merge(self) -> None:
        """In a process of its own: a merge takes memory and seconds, and the master's loop must keep turning."""
        command = [sys.executable, "-m", "vllm_locust", "merge", str(self.run_dir.path)]
        code = subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode
        self.exit_code = code if code >= 0 else 1

    def _tear_down(self) -> None:
        if self._recorder is not None:
            self._recorder.kill()
            self._recorder = None
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._valkey is not None:
            self._valkey.stop()
            self._valkey = None

    # The record

    def _run_json(
        self, report: RecorderReport | None, stopped_early: str | None, missing: list[str] | None = None
    ) -> dict[str, Any]:
        known = description(self._checked, self.run_id, self._started_unix_ns, token_detail=self._token_detail)
        whole = len(self._window) == 2
        return known | {
            "ended_unix_ns": None,
            "window": {"start_unix_ns": self._window[0], "end_unix_ns": self._window[1]} if whole else None,
            "stages": [],
            "stopped_early": stopped_early,
            "workers": self._workers_json(missing or []),
            "records": None,
            "recorder": None if report is None else asdict(report),
            "slots": None,
        }

    def _workers_json(self, missing: list[str]) -> dict[str, Any]:
        """With the last words of the workers, and of those that were lost before they had any the requests that they
        are known to have finished: by these the merge finds what is in no file.
        """
        snapshots = {worker_id: self._snapshots.of_worker(worker_id) for worker_id in missing}
        return {
            "expected": len(self._workers),
            "ids": self._workers,
            "missing": missing,
            "flushed": dict(sorted(self._flushed.items())),
            "finished": {
                worker_id: 0 if snapshot is None else sum(snapshot.aggregate.finished.values())
                for worker_id, snapshot in snapshots.items()
            },
        }
