"""On a machine with an NVIDIA GPU, torch and nothing else that uses it: figures that move as they must."""

from __future__ import annotations

import importlib.util

import pytest

from tests.live.gpu_collector import Measured, measure
from vllm_locust.collect.nvml import open_nvml
from vllm_locust.errors import UsageError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def measured() -> Measured:
    try:
        open_nvml().nvmlShutdown()
    except UsageError as error:
        pytest.skip(str(error))
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: no load to measure")
    return measure(6.0, ("matmul", "copy", "decode"))


def test_every_phase_has_ten_rows_a_second_of_each_gpu(measured: Measured) -> None:
    for phase in measured.phases.values():
        for uuid in phase.uuids:
            assert 55 <= len(phase.values("memory_used_bytes", uuid)) <= 61
            assert len(phase.values("energy_j", uuid)) >= 5


def test_figures_move_as_they_must(measured: Measured) -> None:
    phases = measured.phases
    for uuid in phases["idle"].uuids:
        mean = {(phase.name, column): phase.mean(column, uuid) for phase in phases.values() for column in phase.gpu[0]
                if column in ("utilization", "tensor_activity", "dram_activity", "power_w")}  # fmt: skip
        assert (mean["idle", "utilization"] or 0) < 0.05
        for load in ("matmul", "copy", "decode"):
            assert (mean[load, "utilization"] or 0) > 0.8, "plain utilization does not tell loads apart"
            assert (mean[load, "power_w"] or 0) > 1.5 * (mean["idle", "power_w"] or 0)
        if mean["matmul", "tensor_activity"] is not None:
            assert (mean["matmul", "tensor_activity"] or 0) > 0.6 > (mean["copy", "tensor_activity"] or 0)
            assert (mean["copy", "dram_activity"] or 0) > 0.6 > (mean["matmul", "dram_activity"] or 0)
            assert (mean["decode", "tensor_activity"] or 0) < 0.2


def test_it_costs_at_most_its_budget(measured: Measured) -> None:
    own = [row["collector_cpu_fraction"] for row in measured.host[2:]]
    gpus = len(measured.phases["idle"].uuids)
    assert sum(own) / len(own) < 0.05 * max(1.0, gpus / 8)
