"""What ``run.json`` says about a run that is known when it begins: settings, versions, server, workload. No secrets."""

from __future__ import annotations

import platform
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

from vllm_locust import __version__
from vllm_locust.config import RunConfig
from vllm_locust.load.preflight import ServerFacts
from vllm_locust.metrics_page import MetricsPage
from vllm_locust.run.secrets import Secrets
from vllm_locust.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class Checked:
    """What is known to be usable before any load is sent."""

    config: RunConfig
    secrets: Secrets
    server: ServerFacts
    workload: Workload
    metrics_pages: tuple[MetricsPage, ...]
    flags: Mapping[str, Any] = field(default_factory=dict)
    """That the master was started with, see ``agreement.given_flags``."""


def description(checked: Checked, run_id: str, started_unix_ns: int, *, token_detail: bool) -> dict[str, Any]:
    """Strict JSON values."""
    config, workload = checked.config, checked.workload
    return {
        "schema": 1,
        "run_id": run_id,
        "run_name": config.run_name,
        "tags": dict(config.tags),
        "command": sys.argv,
        "versions": {
            "vllm_locust": __version__,
            "locust": version("locust"),
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
        "hosts": {"master": socket.gethostname()},
        "config": config.to_json(),
        "token_detail": token_detail,
        "server": asdict(checked.server),
        "server_metrics": {"pages": [{"url": page.url, "target": page.target} for page in checked.metrics_pages]},
        "workload": {
            "name": workload.name,
            "description": workload.description,
            "token_count_method": workload.token_count_method,
            "filters": dict(workload.filters),
            "warnings": list(workload.warnings),
            "fingerprint": workload.fingerprint,
            "content": workload.content,
            "shared_prefix": None if workload.shared_prefix is None else asdict(workload.shared_prefix),
        },
        "started_unix_ns": started_unix_ns,
    }
