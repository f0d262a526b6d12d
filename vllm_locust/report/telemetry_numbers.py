"""What was sampled beside the requests: of the servers, the GPUs and the hosts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm_locust.report.columns import Source
from vllm_locust.report.gpu_numbers import GpuMetrics
from vllm_locust.report.host_numbers import HostMetrics
from vllm_locust.report.run_facts import Interval, RunFacts
from vllm_locust.report.server_numbers import ServerMetrics
from vllm_locust.report.worker_health import WorkerHealth


class TelemetryNumbers(NamedTuple):
    servers: ServerMetrics
    gpus: GpuMetrics
    hosts: HostMetrics

    @classmethod
    def read(
        cls, facts: RunFacts, health: WorkerHealth, server: Source | None, gpu: Source | None, host: Source | None
    ) -> TelemetryNumbers:
        """None: there is no such table."""
        gpus = GpuMetrics(() if gpu is None else gpu, facts.gpu_clock_uncertainty_ns)
        roles: dict[str, list[str]] = {name: ["GPU"] for name in gpus.hosts}
        for name in dict.fromkeys(worker["host"] for worker in health.workers):
            roles.setdefault(name, []).append("load")
        return cls(
            servers=ServerMetrics(() if server is None else server, facts.server_clock_uncertainty_ns),
            gpus=gpus,
            hosts=HostMetrics(() if host is None else host, roles),
        )

    def of_stage(
        self, interval: Interval | None, output_tokens_per_s: float | None, client_ttft: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The blocks ``gpu``, ``server`` and ``hosts``. For the rest see each one's ``numbers``."""
        return {
            "gpu": self.gpus.numbers(interval, output_tokens_per_s),
            "server": self.servers.numbers(interval, client_ttft),
            "hosts": self.hosts.numbers(interval),
        }
