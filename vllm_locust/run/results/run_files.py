"""The files of a run directory as a merge or a report reads them: whole and of this version, or a ``StoreError`` that
names the file, what is wrong with it and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq

from vllm_locust.arrival import ArrivalProcess, Schedule
from vllm_locust.capacity.record import SearchRecord
from vllm_locust.config import RunConfig
from vllm_locust.errors import StoreError, VllmLocustError, one_line
from vllm_locust.json_fields import JsonFields
from vllm_locust.slo import parse_slos
from vllm_locust.store.durable_file import GOOD_COPY
from vllm_locust.store.finalize import requests_schema
from vllm_locust.store.rundir import RunDirectory, read_json, read_json_object
from vllm_locust.store.schema import MAX_UNIX_NS, BatchKind, check_run_id, schema_of
from vllm_locust.store.telemetry_schema import telemetry_schema
from vllm_locust.telemetry import TelemetryKind
from vllm_locust.worker_message import read_last_words

RUN_SCHEMA: Final = 1
_SCALARS: Final = (int, float, str, bool, type(None))


def read_run(run_dir: RunDirectory) -> dict[str, Any]:
    """``run.json``."""
    run = read_json_object(run_dir.run_json)
    if "schema" in run and run["schema"] != RUN_SCHEMA:
        raise StoreError(
            f"{run_dir.run_json} has schema {str(run['schema'])[:40]}, and this version reads {RUN_SCHEMA}: use the "
            "version that wrote it"
        )
    with damage_named(run_dir.run_json):
        _check_run(JsonFields.of(run))
    return run


def read_run_id(run_dir: RunDirectory) -> str:
    """Of ``run.json``, whatever else is in it."""
    run = read_json_object(run_dir.run_json)
    with damage_named(run_dir.run_json):
        run_id = JsonFields.of(run).text("run_id")
        check_run_id(run_id)
    return run_id


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """What is wrong inside ``path`` becomes a ``StoreError`` that names it. Only for the reading of its content."""
    try:
        yield
    except (KeyError, AttributeError, TypeError, ValueError, IndexError, RecursionError, VllmLocustError) as exc:
        words = f"{exc} is missing" if isinstance(exc, KeyError) else one_line(exc)
        raise StoreError(f"{path} is damaged: {words}; {GOOD_COPY}") from exc


def read_control(run_dir: RunDirectory) -> dict[str, str]:
    """The run's control fields, as the recorder last saw them; none where it never saw any."""
    if not run_dir.control_json.exists():
        return {}
    control = read_json_object(run_dir.control_json)
    with damage_named(run_dir.control_json):
        fields = JsonFields.of(control)
        return {name: fields.text(name) for name in control}


def read_refused(run_dir: RunDirectory) -> dict[str, int]:
    """Of ``recorder.json``: batches that no recorder of the run could read, by reason."""
    if not run_dir.recorder_json.exists():
        return {}
    report = read_json_object(run_dir.recorder_json)
    with damage_named(run_dir.recorder_json):
        refused = JsonFields.of(report).mapping("refused")
        return {reason: refused.count(reason) for reason in refused.content}


def read_search(run_dir: RunDirectory) -> dict[str, Any] | None:
    """``capacity.json``; None where no capacity was searched for."""
    if not run_dir.capacity_json.exists():
        return None
    search: dict[str, Any] = read_json(run_dir.capacity_json)
    with damage_named(run_dir.capacity_json):
        SearchRecord.from_json(search)
    return search


def check_tables(run_dir: RunDirectory) -> None:
    """That the tables of a merged run can be read and have the columns of this version."""
    _check_table(run_dir.requests_parquet, requests_schema())
    _check_table(run_dir.workers_parquet, schema_of(BatchKind.HEALTH))
    if run_dir.arrivals_parquet.exists():
        _check_table(run_dir.arrivals_parquet, schema_of(BatchKind.ARRIVALS))
    for kind in TelemetryKind:
        if run_dir.telemetry_parquet(kind).exists():
            _check_table(run_dir.telemetry_parquet(kind), telemetry_schema(kind))


def _check_table(path: Path, expected: pa.Schema) -> None:
    again = "merge the run again"
    if path.exists() and not path.is_file():
        raise StoreError(f"{path} cannot be read: it is no regular file; move it away, and {again}")
    try:
        found = pq.read_schema(path)
    except (OSError, pa.ArrowException) as exc:
        raise StoreError(f"{path} cannot be read: {one_line(exc)}; {again}") from exc
    for field in expected:
        if field.name not in found.names:
            raise StoreError(f"{path} is damaged: it has no column {field.name}; {again}")
        kind = found.field(field.name).type
        if kind != field.type:
            raise StoreError(f"{path} is damaged: its column {field.name} is {kind}, not {field.type}; {again}")


def _check_run(run: JsonFields) -> None:
    check_run_id(run.text("run_id"))
    _check_config(run.mapping("config"))
    run.text_or_none("run_name")
    run.texts("command")
    for name in ("tags", "versions", "hosts"):
        _each(run, name, JsonFields.text)
    run.mapping("versions").text("vllm_locust")
    server, workload = run.mapping("server"), run.mapping("workload")
    server.text_or_none("model")
    server.text_or_none("version")
    server.count_or_none("max_model_len")
    for name in ("name", "fingerprint", "token_count_method"):
        workload.text(name)
    workload.mapping("filters")
    workload.texts("warnings")
    if _has(workload, "shared_prefix"):
        prefix = workload.mapping("shared_prefix", keys=("groups", "tokens"))
        for name in prefix.content:
            prefix.count(name)
    _check_time(run, "started_unix_ns")
    if _has(run, "ended_unix_ns"):
        _check_time(run, "ended_unix_ns")
    if run.value("window") is not None:
        _check_interval(run.mapping("window"))
    for stage in _objects(run, "stages"):
        _check_interval(stage)
        stage.count("stage")
        stage.text("name")
        if _has(stage, "offered_rps"):
            stage.number("offered_rps")
        for name in ("users", "dropped_arrivals", "lost_arrivals"):
            if _has(stage, name):
                stage.count(name)
    run.text_or_none("stopped_early")
    _check_load(run)
    _check_workers(run.mapping("workers"))
    _check_findings(run)


def _check_load(run: JsonFields) -> None:
    if _has(run, "schedule"):
        schedule = run.mapping("schedule")
        if schedule.text("process") != ArrivalProcess.TRACE:  # whose offsets are in its workload
            Schedule.from_json(schedule.content)
        _check_time(schedule, "t0_unix_ns")
        for name in ("warmup_ns", "shares"):
            schedule.count(name)
        schedule.text("fingerprint")
        for share in _objects(run, "shares"):
            share.count("share")
            share.text("worker_id")
            share.count("first_arrival")
    if _has(run, "users"):
        run.count("users")


def _check_workers(workers: JsonFields) -> None:
    workers.texts("ids")
    workers.texts("missing")
    workers.count("expected")
    flushed = workers.mapping("flushed")
    for worker in flushed.content:
        read_last_words(flushed.value(worker))
    if _has(workers, "sent"):
        _each(workers, "sent", JsonFields.count)


def _check_findings(run: JsonFields) -> None:
    """What the end of the run and its merge have found."""
    if _has(run, "records"):
        _each(run, "records", JsonFields.count)
    if _has(run, "clock"):
        clock = run.mapping("clock")
        for name in ("step_max_ns", "uncertainty_max_ns"):
            clock.count_or_none(name)
    if _has(run, "arrivals"):
        arrivals = run.mapping("arrivals", keys=("planned", "dropped", "lost", "doubled", "misplaced"))
        for name in arrivals.content:
            arrivals.count_or_none(name)
    if _has(run, "server_metrics"):
        for page in _objects(run.mapping("server_metrics"), "pages"):
            page.text("target")
    if _has(run, "telemetry"):
        telemetry = run.mapping("telemetry")
        for gpu in _objects(telemetry, "gpus"):
            gpu.text("host")
            gpu.count("gpu_index")
            gpu.text("gpu_uuid")
            _check_time(gpu, "first_unix_ns")
        for source in _objects(telemetry, "sources"):
            source.text("source")
            source.texts("kinds")
            source.count_or_none("uncertainty_ns")


def _check_config(config: JsonFields) -> None:
    RunConfig.from_json(config.content)
    for name, hint in get_type_hints(RunConfig).items():
        value = config.value(name)
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise ValueError(f"{config.name(name)} is none of {', '.join(get_args(hint))}")
        accepted = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if not set(accepted) <= set(_SCALARS):
            continue
        if type(value) not in accepted and not (float in accepted and type(value) is int):
            raise ValueError(f"{config.name(name)} is a {type(value).__name__}")
    config.count("seed")
    config.mapping("extra_body")
    parse_slos(config.texts("slos"))
    _each(config, "tags", JsonFields.text)


def _check_interval(interval: JsonFields) -> None:
    if _check_time(interval, "start_unix_ns") > _check_time(interval, "end_unix_ns"):
        raise ValueError(f"{interval.path} ends before it begins")


def _check_time(fields: JsonFields, name: str) -> int:
    value = fields.value(name)
    if type(value) is not int or not 0 <= value <= MAX_UNIX_NS:
        raise ValueError(f"{fields.name(name)} is no time in nanoseconds")
    return value


def _has(fields: JsonFields, name: str) -> bool:
    return fields.content.get(name) is not None


def _objects(fields: JsonFields, name: str) -> Iterator[JsonFields]:
    for index, value in enumerate(fields.items(name)):
        yield JsonFields.of(value, f"{fields.name(name)}[{index}]")


def _each(fields: JsonFields, name: str, read: Callable[[JsonFields, str], object]) -> None:
    inside = fields.mapping(name)
    for key in inside.content:
        read(inside, key)
