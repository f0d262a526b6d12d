"""``vllm-locust doctor``: looks at this host for the role that it is to play, and says what to do."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self

from vllm_locust.checkup.check import Check, as_json, has_failed, table
from vllm_locust.clock import WallAxis
from vllm_locust.collect.nvml import open_nvml
from vllm_locust.config import RunConfig
from vllm_locust.errors import UsageError
from vllm_locust.run.doctor import host, network
from vllm_locust.run.secrets import Secrets
from vllm_locust.store.redis_probe import RedisRole
from vllm_locust.store.redis_url import RedisOptions, redis_options


class Role(StrEnum):
    MASTER = "master"
    WORKER = "worker"
    REDIS = "redis"
    GPU = "gpu"


_REDIS_ROLES: Final = {
    None: RedisRole.MASTER,
    Role.MASTER: RedisRole.MASTER,
    Role.WORKER: RedisRole.WORKER,
    Role.REDIS: RedisRole.MASTER,
    Role.GPU: RedisRole.COLLECTOR,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOrder:
    role: Role | None
    """None for a machine that is everything."""
    users: int
    processes: int
    config: RunConfig | None
    """How the server is reached; None where none is named."""
    secrets: Secrets
    redis: RedisOptions | None
    master_host: str | None
    master_port: int
    run_dir: Path

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        """From the command's flags. Raises UsageError with every problem found."""
        problems: list[str] = []
        role = None if options["role"] is None else Role(options["role"])
        problems += [
            f"--{name}: {options[name]} is not a whole number of at least 1"
            for name in ("users", "processes")
            if options[name] < 1
        ]
        port = options["master_port"]
        if not 0 < port < 65536:
            problems.append(f"--master-port: {port} is no port; write one from 1 to 65535")
        if role in (Role.REDIS, Role.GPU) and not options["redis_url"]:
            problems.append(f"--role {role}: no Redis is given; add --redis-url redis://HOST:PORT/DB")
        secrets, config, redis = Secrets(None, None), None, None
        try:
            secrets = Secrets.read(options)
            if options["host"]:
                config = RunConfig.from_options(dict(options) | _OTHER_OPTIONS, host=options["host"], run_time_s=None)
            if options["redis_url"]:
                redis = redis_options(options["redis_url"], secrets.redis_password_file)
        except UsageError as error:
            problems += error.problems
        if problems:
            raise UsageError(*problems)
        return cls(
            role=role,
            users=options["users"],
            processes=options["processes"],
            config=config,
            secrets=secrets,
            redis=redis,
            master_host=options["master_host"],
            master_port=port,
            run_dir=Path(options["run_dir"] or "runs"),
        )


_OTHER_OPTIONS: Final = {"timeout_connect": "5s", "timeout_first_token": "5s", "timeout_idle": "5s"}


def run_doctor(order: DoctorOrder, *, in_json: bool) -> int:
    """Prints what was found. 1 where a check has failed, 0 otherwise."""
    checks = examine(order)
    host, role = socket.gethostname(), None if order.role is None else order.role.value
    if in_json:
        print(json.dumps(as_json(checks, host=host, role=role), indent=2, allow_nan=False))
    else:
        print(f"{host} as {role or 'the only machine'}\n{table(checks)}")
    return 1 if has_failed(checks) else 0


def examine(order: DoctorOrder, *, open_driver: Callable[[], Any] = open_nvml) -> Sequence[Check]:
    """Every check that the role needs, in the order of the table."""
    return list(_checks(order, WallAxis(), open_driver))


def _checks(order: DoctorOrder, axis: WallAxis, open_driver: Callable[[], Any]) -> Iterator[Check]:
    role = order.role
    sends = role in (None, Role.WORKER)
    yield host.check_versions()
    yield host.check_cpu(order.processes if sends else 1)
    if sends:
        yield from host.check_limits(order.users, order.processes)
        yield host.check_stamps()
    if role in (None, Role.MASTER):
        yield host.check_disk("run directory", order.run_dir)
    if role is Role.WORKER:
        yield host.check_disk("spool", order.run_dir)
    if role in (None, Role.GPU):
        yield host.check_gpus(open_driver, required=role is Role.GPU)
    if order.redis is not None:
        yield from network.check_redis(order.redis, _REDIS_ROLES[role])
    else:
        yield network.check_without_redis(embedded_will_do=role is not Role.WORKER)
    if role in (None, Role.MASTER, Role.WORKER):
        yield from network.check_server(order.config, order.secrets.api_key)
    if role is Role.MASTER:
        yield network.check_own_port(order.master_port)
    if role is Role.WORKER:
        yield network.check_master(order.master_host, order.master_port)
    # Last, since it looks at how far the clock was set meanwhile.
    yield host.check_clock(axis.moved_ns())
