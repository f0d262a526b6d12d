"""The run that goes on, or the last one, as the pages and endpoints of the web UI tell of it.

One greenlet looks once a second, whether or not anybody watches, so that a page that is opened late has the whole
course. What is told is made from its last look: many viewers cost the master hardly more than one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import gevent

from vllm_locust import __version__, clock
from vllm_locust.aggregate import RunAggregate, Snapshots
from vllm_locust.errors import StoreError
from vllm_locust.live.condition import Condition, verdict_json
from vllm_locust.live.figures import Recent, latency_table, outcomes, totals, worker_row
from vllm_locust.live.history import History
from vllm_locust.live.telemetry import GpusNow, ServersNow
from vllm_locust.run.controller import RunController
from vllm_locust.run.messenger import Messenger
from vllm_locust.run.web.finished_run import FinishedRun
from vllm_locust.store.live_telemetry import LiveTelemetry
from vllm_locust.telemetry import TelemetryKind

logger = logging.getLogger(__name__)

SCHEMA: Final = 1
INTERVAL_NS: Final = 1_000_000_000
POINTS_AT_ONCE: Final = 1200
_VERDICT_EVERY: Final = 5


class _Course:
    """All that is known of one run while it goes on."""

    def __init__(self, controller: RunController, snapshots: Snapshots) -> None:
        self.controller = controller
        self.snapshots = snapshots
        self.merged = RunAggregate()
        self.history = History()
        self.point: dict[str, Any] = {}
        self.gpu_table: list[dict[str, Any]] = []
        self.verdict: dict[str, Any] = verdict_json(None)
        self.telemetry_fault: str | None = None
        self._begun_ns = clock.monotonic_ns()
        self._recent = Recent()
        self._condition = Condition()
        self._servers = ServersNow([page.target for page in controller.checked.metrics_pages])
        self._gpus = GpusNow()
        self._telemetry = LiveTelemetry(controller.redis)
        self._looks = 0
        self._looked_ns: int | None = None

    def look(self, *, last: bool = False) -> None:
        now_ns = clock.monotonic_ns()
        self.merged = self.snapshots.merged()
        self._condition.take(self.snapshots)
        if not last:
            self._read_telemetry(now_ns)
        now = self.controller.standing
        self.gpu_table = self._gpus.table(now_ns)
        point = {"t_s": round((now_ns - self._begun_ns) / 1e9, 3), "phase": now["phase"], "stage": now.get("stage")}
        point |= {"offered_rps": now.get("offered_rps"), "left_s": now.get("left_s")}
        point["users"] = None if self.controller.checked.config.open_loop else now["users"]
        point |= self._recent.figures(now_ns, self.merged)
        point |= self._condition.figures() | self._servers.figures(now_ns)
        point["gpus"] = {
            row["gpu"]: [row["utilization"], row["memory_used_bytes"], row["power_w"]] for row in self.gpu_table
        }
        if not last or self._looked_ns is None or now_ns - self._looked_ns > INTERVAL_NS // 2:
            # Right after another look hardly anything has happened: it would be a drop that there was not.
            self.point = self.history.add(point)
        self._looked_ns = now_ns
        if last or self._looks % _VERDICT_EVERY == 0:
            self.verdict = verdict_json(
                self._condition.verdict(
                    self.merged,
                    max_failures=self.controller.checked.config.max_failures,
                    workers_expected=len(self.controller.workers.ids),
                    workers_missing=self.controller.workers.away,
                )
            )
        self._looks += 1

    def _read_telemetry(self, now_ns: int) -> None:
        try:
            batches = self._telemetry.read()
        except StoreError as error:
            self.telemetry_fault = str(error)
            return
        refused = self._telemetry.refused
        self.telemetry_fault = f"{refused} batches of telemetry could not be read" if refused else None
        for kind, rows in batches:
            if kind is TelemetryKind.SERVER:
                self._servers.take(now_ns, rows)
            elif kind is TelemetryKind.GPU:
                self._gpus.take(now_ns, rows)

    def close(self) -> None:
        self._telemetry.close()

    def facts(self) -> dict[str, Any]:
        checked, config = self.controller.checked, self.controller.checked.config
        return {
            "run_id": self.controller.run_id,
            "run_name": config.run_name,
            "model": checked.server.model,
            "workload": checked.workload.name,
            "targets": [target.url for target in config.targets],
            "open_loop": config.open_loop,
            "slos": list(config.slos),
        }

    def told(self) -> dict[str, Any]:
        return {
            "run": self.facts(),
            "now": self.point,
            "totals": totals(self.merged),
            "latency": latency_table(self.merged),
            "outcomes": outcomes(self.merged),
            "workers": self._workers(),
            "gpus": self.gpu_table,
            "verdict": self.verdict,
            "telemetry_fault": self.telemetry_fault,
        }

    def _workers(self) -> list[dict[str, Any]]:
        away = set(self.controller.workers.away)
        rows = []
        for worker_id in self.snapshots.worker_ids:
            snapshot = self.snapshots.of_worker(worker_id)
            if snapshot is not None:
                row = worker_row(worker_id, snapshot.aggregate, snapshot.health)
                rows.append(row | {"state": "away" if worker_id in away else "here"})
        return rows


class LiveRun:
    """The plugin tells when a run begins, cannot begin, and ends."""

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self._course: _Course | None = None
        self._told: dict[str, Any] | None = None
        self._greenlet: gevent.Greenlet | None = None
        self.preparing = False
        self.finished: FinishedRun | None = None
        self.problems: tuple[str, ...] = ()
        """Why the last start came to nothing."""

    @property
    def is_going(self) -> bool:
        return self.preparing or self._greenlet is not None

    @property
    def controller(self) -> RunController | None:
        """Of the run that goes on."""
        return None if self._greenlet is None or self._course is None else self._course.controller

    @property
    def state(self) -> str:
        """``ready``, ``preparing``, ``running`` or ``finishing``, in which a run is drained and merged."""
        if self.preparing:
            return "preparing"
        controller = self.controller
        if controller is None:
            return "ready"
        return "finishing" if controller.standing["finishing"] else "running"

    def begin(self, controller: RunController, snapshots: Snapshots) -> None:
        self.preparing, self.problems, self._told = False, (), None
        self._course = _Course(controller, snapshots)
        self._greenlet = gevent.spawn(self._watch, self._course)

    def refuse(self, problems: Sequence[str]) -> None:
        self.preparing, self.problems = False, tuple(problems)

    def end(self) -> None:
        """The run's files are written, or could not be."""
        course = self._course
        if course is None or self._greenlet is None:
            return
        self._greenlet.kill()
        try:
            try:
                course.look(last=True)
            finally:
                course.close()
                self._told, self._greenlet = None, None
                self.finished = FinishedRun.read(course.controller.run_dir, course.controller.exit_code)
        except Exception:
            # The run is over, and its files are written: whoever waits for its end must not wait on.
            logger.exception("The live view of the run could not be brought to its end")

    def _watch(self, course: _Course) -> None:
        due_ns = clock.monotonic_ns()
        while True:
            try:
                course.look()
            except Exception:
                logger.exception("The live view of the run could not be brought up to date")
            self._told = None
            due_ns = max(due_ns + INTERVAL_NS, clock.monotonic_ns())
            gevent.sleep((due_ns - clock.monotonic_ns()) / 1e9)

    def stats(self) -> dict[str, Any]:
        """What ``/llm/stats.json`` has, without the history."""
        if self._told is None and self._course is not None:
            self._told = self._course.told()
        return {
            "schema": SCHEMA,
            "version": __version__,
            "state": self.state,
            "workers_connected": len(self._messenger.worker_ids()) if self._messenger.has_workers else None,
            "problems": list(self.problems),
            **(self._told or {"run": None}),
            **self._judged(),
            "result": None if self.finished is None else self.finished.result,
        }

    def _judged(self) -> dict[str, Any]:
        """The verdict of a run that is over, from its results: that of its live view knew less."""
        if self._course is None or self._greenlet is not None:
            return {}
        result = {} if self.finished is None else self.finished.result
        is_its_own = result.get("run_id") == self._course.controller.run_id
        return {"verdict": result["verdict"] if is_its_own else verdict_json(None)}

    def history(self, run_id: str | None, after: int) -> dict[str, Any]:
        """The points after number ``after`` of the run that the caller knows; all where it is another run by now."""
        if self._course is None:
            return {"step": 1, "points": []}
        first = after if run_id == self._course.controller.run_id else 0
        return {"step": self._course.history.step, "points": self._course.history.after(first, POINTS_AT_ONCE)}

    @property
    def merged(self) -> RunAggregate | None:
        return None if self._course is None else self._course.merged
