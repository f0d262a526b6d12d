"""``vllm-locust collect`` over a driver that answers as told: ``python -m tests.collect.fake_collector URL UUID…``.

Every GPU's figures are constant, but for its energy, which rises as its power says.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import pynvml

from tests.collect.fake_nvml import FakeDevice, FakeNvml
from vllm_locust.run.telemetry.collect import CollectOrder, collect

POWER_W = 691.391


class RisingEnergy(FakeNvml):
    def nvmlDeviceGetFieldValues(self, device: FakeDevice, ids: list[Any]) -> Any:  # noqa: N802 - the binding's name
        millijoules = round(time.monotonic() * POWER_W * 1000)
        device.fields[pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION] = (3, millijoules)
        return super().nvmlDeviceGetFieldValues(device, ids)


def main() -> int:
    url, *uuids = sys.argv[1:]
    order = CollectOrder.parse(redis_url=url, gpus="all")
    devices = [FakeDevice(uuid=uuid) for uuid in uuids]
    return collect(order, open_driver=lambda: RisingEnergy(*devices, process_names={420: "vllm"}))


if __name__ == "__main__":
    sys.exit(main())
