"""Which GPUs are meant: ``--gpus``, else ``CUDA_VISIBLE_DEVICES``, in the words that CUDA understands.

An index, a UUID (``GPU-…``, ``MIG-…``) or the beginning of one that fits only one. Indices are NVML's, by the place on
the PCI bus. As in CUDA, -1 ends a list, and an empty list means none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vllm_locust.errors import UsageError

VARIABLE: Final = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """A GPU, or one of its MIG instances."""

    index: int
    uuid: str
    mig_instance: int | None = None
    parent_uuid: str | None = None
    """Of a MIG instance."""


def choose(there: Sequence[GpuIdentity], gpus: str | None, environment: Mapping[str, str]) -> list[GpuIdentity]:
    """Of the GPUs that are there those that are meant, without their repetitions. Raises ``UsageError``."""
    given, text = ("--gpus", gpus) if gpus is not None else (VARIABLE, environment.get(VARIABLE))
    if text is None or text.strip() == "all":
        return list(there)
    chosen: dict[str, GpuIdentity] = {}
    for word in text.split(","):
        word = word.strip()
        if word in ("", "-1", "none", "void", "NoDevFiles"):
            break
        for gpu in _named(word, there, given):
            chosen[gpu.uuid] = gpu
    if not chosen:
        raise UsageError(f"{given}={text!r} hides all {len(there)} GPUs; name one of them at least, or all")
    # A MIG instance tells only of its own part: power, clocks and temperature are the whole GPU's.
    parents = {gpu.parent_uuid for gpu in chosen.values()} - {None}
    return [gpu for gpu in there if gpu.uuid in chosen or gpu.uuid in parents]


def _named(word: str, there: Sequence[GpuIdentity], given: str) -> list[GpuIdentity]:
    if word.isascii() and word.isdigit():
        found = [gpu for gpu in there if gpu.index == int(word)]
    else:
        found = [gpu for gpu in there if gpu.uuid.startswith(word)] if word.startswith(("GPU-", "MIG-")) else []
        if len(found) > 1 and not any(gpu.uuid == word for gpu in found):
            raise UsageError(f"{given}: {word!r} fits {len(found)} GPUs; give more of the UUID")
        if found:
            exact = next((gpu for gpu in found if gpu.uuid == word), found[0])
            found = [exact, *(gpu for gpu in there if gpu.parent_uuid == exact.uuid)]
    if not found:
        known = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in there) or "none"
        raise UsageError(f"{given}: there is no GPU {word!r} here; there are: {known}")
    return found
