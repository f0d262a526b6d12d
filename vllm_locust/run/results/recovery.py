"""What a merge takes in before it starts: spools, what is left in Redis, and what is known of a run whose master ended
before it did.

The control fields of a run are what the master and the workers publish as it happens: ``run`` (``run.json`` as it was
at the start), ``window_start_unix_ns`` (empty where it never came), ``window_end_unix_ns``, ``stages`` (as planned),
``schedule`` and ``shares`` (as in ``run.json``), ``stopped_early`` (empty where the window ran its full length), and of
each worker ``flushed:<worker id>`` (its last words) and ``clock:<worker id>``. ``workers``, a list of their ids, comes
anew with each that joins later.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vllm_locust import clock
from vllm_locust.errors import StoreError, UsageError
from vllm_locust.report.columns import RequestColumns
from vllm_locust.run.common_clock import WorkerClocks
from vllm_locust.run.course.stage_spans import StageSpan, cut_stages
from vllm_locust.run.results.missing_records import missing_records, refused_batches
from vllm_locust.run.results.run_files import damage_named, read_control, read_run, read_run_id
from vllm_locust.store.intake import RecorderReport, absorb_spools
from vllm_locust.store.parts import PartsInUse, list_parts, read_part_rows
from vllm_locust.store.recorder import RecorderConfig
from vllm_locust.store.recorder_process import start_recorder
from vllm_locust.store.redis_store import RunStore
from vllm_locust.store.redis_url import redis_options
from vllm_locust.store.rundir import RunDirectory, write_json
from vllm_locust.store.schema import BatchKind, check_worker_id
from vllm_locust.store.spool import spools_of_run
from vllm_locust.worker_message import read_last_words

RUN: Final = "run"
WINDOW_START: Final = "window_start_unix_ns"
WINDOW_END: Final = "window_end_unix_ns"
STAGES: Final = "stages"
SCHEDULE: Final = "schedule"
SHARES: Final = "shares"
STOPPED_EARLY: Final = "stopped_early"
WORKERS: Final = "workers"
_FLUSHED: Final = "flushed:"
MASTER_ENDED: Final = "the master ended before the run did"

_WAIT_FOR_RECORDER_S: Final = 150.0
"""A recorder whose master is gone ends when the workers have been silent for a while."""
_DRAIN_S: Final = 600.0
_TELEMETRY_BEFORE_NS: Final = 60_000_000_000


def flushed_field(worker_id: str) -> str:
    return f"{_FLUSHED}{worker_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOrder:
    """Which run to merge, and what to take in first."""

    run_dir: RunDirectory
    run_id: str
    spool_dirs: tuple[Path, ...] = ()
    redis_url: str | None = None
    redis_password_file: Path | None = None

    @classmethod
    def parse(
        cls,
        run: str,
        *,
        run_dir: Path | None = None,
        spool_dirs: Sequence[Path] = (),
        redis_url: str | None = None,
        redis_password_file: Path | None = None,
    ) -> MergeOrder:
        """``run`` is a run directory, or the id of a run in ``run_dir`` (default: ``runs/<run id>``) or in Redis."""
        is_path = os.sep in run or Path(run).is_dir()  # no id has a separator in it
        directory = RunDirectory(run_dir or (Path(run) if is_path else Path("runs", run)))
        directory.refuse_name()
        if directory.run_json.is_file():
            run_id = read_run_id(directory)
            if not is_path and run != run_id:
                raise UsageError(
                    f"merge {run}: {directory.path} holds the run {run_id}; give that id or another --run-dir"
                )
        elif redis_url is not None and not is_path:
            run_id = run
        else:
            raise UsageError(
                f"merge {run}: {directory.path} holds no run.json; give the directory of a run, or the id of a run "
                "whose records are in Redis with --redis-url"
            )
        return cls(
            run_dir=directory,
            run_id=run_id,
            spool_dirs=tuple(spool_dirs),
            redis_url=redis_url,
            redis_password_file=redis_password_file,
        )


def left_in_redis(
    report: RecorderReport | None, run_dir: RunDirectory, redis_url: str | None, stays_s: int | None
) -> str:
    """What to do where the recorder could not drain the streams. ``redis_url`` is None where the embedded server is no
    more; ``stays_s`` for how long it is still there.
    """
    why = "" if report is None else f" ({report.error})"
    if redis_url is None:
        return f"The embedded Valkey was lost{why}: what no spool holds is lost with it"
    stays = "" if stays_s is None else f", within {stays_s} s, for which the embedded Valkey stays"
    return (
        f"Redis did not give everything{why}. What workers of this host spooled is merged all the same; where the "
        f"verdict misses records, when that is mended{stays}: vllm-locust merge {run_dir.path} "
        f"--redis-url {redis_url} (and --redis-password-file, if it has a password)"
    )


def take_in(order: MergeOrder) -> None:
    """Put everything that is left of the run into its parts. A recorder that is still at work is waited for."""
    spools = list(_spools(order))
    deadline_ns = clock.monotonic_ns() + round(_WAIT_FOR_RECORDER_S * 1e9)
    told = False
    while True:
        try:
            absorb_spools(order.run_dir, order.run_id, spools)
            break
        except PartsInUse:
            if clock.monotonic_ns() > deadline_ns:
                raise
            if not told:
                sys.stderr.write("vllm-locust: waiting for the run's recorder: it ends once the workers are silent\n")
                told = True
            clock.sleep(0.5)
    if order.redis_url is not None:
        _drain(order, order.redis_url)
    if not order.run_dir.run_json.is_file():
        with damage_named(order.run_dir.control_json):
            at_start = json.loads(read_control(order.run_dir)[RUN])
        write_json(order.run_dir.run_json, at_start)
    if order.redis_url is not None:
        _let_expire(order)


def _spools(order: MergeOrder) -> Iterator[Path]:
    yield from spools_of_run(order.run_dir.path / "spool", order.run_id)
    for directory in order.spool_dirs:
        found = spools_of_run(directory, order.run_id)
        if not found:
            raise UsageError(f"--spool {directory} holds no spool of the run {order.run_id}; check the directory")
        yield from found


def _store(order: MergeOrder) -> RunStore:
    assert order.redis_url is not None
    try:
        return RunStore(redis_options(order.redis_url, order.redis_password_file), order.run_id)
    except StoreError as error:
        raise UsageError(str(error)) from None


def check_known(order: MergeOrder) -> None:
    """Raises ``UsageError`` where neither the run directory nor the Redis that is named knows the run."""
    if order.redis_url is None:
        return
    store = _store(order)
    try:
        known = RUN in store.read_control()
    finally:
        store.close()
    if not known and not order.run_dir.run_json.is_file():
        raise UsageError(
            f"merge {order.run_id}: Redis at {store.where} knows no such run; check the id and --redis-url"
        )


def _drain(order: MergeOrder, redis_url: str) -> None:
    password_file = None if order.redis_password_file is None else str(order.redis_password_file)
    config = RecorderConfig(
        run_id=order.run_id,
        redis_url=redis_url,
        redis_password_file=password_file,
        telemetry_from_unix_ns=max(0, int(read_control(order.run_dir).get(WINDOW_START) or 0) - _TELEMETRY_BEFORE_NS),
    )
    report = start_recorder(config, order.run_dir).finish(_DRAIN_S)
    if not report.drained:
        raise StoreError(
            f"the records of {order.run_id} are not all out of Redis: {report.error}; mend it, merge again"
        )


def _let_expire(order: MergeOrder) -> None:
    store = _store(order)
    try:
        store.ttl(int(read_run(order.run_dir)["config"]["ttl_ns"]) // 1_000_000_000)
    finally:
        store.close()


def completed(
    run: Mapping[str, Any], control: Mapping[str, str], run_dir: RunDirectory, clocks: WorkerClocks
) -> dict[str, Any]:
    """``run.json`` with what the master could not write any more, and with what is missing now."""
    held = absorb_spools(run_dir, run["run_id"], ())
    completed_run = dict(run)
    workers = dict(run["workers"])
    if run["ended_unix_ns"] is None:
        workers["flushed"] = dict(_published_last_words(control))
        workers["ids"] = _known_workers(workers["ids"], control, held, clocks)
        workers["expected"] = len(workers["ids"])
        workers["missing"] = [worker for worker in workers["ids"] if worker not in workers["flushed"]]
        last_record_ns = _last_record_unix_ns(run_dir, clocks)
        with damage_named(run_dir.control_json):
            spans = [StageSpan.from_json(span) for span in json.loads(control.get(STAGES, "[]"))]
            window = _window(run, control, spans, last_record_ns)
            completed_run["window"] = window
            completed_run["stages"] = cut_stages(spans, window["end_unix_ns"]) if window else []
            completed_run |= {key: json.loads(control[key]) for key in (SCHEDULE, SHARES) if key in control}
        completed_run["stopped_early"] = (control[STOPPED_EARLY] or None) if STOPPED_EARLY in control else MASTER_ENDED
        completed_run["workers"] = workers
    told = workers.get("sent", {})
    sent = {
        worker: max(int(told.get(worker, 0)), held.worker_announced.get(worker, 0))
        for worker in workers["ids"]
        if worker not in workers["flushed"]
    }
    completed_run["records"] = missing_records(workers["flushed"], sent, held, refused_batches(run_dir))
    return completed_run


def _known_workers(
    at_start: Sequence[str], control: Mapping[str, str], held: RecorderReport, clocks: WorkerClocks
) -> list[str]:
    """Those that were prepared at the start, as its master said last, and all that have left a trace."""
    try:
        told = json.loads(control.get(WORKERS, "[]"))
        joined = [check_worker_id(worker) for worker in told if isinstance(worker, str)]
    except (ValueError, TypeError, RecursionError, StoreError) as error:
        sys.stderr.write(f"vllm-locust: the control field {WORKERS!r} is not usable: {error}\n")
        joined = []
    traces = {*held.highest, *clocks.tracks, *dict(_published_last_words(control))}
    return list(dict.fromkeys((*at_start, *joined, *sorted(traces))))


def _published_last_words(control: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each worker. What is none is told, and left out: every worker may write there."""
    for name, text in sorted(control.items()):
        if name.startswith(_FLUSHED):
            try:
                yield name.removeprefix(_FLUSHED), read_last_words(json.loads(text))
            except (ValueError, RecursionError) as error:
                sys.stderr.write(f"vllm-locust: the control field {name!r} is not usable: {error}\n")


def _window(
    run: Mapping[str, Any], control: Mapping[str, str], spans: Sequence[StageSpan], last_record_ns: int
) -> dict[str, int] | None:
    if not control.get(WINDOW_START):
        return None
    start_ns = int(control[WINDOW_START])
    if WINDOW_END in control:
        return {"start_unix_ns": start_ns, "end_unix_ns": int(control[WINDOW_END])}
    if spans and last_record_ns < start_ns:
        return None  # it was planned, and the master ended before
    length_ns = run["config"]["window_ns"]
    planned_ns = spans[-1].end_unix_ns if spans else None if length_ns is None else start_ns + length_ns
    end_ns = max(last_record_ns, start_ns)
    # Nobody told the workers to stop: what they did after the planned end is no part of the window.
    return {"start_unix_ns": start_ns, "end_unix_ns": end_ns if planned_ns is None else min(end_ns, planned_ns)}


def _last_record_unix_ns(run_dir: RunDirectory, clocks: WorkerClocks) -> int:
    """When the last request on record ended, on the common clock; 0 where there is none."""
    last_ns = 0
    for part in list_parts(run_dir.parts):
        if part.kind is not BatchKind.REQUESTS:
            continue
        for rows in read_part_rows(part).to_batches():
            columns = RequestColumns(clocks.move(rows))
            last_ns = max(last_ns, int((columns.ints("sent_unix_ns") + columns.ended_ns).max(initial=0)))
    return last_ns
