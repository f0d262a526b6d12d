"""On a machine with an NVIDIA GPU, torch and nothing else that uses it: figures that move as they must."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.live.gpu_phases import GpuLoad, Phase, collector, spend
from vllm_locust.collect.nvml import open_nvml
from vllm_locust.errors import UsageError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SECONDS = 6.0


@pytest.fixture(scope="module")
def phases() -> Iterator[dict[str, Phase]]:
    try:
        open_nvml().nvmlShutdown()
    except UsageError as error:
        pytest.skip(str(error))
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: no load to measure")
    load = GpuLoad()
    try:
        with collector() as collected:
            yield {kind: spend(collected, load, kind, SECONDS) for kind in ("idle", "matmul", "copy", "thin")}
    finally:
        load.stop()


def test_every_phase_has_ten_rows_a_second_of_each_gpu(phases: dict[str, Phase]) -> None:
    for phase in phases.values():
        for uuid in phase.uuids:
            assert 55 <= len(phase.values("memory_used_bytes", uuid)) <= 61
            assert len(phase.values("energy_j", uuid)) >= 5


def test_figures_move_as_they_must(phases: dict[str, Phase]) -> None:
    for uuid in phases["idle"].uuids:
        mean = {(phase.name, column): phase.mean(column, uuid) for phase in phases.values() for column in phase.gpu[0]
                if column in ("utilization", "tensor_activity", "dram_activity", "power_w")}  # fmt: skip
        assert (mean["idle", "utilization"] or 0) < 0.05
        for load in ("matmul", "copy", "thin"):
            assert (mean[load, "utilization"] or 0) > 0.8, "plain utilization does not tell loads apart"
            assert (mean[load, "power_w"] or 0) > 1.5 * (mean["idle", "power_w"] or 0)
        if mean["matmul", "tensor_activity"] is not None:
            assert (mean["matmul", "tensor_activity"] or 0) > 0.6 > (mean["copy", "tensor_activity"] or 0)
            assert (mean["copy", "dram_activity"] or 0) > 0.6 > (mean["matmul", "dram_activity"] or 0)
            assert (mean["thin", "tensor_activity"] or 0) < 0.2


def test_it_costs_at_most_its_budget(phases: dict[str, Phase]) -> None:
    own = [row["collector_cpu_fraction"] for phase in phases.values() for row in phase.host]
    gpus = len(phases["idle"].uuids)
    assert sum(own) / len(own) < 0.05 * max(1.0, gpus / 8)
