"""A driver that answers as told, in the binding's own words: by default as an H200 did when it was asked, idle and
under load (``samples/h200_nvml_gpm.json``).
"""

# ruff: noqa: N802, ARG002 - the names and arguments are the binding's

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

RECORDED = json.loads((Path(__file__).parent / "samples" / "h200_nvml_gpm.json").read_text(encoding="utf-8"))
GPM_NAMES = {
    "SM_UTIL": "sm_util",
    "SM_OCCUPANCY": "sm_occupancy",
    "ANY_TENSOR_UTIL": "any_tensor",
    "DRAM_BW_UTIL": "dram_bw",
    "PCIE_TX_PER_SEC": "pcie_tx",
    "PCIE_RX_PER_SEC": "pcie_rx",
    "NVLINK_TOTAL_TX_PER_SEC": "nvlink_tx",
    "NVLINK_TOTAL_RX_PER_SEC": "nvlink_rx",
}


def error(name: str) -> Exception:
    made: Exception = pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{name}"))
    return made


def gpm_of(load: str) -> dict[int, float]:
    """Metric to value, as recorded under this load."""
    return {
        getattr(pynvml, f"NVML_GPM_METRIC_{metric}"): RECORDED[load]["gpm"][name] for metric, name in GPM_NAMES.items()
    }


@dataclass(eq=False)
class FakeDevice:
    """A GPU under the load ``matmul``. ``fails`` maps a call or a field id to the name of the error it answers with."""

    uuid: str = "GPU-b6ac"
    name: str = "NVIDIA H200"
    utilization: tuple[int, int] = (100, 24)
    memory: tuple[int, int] = (10_525_474_816, 150_754_820_096)
    clocks: dict[int, int] = field(default_factory=lambda: {pynvml.NVML_CLOCK_SM: 1470, pynvml.NVML_CLOCK_MEM: 3201})
    throttle: int = 0x4
    temperature: int = 49
    encoder: int = 0
    decoder: int = 0
    ecc: int = 0
    gpm: dict[int, float] = field(default_factory=lambda: gpm_of("matmul"))
    gpm_supported: bool = True
    fields: dict[int, tuple[int, int | float]] = field(
        default_factory=lambda: {
            pynvml.NVML_FI_DEV_POWER_INSTANT: (1, 691_391),
            pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION: (3, 10_843_923),
            pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES: (3, 1_000),
            pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES: (3, 5_000),
        }
    )
    """Field id to the type of its value and the value; any other is not supported."""
    xids: list[int] = field(default_factory=list)
    samples: list[tuple[int, int]] = field(default_factory=list)
    """Time in microseconds, percent."""
    processes: list[tuple[int, int | None]] = field(default_factory=lambda: [(420, 9_871_294_464)])
    fails: dict[str | int, str] = field(default_factory=dict)
    instances: list[FakeDevice] = field(default_factory=list)
    instance_id: int | None = None
    mig: bool = False
    asked: list[str] = field(default_factory=list)


class FakeNvml:
    """``pynvml`` for as many devices as given. What it does not know is the real binding's: constants, structures."""

    def __init__(self, *devices: FakeDevice, process_names: dict[int, str] | None = None) -> None:
        self.devices = list(devices)
        self.process_names = process_names or {}
        self.fails: dict[str, str] = {}
        self.freed: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("nvmlDevice", "nvmlGpm", "nvmlEventSet", "nvmlSystem", "nvmlInit")):
            raise AttributeError(name)
        return getattr(pynvml, name)

    def _may(self, device: FakeDevice, call: str) -> None:
        device.asked.append(call)
        for reason in (device.fails.get("*"), device.fails.get(call)):
            if reason is not None:
                raise error(reason)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeDevice:
        self._may(self.devices[index], "handle")
        return self.devices[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeDevice:
        device = next(device for device in self.devices if device.uuid == uuid)
        self._may(device, "handle")
        return device

    def nvmlDeviceGetUUID(self, device: FakeDevice) -> str:
        return device.uuid

    def nvmlDeviceGetName(self, device: FakeDevice) -> str:
        self._may(device, "name")
        return device.name

    def nvmlDeviceGetUtilizationRates(self, device: FakeDevice) -> Any:
        self._may(device, "utilization")
        return SimpleNamespace(gpu=device.utilization[0], memory=device.utilization[1])

    def nvmlDeviceGetMemoryInfo(self, device: FakeDevice) -> Any:
        self._may(device, "memory")
        return SimpleNamespace(used=device.memory[0], total=device.memory[1])

    def nvmlDeviceGetPowerUsage(self, device: FakeDevice) -> int:
        self._may(device, "power")
        return 454_173

    def nvmlDeviceGetClockInfo(self, device: FakeDevice, which: int) -> int:
        self._may(device, "clock")
        return device.clocks[which]

    def nvmlDeviceGetCurrentClocksEventReasons(self, device: FakeDevice) -> int:
        self._may(device, "throttle")
        return device.throttle

    def nvmlDeviceGetTemperature(self, device: FakeDevice, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        self._may(device, "temperature")
        return device.temperature

    def nvmlDeviceGetEncoderUtilization(self, device: FakeDevice) -> list[int]:
        self._may(device, "encoder")
        return [device.encoder, 100_000]

    def nvmlDeviceGetDecoderUtilization(self, device: FakeDevice) -> list[int]:
        self._may(device, "decoder")
        return [device.decoder, 100_000]

    def nvmlDeviceGetTotalEccErrors(self, device: FakeDevice, kind: int, counter: int) -> int:
        assert (kind, counter) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        self._may(device, "ecc")
        return device.ecc

    def nvmlDeviceGetFieldValues(self, device: FakeDevice, ids: list[Any]) -> Any:
        self._may(device, "fields")
        answers = (pynvml.c_nvmlFieldValue_t * len(ids))()
        for answer, asked in zip(answers, ids, strict=True):
            field_id = asked[0] if isinstance(asked, tuple) else asked
            refusal = device.fails.get(field_id, None if field_id in device.fields else "NOT_SUPPORTED")
            if refusal is not None:
                answer.nvmlReturn = getattr(pynvml, f"NVML_ERROR_{refusal}")
                continue
            answer.valueType, value = device.fields[field_id]
            names = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
            setattr(answer.value, names[answer.valueType], value)
        return answers

    def nvmlDeviceGetSamples(self, device: FakeDevice, kind: int, since_us: int) -> Any:
        assert kind == pynvml.NVML_GPU_UTILIZATION_SAMPLES
        self._may(device, "samples")
        new = [sample for sample in device.samples if sample[0] > since_us]
        if not new:
            raise error("NOT_FOUND")
        samples = (pynvml.c_nvmlSample_t * len(new))()
        for sample, (at, percent) in zip(samples, new, strict=True):
            sample.timeStamp, sample.sampleValue.uiVal = at, percent
        return 1, samples

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: FakeDevice) -> Any:
        self._may(device, "processes")
        none = 0xFFFFFFFF
        return [SimpleNamespace(pid=pid, usedGpuMemory=memory, gpuInstanceId=none) for pid, memory in device.processes]

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        if pid not in self.process_names:
            raise error("NOT_FOUND")
        return self.process_names[pid]

    def nvmlDeviceGetMigMode(self, device: FakeDevice) -> list[int]:
        self._may(device, "mig_mode")
        return [int(device.mig), int(device.mig)]

    def nvmlDeviceGetMaxMigDeviceCount(self, device: FakeDevice) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: FakeDevice, place: int) -> FakeDevice:
        if place >= len(device.instances):
            raise error("NOT_FOUND")
        return device.instances[place]

    def nvmlDeviceGetGpuInstanceId(self, device: FakeDevice) -> int:
        assert device.instance_id is not None
        return device.instance_id

    def nvmlGpmQueryDeviceSupport(self, device: FakeDevice) -> Any:
        self._may(device, "gpm_support")
        return SimpleNamespace(isSupportedDevice=int(device.gpm_supported))

    def nvmlGpmSampleAlloc(self) -> Any:
        return pynvml.c_nvmlGpmSample_t()

    def nvmlGpmSampleGet(self, device: FakeDevice, sample: Any) -> Any:
        self._may(device, "gpm_sample")
        self._sampled = device
        return sample

    def nvmlGpmMigSampleGet(self, device: FakeDevice, instance_id: int, sample: Any) -> Any:
        self._may(device, "gpm_mig_sample")
        self._sampled = next(one for one in device.instances if one.instance_id == instance_id)
        return sample

    def nvmlGpmMetricsGet(self, request: Any) -> Any:
        for index in range(request.numMetrics):
            metric = request.metrics[index]
            refusal = self._sampled.fails.get(f"gpm {metric.metricId}")
            metric.nvmlReturn = 0 if refusal is None else getattr(pynvml, f"NVML_ERROR_{refusal}")
            metric.value = self._sampled.gpm[metric.metricId]
        return request

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.freed.append("gpm")

    def nvmlEventSetCreate(self) -> Any:
        return SimpleNamespace(device=None)

    def nvmlDeviceRegisterEvents(self, device: FakeDevice, kinds: int, events: Any) -> None:
        assert kinds == pynvml.nvmlEventTypeXidCriticalError
        self._may(device, "events")
        events.device = device

    def nvmlEventSetWait_v2(self, events: Any, timeout_ms: int) -> Any:
        assert timeout_ms == 0
        if not events.device.xids:
            raise error("TIMEOUT")
        return SimpleNamespace(eventData=events.device.xids.pop(0))

    def nvmlEventSetFree(self, events: Any) -> None:
        self.freed.append("events")

    def nvmlShutdown(self) -> None:
        self.freed.append("library")


class FakeTime:
    """A monotonic clock that moves when told, and a wall axis on it."""

    def __init__(self, now_ns: int = 1_000_000_000_000) -> None:
        self.now_ns = now_ns
        self.offset_ns = 1_796_000_000_000_000_000

    def monotonic_ns(self) -> int:
        return self.now_ns

    def unix_ns(self) -> int:
        return self.now_ns + self.offset_ns

    def moved_ns(self) -> int:
        return 0

    def sleeper(self, until_ns: int, each: Callable[[], None] = lambda: None) -> Callable[[float], bool]:
        """A ``wait`` that ends once the clock is at ``until_ns``."""

        def wait(seconds: float) -> bool:
            self.now_ns += round(seconds * 1e9)
            each()
            return self.now_ns >= until_ns

        return wait
