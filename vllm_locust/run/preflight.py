"""What can be found out before load is sent: options, Redis, server, workload, plan."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_locust.capacity.record import RecordedProbe
from vllm_locust.config import RunConfig
from vllm_locust.errors import StoreError, UsageError
from vllm_locust.load.open_loop import kind_problems
from vllm_locust.load.preflight import ask_server, reset_prefix_cache
from vllm_locust.load_profile import Quantity
from vllm_locust.run.agreement import given_flags
from vllm_locust.run.capacity.terms import check_search
from vllm_locust.run.course.planned_load import plan_load
from vllm_locust.run.run_description import Checked
from vllm_locust.run.secrets import Secrets
from vllm_locust.run.telemetry.server_metrics import find_pages
from vllm_locust.store.redis_store import RunStore
from vllm_locust.store.redis_url import redis_options
from vllm_locust.store.rundir import RunDirectory
from vllm_locust.workload.load import load_workload

logger = logging.getLogger(__name__)


class Preflight:
    def __init__(self, secrets: Secrets, given: Mapping[str, Any], *, host: str | None, headless: bool) -> None:
        """``given``: the options as the command line set them. ``host``: the server that it, or the locustfile,
        names.
        """
        self._given_flags = given_flags(given)
        self._secrets = secrets
        self._given_host = host
        self._headless = headless
        self.earlier: tuple[RecordedProbe, ...] = ()
        """Probes of the search that is gone on with."""

    def check(
        self,
        options: Mapping[str, Any],
        *,
        host: str | None,
        run_time_s: float | None,
        user_classes: Sequence[type[Any]],
    ) -> Checked:
        """Raises UsageError."""
        if self._secrets.api_key is not None and not options.get("target") and host != self._given_host:
            raise UsageError(
                f"--host: the API key goes only to a server named on the command line, not to {host!r} from the start "
                "form; start Locust with that --host"
            )
        config = RunConfig.from_options(options, host=host, run_time_s=run_time_s)
        if problems := kind_problems(user_classes, open_loop=config.open_loop):
            raise UsageError(*problems)
        by_plan = config.profile is not None and config.profile.quantity is Quantity.USERS
        if self._headless and by_plan and options["num_users"] is not None:
            raise UsageError("-u with --user-stages: the stages say how many users there are; drop -u")
        if self._headless and config.run_dir is not None:
            RunDirectory(Path(config.run_dir)).refuse_run()
        self._check_redis(config)
        server = ask_server(config, self._secrets.api_key)
        pages = find_pages(config, self._secrets.api_key)
        workload = load_workload(
            config.workload,
            tokenizer=config.tokenizer,
            max_model_len=server.max_model_len,
            max_tokens=config.max_tokens,
            seed=config.seed,
        )
        for warning in workload.warnings:
            logger.warning("%s", warning)
        if config.open_loop:
            plan_load(config, workload)
        if config.capacity is not None:
            if not self._headless:
                raise UsageError("--capacity: a search runs without a web UI; add --headless")
            self.earlier = check_search(config.capacity, config, server, workload)
            if config.capacity.reset_prefix_cache:
                reset_prefix_cache(config, self._secrets.api_key)
        return Checked(config, self._secrets, server, workload, pages, self._given_flags)

    def _check_redis(self, config: RunConfig) -> None:
        if config.redis_url is None:
            return
        store = RunStore(redis_options(config.redis_url, self._secrets.redis_password_file), "preflight")
        try:
            store.check_server()
        except StoreError as error:
            fix = "" if "--redis-password-file" in str(error) else "; start it, or correct the address"
            raise UsageError(f"--redis-url: {error}{fix}") from None
        finally:
            store.close()
