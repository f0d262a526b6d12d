"""Calls to NVML of which none stops another: a field that a GPU does not tell is remembered with its reason.

``nvml`` is the module ``pynvml`` or something that speaks like it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from vllm_locust.collect.gpu_source import Remarks

Values = Mapping[str, Any]

_LOST: Final = ("GPU_IS_LOST", "GPU_NOT_FOUND", "RESET_REQUIRED", "UNINITIALIZED", "DRIVER_NOT_LOADED")
_NEVER: Final = (
    "NOT_SUPPORTED",
    "FUNCTION_NOT_FOUND",
    "NO_PERMISSION",
    "INVALID_ARGUMENT",
    "ARGUMENT_VERSION_MISMATCH",
    "DEPRECATED",
)
"""What is answered so once is not asked again. Any other error may pass."""

_FIELD_VALUE: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""By the value's type."""


class GpuLost(Exception):
    """The driver has lost sight of this GPU."""


def error_codes(nvml: Any, names: Sequence[str]) -> frozenset[int]:
    return frozenset(getattr(nvml, f"NVML_ERROR_{name}") for name in names if hasattr(nvml, f"NVML_ERROR_{name}"))


class NvmlCalls:
    """Calls about one GPU, which ``name`` names in remarks."""

    def __init__(self, nvml: Any, name: str, remarks: Remarks) -> None:
        self.nvml = nvml
        self._name = name
        self._remarks = remarks
        self._lost = error_codes(nvml, _LOST)
        self._never = error_codes(nvml, _NEVER)
        self._off: set[str] = set()

    def is_off(self, field: str) -> bool:
        return field in self._off

    def ask(self, field: str, call: Callable[[], Values]) -> Values:
        """What ``call`` returns; nothing where the GPU does not tell it. Raises ``GpuLost``."""
        if field in self._off:
            return {}
        try:
            return call()
        except self.nvml.NVMLError as exc:
            self.refused(field, exc.value)
        except (ValueError, TypeError, AttributeError, OSError) as exc:
            # An older binding or a driver that answers in another form: the other fields are still worth having.
            self._off.add(field)
            self._remarks.once(f"{self._name}: no {field}: {type(exc).__name__}: {exc}")
        return {}

    def refused(self, field: str, code: int) -> None:
        reason = str(self.nvml.NVMLError(code))
        if code in self._lost:
            raise GpuLost(reason)
        if code in self._never:
            self._off.add(field)
            self._remarks.once(f"{self._name}: no {field}: {reason}")
        else:
            self._remarks.once(f"{self._name}: no {field} for now: {reason}")


class FieldBatch:
    """Several of NVML's numbered fields in one call, each under a name of ours."""

    def __init__(self, calls: NvmlCalls, fields: Mapping[str, int | tuple[int, int]]) -> None:
        self._calls = calls
        self._fields = dict(fields)

    def read(self, handle: Any) -> dict[str, float]:
        """What was answered. Raises the binding's error where the call as a whole fails."""
        if not self._fields:
            return {}
        found: dict[str, float] = {}
        answers = self._calls.nvml.nvmlDeviceGetFieldValues(handle, list(self._fields.values()))
        for name, answer in zip(list(self._fields), answers, strict=True):
            if answer.nvmlReturn:
                self._calls.refused(name, answer.nvmlReturn)
                if self._calls.is_off(name):
                    del self._fields[name]
            else:
                found[name] = getattr(answer.value, _FIELD_VALUE[answer.valueType])
        return found
