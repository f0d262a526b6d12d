"""The workers of one run as its master sees them: who was prepared, is ready, has left, and what each said last."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import gevent

from vllm_locust import clock
from vllm_locust.aggregate import Snapshot, Snapshots
from vllm_locust.errors import RunFailed, UsageError
from vllm_locust.run.message_guard import RefusedMessages
from vllm_locust.run.messenger import FLUSHED, PREPARE, READY, SNAPSHOT, Absences, Messenger
from vllm_locust.worker_message import Ready, read_last_words

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 120.0
SILENT_WHILE_PREPARED_S = 30.0
"""Loading a large workload may keep a worker from its heartbeats for so long."""
WAIT_FOR_GONE_S = 5.0
READY_AT_THE_END_S = 5.0
"""A worker that has come just before the end of the run may take so long; one that hangs does not hold the end up."""
POLL_S = 0.05


class RunWorkers:
    """``on_*`` take what the workers say."""

    def __init__(
        self, run_id: str, messenger: Messenger, snapshots: Snapshots, refused: RefusedMessages | None = None
    ) -> None:
        self._run_id = run_id
        self._messenger = messenger
        self._snapshots = snapshots
        self._prepared_ns: dict[str, int] = {}
        self._answers: dict[str, Ready] = {}
        self._refused_messages = RefusedMessages() if refused is None else refused
        self._flushed: dict[str, dict[str, Any]] = {}
        self._left: list[str] = []
        self.preparation_ns = 0
        """The longest that a worker has taken to get ready."""

    @property
    def ids(self) -> list[str]:
        """All that were ever prepared, in that order."""
        return list(self._prepared_ns)

    @property
    def left(self) -> list[str]:
        """Those that have ended their part before the run's end."""
        return self._left

    @property
    def all_left(self) -> str | None:
        """That they have all left before the run's end, in words; None where one has not."""
        if not self._prepared_ns or not set(self._prepared_ns) <= set(self._left):
            return None
        return f"every worker has left the run before its end: {', '.join(self._left)}"

    @property
    def away(self) -> list[str]:
        """Those that were prepared and are not there now, or have ended their part."""
        here = set(self._messenger.worker_ids())
        return [worker_id for worker_id in self._prepared_ns if worker_id not in here or worker_id in self._left]

    @property
    def _refused(self) -> set[str]:
        """Those that could not get ready, and so have nothing to flush."""
        return {worker_id for worker_id, answer in self._answers.items() if answer.error}

    def schedule_fingerprint(self, worker_id: str) -> str | None:
        """Of the schedule that this worker, which is ready, has computed."""
        return self._answers[worker_id].schedule_fingerprint

    def prepare(self, worker_id: str, message: Mapping[str, Any]) -> None:
        self._prepared_ns[worker_id] = clock.monotonic_ns()
        self._messenger.to_worker(worker_id, PREPARE, message)

    def tell(self, worker_ids: list[str], kind: str, **payload: Any) -> None:
        for worker_id in worker_ids:
            self._messenger.to_worker(worker_id, kind, {"run_id": self._run_id, **payload})

    def on_ready(self, worker_id: str, payload: Any) -> bool:
        """Whether this answers the preparation for this run, and not one of an earlier run."""
        try:
            answer = Ready.from_message(payload)
        except ValueError as error:
            self._refused_messages.add(READY, worker_id, error)
            return False
        if answer.run_id != self._run_id or worker_id not in self._prepared_ns:
            return False
        self._answers[worker_id] = answer
        self.preparation_ns = max(self.preparation_ns, clock.monotonic_ns() - self._prepared_ns[worker_id])
        return True

    def refusal(self, worker_id: str) -> str | None:
        """Why a worker that has answered cannot take part; None where it can."""
        return self._answers[worker_id].error

    def on_snapshot(self, worker_id: str, payload: Any) -> None:
        try:
            snapshot = Snapshot.from_message(payload)
        except ValueError as error:
            self._refused_messages.add(SNAPSHOT, worker_id, error)
            return
        # One that was sent in an earlier run comes before its worker's answer in this one.
        if snapshot.worker_id == worker_id and worker_id in self._answers:
            self._snapshots.offer(snapshot)

    def on_flushed(self, worker_id: str, payload: Any, *, at_the_end: bool) -> None:
        try:
            words = read_last_words(payload)
        except ValueError as error:
            self._refused_messages.add(FLUSHED, worker_id, error)
            return
        if words["run_id"] == self._run_id and worker_id in self._prepared_ns and words["worker_id"] == worker_id:
            self._flushed[worker_id] = words
            if not at_the_end:
                # Its users' load was missing, or on other workers, from here on.
                logger.warning("Worker %s has left the run before its end", worker_id)
                self._left.append(worker_id)

    def await_ready(self) -> None:
        deadline_ns = clock.monotonic_ns() + round(READY_TIMEOUT_S * 1e9)
        absences = Absences(self._messenger)
        while missing := [worker for worker in self._prepared_ns if worker not in self._answers]:
            silent = absences.beyond(missing, SILENT_WHILE_PREPARED_S)
            if left := [worker for worker in missing if worker in silent or self._messenger.has_left(worker)]:
                raise RunFailed(
                    f"workers left while they were prepared for the run: {', '.join(left)}; read their logs, "
                    "and start again without them or when they are back"
                )
            if clock.monotonic_ns() > deadline_ns:
                raise RunFailed(f"workers {', '.join(missing)} did not get ready within {READY_TIMEOUT_S:.0f} s")
            gevent.sleep(POLL_S)
        answers = sorted(self._answers.items())
        problems = sorted({f"worker {worker}: {answer.error}" for worker, answer in answers if answer.error})
        if problems:
            raise UsageError(*problems)

    def await_flushed(self, limit_ns: int, meanwhile: Callable[[], None]) -> list[str]:
        """Wait for the workers' last words. Returns those that were lost without, or had left before the end."""
        begun_ns = clock.monotonic_ns()
        absences = Absences(self._messenger)
        while (waited_ns := clock.monotonic_ns() - begun_ns) < limit_ns:
            awaited = self._prepared_ns if waited_ns < READY_AT_THE_END_S * 1e9 else self._answers
            waiting = [w for w in awaited if w not in self._flushed and w not in self._refused]
            if len(absences.beyond(waiting, WAIT_FOR_GONE_S)) == len(waiting):
                break
            meanwhile()
            gevent.sleep(POLL_S)
        return [worker for worker in self._prepared_ns if worker not in self._flushed or worker in self._left]

    def to_json(self, missing: list[str]) -> dict[str, Any]:
        """With the last words of the workers, and of those that were lost before they had any the requests that they
        are known to have sent: by these the merge finds what is in no file.
        """
        snapshots = {worker_id: self._snapshots.of_worker(worker_id) for worker_id in missing}
        return {
            "expected": len(self._prepared_ns),
            "ids": self.ids,
            "hosts": {worker_id: answer.host for worker_id, answer in sorted(self._answers.items())},
            "refused_messages": dict(sorted(self._refused_messages.counts.items())),
            "missing": missing,
            "flushed": dict(sorted(self._flushed.items())),
            "sent": {
                worker_id: 0 if snapshot is None else snapshot.aggregate.sent
                for worker_id, snapshot in snapshots.items()
            },
        }
