"""NVIDIA's GPUs through NVML. The only module that imports ``pynvml``."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from vllm_locust import clock
from vllm_locust.clock import WallAxis
from vllm_locust.collect.gpu_fields import utilization_between
from vllm_locust.collect.gpu_source import Remarks, Rows, Tick
from vllm_locust.collect.nvml_calls import GpuLost
from vllm_locust.collect.nvml_device import NvmlDevice
from vllm_locust.collect.process_names import ProcessNames
from vllm_locust.collect.visible_devices import GpuIdentity, choose
from vllm_locust.errors import NoGpu
from vllm_locust.telemetry import Row, TelemetryKind

_LOOK_AGAIN_NS: Final = 10_000_000_000
_RARE_EVERY_S: Final = 10


class _Watched:
    """A device, what was read from it, and whether it is lost.

    ``due`` is the tick of its next turn, one a second, at which its slow fields are read. The devices' turns lie beside
    each other: all at once would take longer than to the next tick.
    """

    def __init__(self, device: NvmlDevice, due: int) -> None:
        self.device = device
        self.due = due
        self.turns = 0
        self.rows: list[dict[str, Any]] = []
        """Since its last turn."""
        self.last_row_ns = 0
        """Of the row before those."""
        self.look_again_ns: int | None = None
        """None while it is there."""

    def is_due(self, tick: Tick) -> bool:
        """Once a second; a turn that was missed comes with the next tick."""
        if tick.number < self.due:
            return False
        self.due += tick.per_second * (1 + (tick.number - self.due) // tick.per_second)
        self.turns += 1
        return True


class NvmlSource:
    """A ``GpuSource``. ``nvml`` is ``pynvml``, initialized, or something that speaks like it."""

    def __init__(
        self,
        nvml: Any,
        remarks: Remarks,
        *,
        host: str,
        axis: WallAxis,
        gpus: str | None = None,
        environment: Mapping[str, str] = os.environ,
        monotonic_ns: Callable[[], int] = clock.monotonic_ns,
    ) -> None:
        self._nvml = nvml
        self._remarks = remarks
        self._host = host
        self._axis = axis
        self._monotonic_ns = monotonic_ns
        self._names = ProcessNames(nvml, monotonic_ns=monotonic_ns)
        self._processes: list[Row] = []
        handles = _handles(nvml, remarks)
        chosen = choose([identity for identity, _ in handles], gpus, environment)
        by_uuid = {identity.uuid: handle for identity, handle in handles}
        self.devices = [
            NvmlDevice(
                nvml,
                gpu,
                by_uuid[gpu.uuid],
                parent=by_uuid.get(gpu.parent_uuid or ""),
                names=self._names,
                remarks=remarks,
                monotonic_ns=monotonic_ns,
            )
            for gpu in chosen
        ]
        self._watched: list[_Watched] = []
        self._complete: list[Row] = []

    def tick(self, tick: Tick) -> None:
        if not self._watched:
            self._watched = [_Watched(device, place % tick.per_second) for place, device in enumerate(self.devices)]
        for watched in self._watched:
            is_due = watched.is_due(tick)
            slow, rare = (
                is_due and (watched.turns - 1) % every_s == 0 for every_s in (tick.slow_every_s, _RARE_EVERY_S)
            )
            try:
                self._read(watched, slow=slow, rare=rare)
            except GpuLost as exc:
                if watched.look_again_ns is None:
                    self._remarks.always(f"{watched.device.label} is lost: {exc}; the others go on")
                watched.look_again_ns = self._monotonic_ns() + _LOOK_AGAIN_NS
            if is_due:
                self._finish(watched)

    def _finish(self, watched: _Watched) -> None:
        if watched.rows:
            watched.last_row_ns = watched.rows[-1]["time_unix_ns"]
            self._complete += watched.rows
            watched.rows = []

    def _read(self, watched: _Watched, *, slow: bool, rare: bool) -> None:
        device = watched.device
        if watched.look_again_ns is not None:
            if self._monotonic_ns() < watched.look_again_ns:
                return
            device.find_again()
            watched.look_again_ns = None
            self._remarks.always(f"{device.label} is back")
        row = {"time_unix_ns": self._axis.unix_ns(), "host": self._host} | device.identify()
        watched.rows.append(row | device.read(slow=slow, rare=rare))
        if slow:
            when = {"time_unix_ns": row["time_unix_ns"], "host": self._host}
            self._processes += [when | dict(process) for process in device.processes()]
            if device.identity.mig_instance is None:
                self._refine(watched)

    def _refine(self, watched: _Watched) -> None:
        """Utilization as the driver sampled it between the rows, in place of the value that it shows for long."""
        moved_ns = self._axis.moved_ns()
        samples = [(at - moved_ns, value) for at, value in watched.device.utilization_samples()]
        if not samples:
            return
        found = utilization_between([row["time_unix_ns"] for row in watched.rows], samples, watched.last_row_ns)
        for row, utilization in zip(watched.rows, found, strict=True):
            if utilization is not None:
                row["utilization"] = utilization

    def take(self, *, last: bool = False) -> Rows:
        if last:
            for watched in self._watched:
                self._finish(watched)
        rows, self._complete = self._complete, []
        processes, self._processes = self._processes, []
        return {TelemetryKind.GPU: rows, TelemetryKind.GPU_PROCESSES: processes}

    def describe(self) -> Iterator[str]:
        for device in self.devices:
            yield f"{device.label}: {device.name or 'of unknown name'}"

    def close(self) -> None:
        for device in self.devices:
            device.close()
        self._nvml.nvmlShutdown()


def open_nvml() -> Any:
    """``pynvml`` with the driver's library loaded. Raises ``NoGpu``, which says what is there instead."""
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as exc:
        raise NoGpu(f"no NVIDIA GPU can be read here: {exc}") from None
    return nvml


def _handles(nvml: Any, remarks: Remarks) -> list[tuple[GpuIdentity, Any]]:
    """Every GPU that can be opened, each followed by its MIG instances."""
    found: list[tuple[GpuIdentity, Any]] = []
    count = nvml.nvmlDeviceGetCount()
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        except nvml.NVMLError as exc:
            remarks.once(f"GPU {index} cannot be opened: {exc}; the others go on")
            continue
        found.append((GpuIdentity(index, uuid), handle))
        found += _mig_instances(nvml, index, uuid, handle, remarks)
    if not found:
        raise NoGpu(f"none of {count} NVIDIA GPUs can be read here")
    return found


def _mig_instances(
    nvml: Any, index: int, uuid: str, handle: Any, remarks: Remarks
) -> Iterator[tuple[GpuIdentity, Any]]:
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return
        places = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:
        return  # it is no GPU that can be split
    for place in range(places):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
            number = int(nvml.nvmlDeviceGetGpuInstanceId(instance))
            yield GpuIdentity(index, _text(nvml.nvmlDeviceGetUUID(instance)), number, uuid), instance
        except nvml.NVMLError as exc:
            if exc.value != nvml.NVML_ERROR_NOT_FOUND:
                remarks.once(f"GPU {index}: MIG instance {place} cannot be opened: {exc}")


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
