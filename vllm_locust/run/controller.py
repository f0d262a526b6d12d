"""One test run from the master's (or the only process's) side: prepare, warm up, measure, drain, merge.

Locust's own endings lose what workers still hold, so every way to stop comes here first: ``finish`` drains and
merges, and only then does Locust quit. What happens between is the ``Course``.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gevent
from gevent.event import Event

from vllm_locust import clock
from vllm_locust.aggregate import Snapshots
from vllm_locust.clock import WallAxis
from vllm_locust.errors import StoreError, VllmLocustError
from vllm_locust.load.worker import FLUSH_TIMEOUT_NS
from vllm_locust.run.agreement import versions
from vllm_locust.run.common_clock import shift_ns
from vllm_locust.run.control_fields import ControlFields
from vllm_locust.run.course.course import Course, RunView
from vllm_locust.run.course.spawning import SpawnOrder
from vllm_locust.run.messenger import ABANDON, DRAIN, Messenger
from vllm_locust.run.progress import Progress
from vllm_locust.run.results.merge_apart import merge_apart
from vllm_locust.run.results.recovery import STOPPED_EARLY, WORKERS, left_in_redis
from vllm_locust.run.run_description import Checked, description
from vllm_locust.run.telemetry.samplers import Samplers
from vllm_locust.run.workers import RunWorkers
from vllm_locust.store.clock_offset import ClockOffset, measure_clock_offset
from vllm_locust.store.embedded import EmbeddedValkey, start_embedded
from vllm_locust.store.intake import RecorderReport
from vllm_locust.store.recorder import RecorderConfig
from vllm_locust.store.recorder_process import RecorderProcess, start_recorder
from vllm_locust.store.redis_store import RunStore
from vllm_locust.store.redis_url import RedisOptions, redis_options
from vllm_locust.store.rundir import RunDirectory, write_json

logger = logging.getLogger(__name__)

RECORDER_TIMEOUT_S = 60.0
STAY_S = 3600
"""An embedded Valkey that holds records which could not be written outlives the run for so long."""
TELEMETRY_BEFORE_NS = 2_000_000_000
"""Who has published so shortly before a run is expected to go on."""


class RunController:
    """One test run. ``start`` raises when it cannot begin; after that ``finish`` must be called, from anywhere."""

    def __init__(
        self,
        messenger: Messenger,
        checked: Checked,
        snapshots: Snapshots,
        spawn_order: SpawnOrder,
        course: Callable[[RunView], Course],
        *,
        one_of_many: bool,
    ) -> None:
        """``one_of_many``: further runs may follow in this process, and share its ``--run-dir`` with a number each."""
        self._messenger = messenger
        self._checked = checked
        self._config = checked.config
        started_ns = clock.unix_ns()
        self.run_id = f"{clock.utc_stamp(started_ns)}-{os.urandom(3).hex()}"
        self.exit_code = 1
        self._started_unix_ns = started_ns
        self._workers = RunWorkers(self.run_id, messenger, snapshots, messenger.refused)
        self._redis_url = ""
        self._finishing = False
        self._finished = Event()
        self._early: list[str] = []
        """Workers that have come while others were prepared."""
        self._spawned = Event()
        self._valkey: EmbeddedValkey | None = None
        self._store: RunStore | None = None
        self._control: ControlFields | None = None
        self._recorder: RecorderProcess | None = None
        self._samplers = Samplers(checked, self.run_id)
        self._clock_offset: ClockOffset | None = None
        self._axis = WallAxis()
        self._progress = Progress(self._config.progress)
        self._conductor: gevent.Greenlet | None = None
        create = RunDirectory.create_next if one_of_many else RunDirectory.create
        self.run_dir = create(Path(self._config.run_dir or f"runs/{self.run_id}"))
        try:
            self._course = course(self._view(snapshots, spawn_order))
        except BaseException:
            self.run_dir.forget_start()
            raise

    def _view(self, snapshots: Snapshots, spawn_order: SpawnOrder) -> RunView:
        return RunView(
            config=self._config,
            workload=self._checked.workload,
            messenger=self._messenger,
            workers=self._workers,
            snapshots=snapshots,
            progress=self._progress,
            spawn_order=spawn_order,
            spawned=self._spawned,
            add_worker=self._add_worker,
            common_unix_ns=self._common_unix_ns,
            publish=self._publish,
            requests_waiting=self._requests_waiting,
            run_id=self.run_id,
            run_dir=self.run_dir,
        )

    # What live views are told

    @property
    def checked(self) -> Checked:
        return self._checked

    @property
    def redis(self) -> RedisOptions:
        return redis_options(self._redis_url, self._checked.secrets.redis_password_file)

    @property
    def standing(self) -> dict[str, Any]:
        """``phase finishing users left_s``, of an open loop also ``offered_rps`` and ``stage``."""
        course = self._course
        return {**course.told, "phase": course.phase, "finishing": self._finishing, "users": self._messenger.users}

    @property
    def workers(self) -> RunWorkers:
        return self._workers

    # The beginning

    def start(self, finish_locust: Callable[[], None]) -> None:
        """Bring up the store and the recorder, and wait until every worker is ready. ``finish_locust`` is called when
        the run has ended by its own clock.
        """
        try:
            self._bring_up()
        except BaseException:
            self._workers.tell(self._workers.ids, ABANDON)
            self._let_expire()
            self._tear_down()
            self.run_dir.forget_start()
            raise
        self._announce()
        self._conductor = gevent.spawn(self._conduct, finish_locust)
        for worker_id in self._early:
            self.on_worker_connected(worker_id)

    def _bring_up(self) -> None:
        url = self._config.redis_url
        if url is None:
            self._valkey = start_embedded()
            url = self._valkey.url
        password_file = self._checked.secrets.redis_password_file
        self._store = RunStore(redis_options(url, password_file), self.run_id)
        server = self._store.check_server()
        self._measure_clock(server.run_id)
        self._recorder = start_recorder(
            RecorderConfig(
                run_id=self.run_id,
                redis_url=url,
                redis_password_file=None if password_file is None else str(password_file),
                telemetry_from_unix_ns=self._common_unix_ns() - TELEMETRY_BEFORE_NS,
            ),
            self.run_dir,
            spawn=gevent.spawn,
        )
        self._redis_url = url
        self._samplers.start(url)
        parts = self._course.parts(self._messenger.worker_ids())
        for worker_id, part in parts.items():
            self._workers.prepare(worker_id, self._prepare_message() | part)
        at_start = self._run_json(None, None)
        write_json(self.run_dir.run_json, at_start)
        self._control = ControlFields(self._store, json.dumps(at_start))
        self._workers.await_ready()
        self._samplers.await_first_look()
        self._course.check_ready()

    def _measure_clock(self, server_run_id: str) -> None:
        assert self._store is not None
        self._clock_offset = measure_clock_offset(
            self._store.server_time_unix_ns, server_run_id, unix_ns=self._axis.unix_ns
        )

    def _announce(self) -> None:
        logger.info(
            "Run %s: %s, model %s, workload %s, %s; results in %s",
            self.run_id,
            ", ".join(target.url for target in self._config.targets),
            self._checked.server.model,
            self._checked.workload.name,
            self._course.in_words,
            self.run_dir.path,
        )

    def _prepare_message(self) -> dict[str, Any]:
        """What is the same for all workers."""
        return {
            "versions": versions(),
            "flags": dict(self._checked.flags),
            "run_id": self.run_id,
            "config": self._config.to_json(),
            "needs_api_key": self._checked.secrets.api_key is not None,
            "model": self._checked.server.model,
            "max_model_len": self._checked.server.max_model_len,
            "token_detail": self._token_detail,
            "workload_fingerprint": self._checked.workload.fingerprint,
            "redis_url": self._redis_url,
            "spool_dir": str(self.run_dir.path.absolute() / "spool"),
            "users": self._course.users_of_a_worker,
        }

    @property
    def _token_detail(self) -> bool:
        asked = self._config.token_detail
        return asked == "on" or (asked == "auto" and self._checked.server.tells_usage_per_chunk)

    # What Locust and the workers say

    def on_worker_connected(self, worker_id: str) -> None:
        """A worker has come while the run goes on, or before it is known to begin."""
        if self._finishing or worker_id in self._workers.ids:
            return
        if self._conductor is None:
            self._early.append(worker_id)
        else:
            self._course.join(worker_id)

    def _add_worker(self, worker_id: str, part: dict[str, Any]) -> None:
        logger.info("Worker %s joins the run", worker_id)
        self._workers.prepare(worker_id, self._prepare_message() | part)
        self._publish({WORKERS: json.dumps(self._workers.ids)})

    def on_ready(self, worker_id: str, payload: Any) -> None:
        if not self._workers.on_ready(worker_id, payload):
            return
        error = self._workers.refusal(worker_id)
        if self._finishing:
            # What it was told of the end came while it was being prepared, and told it nothing.
            self._workers.tell([worker_id], DRAIN)
            return
        if self._conductor is None:
            return
        if error is None:
            self._course.on_ready(worker_id)
        else:
            logger.error("Worker %s cannot join the run: %s", worker_id, error)
            self._course.on_refused(worker_id)

    def on_snapshot(self, worker_id: str, payload: Any) -> None:
        self._workers.on_snapshot(worker_id, payload)

    def on_flushed(self, worker_id: str, payload: Any) -> None:
        self._workers.on_flushed(worker_id, payload, at_the_end=self._finishing)

    def on_spawned(self) -> None:
        self._spawned.set()

    # The middle

    def _conduct(self, finish_locust: Callable[[], None]) -> None:
        try:
            reason = self._course.run()
        except Exception as error:
            logger.exception("The run was ended by a fault of its master")
            reason = f"an internal error: {type(error).__name__}: {error}"
        self.finish(reason)
        finish_locust()

    def _publish(self, fields: dict[str, str]) -> None:
        """For a merge after this master's sudden end. Where it has none, run.json has the same."""
        if self._control is not None:
            self._control.set(fields)

    def _common_unix_ns(self) -> int:
        """Now on the Redis server's clock, which is the common one."""
        assert self._clock_offset is not None
        return self._axis.unix_ns() + shift_ns(self._clock_offset)

    def _requests_waiting(self) -> float | None:
        return self._samplers.requests_waiting

    # The end

    def finish(self, reason: str | None) -> None:
        """End the run and wait until its results are written. ``reason`` is None where the window ran its full
        length.
        """
        if self._finishing:
            self._finished.wait()
            return
        self._finishing = True
        if reason is not None:
            reason = self._workers.all_left or reason
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
            self._tear_down()
            self._finished.set()

    def _finish(self, reason: str | None) -> None:
        self._course.end()
        stopped_early = reason if self._course.ends_by_itself or not self._course.has_begun else None
        self._publish({STOPPED_EARLY: stopped_early or ""})
        self._course.phase = "drain"
        self._workers.tell(self._messenger.worker_ids(), DRAIN)
        limit_ns = self._config.drain_timeout_ns + FLUSH_TIMEOUT_NS + 15_000_000_000
        missing = self._workers.await_flushed(limit_ns, self._course.show)
        self._samplers.end_scraper()
        report = self._end_recorder()
        write_json(
            self.run_dir.run_json, self._run_json(report, stopped_early, missing) | {"ended_unix_ns": clock.unix_ns()}
        )
        self._progress.end()
        self.exit_code = merge_apart(self.run_dir)
        if report is not None and report.drained:
            self._let_expire()

    def _let_expire(self) -> None:
        try:
            if self._store is not None:
                self._store.ttl(self._config.ttl_ns // 1_000_000_000)
        except StoreError as error:
            logger.warning("%s; what Redis holds of the run %s stays there", error, self.run_id)

    def _end_recorder(self) -> RecorderReport | None:
        if self._recorder is None:
            return None
        try:
            report = self._recorder.finish(RECORDER_TIMEOUT_S)
        except StoreError as error:
            logger.error("%s", error)
            report = None
        self._recorder = None
        if report is None or not report.drained:
            valkey, self._valkey = self._valkey, None
            url = self._redis_url if valkey is None or valkey.leave(STAY_S) else None
            logger.error("%s", left_in_redis(report, self.run_dir, url, None if valkey is None else STAY_S))
        return report

    def _tear_down(self) -> None:
        if self._recorder is not None:
            self._recorder.kill()
            self._recorder = None
        # Only now: the recorder waits for what is sampled till the end.
        self._samplers.end()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._valkey is not None:
            self._valkey.stop()
            self._valkey = None

    def _run_json(
        self, report: RecorderReport | None, stopped_early: str | None, missing: list[str] | None = None
    ) -> dict[str, Any]:
        known = description(self._checked, self.run_id, self._started_unix_ns, token_detail=self._token_detail)
        return known | {
            "ended_unix_ns": None,
            **self._course.facts(),
            "stopped_early": stopped_early,
            "workers": self._workers.to_json(missing or []),
            "records": None,
            "pages_scraped": self._samplers.pages_scraped,
            "recorder": None if report is None else asdict(report),
        }
