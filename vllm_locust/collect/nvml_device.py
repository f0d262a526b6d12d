"""One GPU, or one MIG instance of it, read field by field through NVML."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from vllm_locust import clock
from vllm_locust.collect.gpm import Gpm
from vllm_locust.collect.gpu_fields import KIB, Rate, fraction, throttle_reasons
from vllm_locust.collect.gpu_source import Remarks
from vllm_locust.collect.nvml_calls import FieldBatch, GpuLost, NvmlCalls, Values
from vllm_locust.collect.process_names import ProcessNames
from vllm_locust.collect.visible_devices import GpuIdentity
from vllm_locust.telemetry import Row

_ALL_LINKS: Final = 0xFFFFFFFF
_XIDS_AT_ONCE: Final = 16
_INSTANCE_UNKNOWN: Final = 0xFFFFFFFF

Reading = tuple[str, Callable[[], Values]]
"""The name under which a refusal is remembered, and the call."""


class NvmlDevice:
    """Readings by what they cost on an H200: ``fast`` ones up to 0.2 ms, ``slow`` ones up to 2 ms, or they change
    slowly; ``rare`` ones 5 ms.
    """

    def __init__(
        self,
        nvml: Any,
        identity: GpuIdentity,
        handle: Any,
        *,
        parent: Any,
        names: ProcessNames,
        remarks: Remarks,
        monotonic_ns: Callable[[], int] = clock.monotonic_ns,
    ) -> None:
        """``parent`` is the handle of the GPU that a MIG instance is part of."""
        self._monotonic_ns = monotonic_ns
        self.identity = identity
        instance = "" if identity.mig_instance is None else f" MIG instance {identity.mig_instance}"
        self.label = f"GPU {identity.index}{instance} ({identity.uuid})"
        self.handle = handle
        self._nvml = nvml
        self._parent = parent
        self._names = names
        self._calls = NvmlCalls(nvml, self.label, remarks)
        self._gpm: Gpm | None = None
        self._events: Any = None
        self.samples_since_us = 0
        self.name = self._calls.ask("gpu_name", lambda: {"name": nvml.nvmlDeviceGetName(handle)}).get("name")
        self._counters = {name: Rate() for name in ("pcie_tx", "pcie_rx", "nvlink_tx", "nvlink_rx")}
        self._power = FieldBatch(self._calls, {"power_w": nvml.NVML_FI_DEV_POWER_INSTANT})
        self._energy_counter = FieldBatch(self._calls, {"energy_j": nvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION})
        self._traffic = FieldBatch(
            self._calls,
            {
                "pcie_tx": nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES,
                "pcie_rx": nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES,
                "nvlink_tx": (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS),
                "nvlink_rx": (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS),
            },
        )
        self.fast, self.slow, self.rare = self._readings()

    def _readings(self) -> tuple[list[Reading], list[Reading], list[Reading]]:
        memory = ("memory", self._memory)
        if self.identity.mig_instance is not None:
            return [memory], [("gpm", self._gpm_values)], []
        fast = [
            ("utilization", self._utilization),
            memory,
            ("power", self._power_values),
            ("sm_clock_mhz", lambda: self._clock("sm_clock_mhz", self._nvml.NVML_CLOCK_SM)),
            ("memory_clock_mhz", lambda: self._clock("memory_clock_mhz", self._nvml.NVML_CLOCK_MEM)),
            ("throttle_reasons", self._throttle_reasons),
        ]
        slow = [
            ("temperature_c", self._temperature),
            ("encoder_utilization", self._encoder),
            ("decoder_utilization", self._decoder),
            ("ecc_errors", self._ecc_errors),
            ("gpm", self._gpm_values),
            ("traffic", self._traffic_values),
            ("xid", self._xid),
        ]
        return fast, slow, [("energy", self._energy)]

    @property
    def has_gpm(self) -> bool:
        """Known once the slow fields were read."""
        return self._gpm is not None

    def read(self, *, slow: bool, rare: bool) -> dict[str, Any]:
        """Raises ``GpuLost``."""
        row: dict[str, Any] = {}
        for field, call in (*self.fast, *(self.slow if slow else ()), *(self.rare if rare else ())):
            row |= self._calls.ask(field, call)
        return row

    def identify(self) -> dict[str, Any]:
        gpu = self.identity
        return {
            "gpu_index": gpu.index,
            "gpu_uuid": gpu.uuid,
            "gpu_name": self.name,
            "mig_instance": gpu.mig_instance,
        }

    def _utilization(self) -> Values:
        rates = self._nvml.nvmlDeviceGetUtilizationRates(self.handle)
        return {"utilization": fraction(rates.gpu), "memory_bandwidth_utilization": fraction(rates.memory)}

    def _memory(self) -> Values:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self.handle)
        return {"memory_used_bytes": memory.used, "memory_total_bytes": memory.total}

    def _power_values(self) -> Values:
        """At this moment where the GPU tells it, else over the last second or so."""
        if not self._calls.is_off("power_w"):
            found = self._power.read(self.handle)
            if found:
                return {"power_w": found["power_w"] / 1000}
        return {"power_w": self._nvml.nvmlDeviceGetPowerUsage(self.handle) / 1000}

    def _clock(self, column: str, which: int) -> Values:
        return {column: self._nvml.nvmlDeviceGetClockInfo(self.handle, which)}

    def _throttle_reasons(self) -> Values:
        ask = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        ask = ask or self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        return {"throttle_reasons": throttle_reasons(ask(self.handle))}

    def _temperature(self) -> Values:
        return {"temperature_c": self._nvml.nvmlDeviceGetTemperature(self.handle, self._nvml.NVML_TEMPERATURE_GPU)}

    def _energy(self) -> Values:
        return {name: millijoules / 1000 for name, millijoules in self._energy_counter.read(self.handle).items()}

    def _encoder(self) -> Values:
        return {"encoder_utilization": fraction(self._nvml.nvmlDeviceGetEncoderUtilization(self.handle)[0])}

    def _decoder(self) -> Values:
        return {"decoder_utilization": fraction(self._nvml.nvmlDeviceGetDecoderUtilization(self.handle)[0])}

    def _ecc_errors(self) -> Values:
        nvml = self._nvml
        count = nvml.nvmlDeviceGetTotalEccErrors(
            self.handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        return {"ecc_errors": count}

    def _gpm_values(self) -> Values:
        if self._gpm is None:
            self._calls.ask("gpm_support", self._open_gpm)
        return {} if self._gpm is None else self._gpm.read()

    def _open_gpm(self) -> Values:
        nvml, whole = self._nvml, self.handle if self._parent is None else self._parent
        if not nvml.nvmlGpmQueryDeviceSupport(whole).isSupportedDevice:
            self._calls.refused("gpm_support", nvml.NVML_ERROR_NOT_SUPPORTED)
            return {}
        instance = self.identity.mig_instance
        if instance is None:
            self._gpm = Gpm(self._calls, lambda sample: nvml.nvmlGpmSampleGet(self.handle, sample))
        else:
            self._gpm = Gpm(self._calls, lambda sample: nvml.nvmlGpmMigSampleGet(whole, instance, sample))
        return {}

    def _traffic_values(self) -> Values:
        """From counters, where there is no GPM."""
        if self._gpm is not None and not self._calls.is_off("gpm"):
            return {}
        counts = self._traffic.read(self.handle)
        now_ns = self._monotonic_ns()
        unit = {"pcie": 1, "nvlink": KIB}
        return {
            f"{name}_bytes_per_s": rate.of(int(counts[name]) * unit[name.split("_")[0]], now_ns)
            for name, rate in self._counters.items()
            if name in counts
        }

    def _xid(self) -> Values:
        """The last of the errors since the last time, without waiting for one."""
        nvml = self._nvml
        if self._events is None:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self.handle, nvml.nvmlEventTypeXidCriticalError, events)
            self._events = events
        xid: int | None = None
        for _ in range(_XIDS_AT_ONCE):
            try:
                xid = int(nvml.nvmlEventSetWait_v2(self._events, 0).eventData)
            except nvml.NVMLError as exc:
                if exc.value == nvml.NVML_ERROR_TIMEOUT:
                    break
                raise
        return {"xid": xid}

    def utilization_samples(self) -> list[tuple[int, float]]:
        """From the driver's own buffer, finer than the rows: time on the wall clock in nanoseconds, and fraction."""
        return list(self._calls.ask("utilization_samples", self._utilization_samples).get("samples", ()))

    def _utilization_samples(self) -> Values:
        nvml = self._nvml
        since_us = self.samples_since_us or clock.unix_ns() // 1000
        try:
            _, samples = nvml.nvmlDeviceGetSamples(self.handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, since_us)
        except nvml.NVMLError as exc:
            if exc.value == nvml.NVML_ERROR_NOT_FOUND:
                samples = []
            else:
                raise
        new = [(one.timeStamp, one.sampleValue.uiVal) for one in samples if one.timeStamp > since_us]
        self.samples_since_us = max((at for at, _ in new), default=since_us)
        return {"samples": sorted((at * 1000, percent / 100) for at, percent in new)}

    def processes(self) -> list[Row]:
        """Who holds memory of this GPU."""
        return list(self._calls.ask("gpu_processes", self._processes).get("rows", ()))

    def _processes(self) -> Values:
        gpu = self.identity
        rows = []
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses_v3(self.handle):
            instance = getattr(process, "gpuInstanceId", None)
            rows.append(
                {
                    "gpu_index": gpu.index,
                    "gpu_uuid": gpu.uuid,
                    "mig_instance": None if instance == _INSTANCE_UNKNOWN else instance,
                    "pid": process.pid,
                    "name": self._names.name(process.pid),
                    "memory_bytes": process.usedGpuMemory,
                }
            )
        return {"rows": rows}

    def find_again(self) -> None:
        """After it was lost. Raises ``GpuLost`` where it still is."""
        nvml = self._nvml
        try:
            self.handle = nvml.nvmlDeviceGetHandleByUUID(self.identity.uuid)
            nvml.nvmlDeviceGetMemoryInfo(self.handle)
        except nvml.NVMLError as exc:
            raise GpuLost(str(exc)) from exc
        if self._gpm is not None:
            self._gpm.forget()
        self._events = None

    def close(self) -> None:
        for free in (self._free_gpm, self._free_events):
            try:
                free()
            except self._nvml.NVMLError:
                continue  # the GPU is lost, and what it held for us with it

    def _free_gpm(self) -> None:
        if self._gpm is not None:
            self._gpm.close()

    def _free_events(self) -> None:
        if self._events is not None:
            self._nvml.nvmlEventSetFree(self._events)
