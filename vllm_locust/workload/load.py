"""From ``--workload`` to a ``Workload``: shipped name, workload file, ShareGPT file or trace."""

from __future__ import annotations

import hashlib
from pathlib import Path

from vllm_locust.errors import WorkloadError
from vllm_locust.workload.dataset_cache import DatasetCache, cache_key, file_identity
from vllm_locust.workload.generated import SCHEMA, GeneratedSource, Plan, build_table
from vllm_locust.workload.json_rows import ReadReport, read_rows
from vllm_locust.workload.lengths import JointLengths, read_length_pairs
from vllm_locust.workload.shared_prefix import plan_shared_prefix
from vllm_locust.workload.sharegpt import ShareGptSource
from vllm_locust.workload.spec import (
    SharedPrefixSpec,
    ShareGptSpec,
    SyntheticSpec,
    TraceSpec,
    WorkloadSpec,
    read_spec,
    workload_path,
)
from vllm_locust.workload.synthetic import plan_synthetic
from vllm_locust.workload.tokens import TokenCounter, token_counter
from vllm_locust.workload.trace import plan_trace
from vllm_locust.workload.workload import ContextLimit, Workload, make_workload

_SPEC_SUFFIXES = (".yaml", ".yml")
_DATA_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv")


def load_workload(
    name_or_path: str,
    *,
    tokenizer: str | None,
    max_model_len: int | None,
    max_tokens: int | None,
    seed: int,
    cache_dir: Path | None = None,
) -> Workload:
    """Load a workload, from the cache of this machine where it was loaded before.

    ``max_tokens`` only decides which rows fit into ``max_model_len``; a prompt's ``output_tokens`` stays the recorded
    length. ``seed`` decides the text and lengths of generated workloads. Raises WorkloadError.
    """
    spec = find_spec(name_or_path)
    counter = token_counter(tokenizer)
    cache = DatasetCache(cache_dir)
    limit = ContextLimit(max_model_len, max_tokens, spec.template_tokens)
    if isinstance(spec, ShareGptSpec):
        conversations = ShareGptSource(spec.file, counter, cache)
        method = counter.text_method
        return make_workload(
            spec,
            conversations,
            conversations.metadata,
            token_count_method=method,
            limit=limit,
            origin=conversations.metadata.digest,
        )
    generated = _generated(spec, counter, cache, seed)
    reference = None
    if isinstance(spec, SyntheticSpec) and isinstance(spec.lengths, JointLengths):
        reference = read_length_pairs(spec.lengths.file)
    return make_workload(
        spec,
        generated,
        generated.metadata,
        token_count_method=counter.generated_method,
        limit=limit,
        origin=_file_digest(spec.file) if isinstance(spec, TraceSpec) else None,
        reference=reference,
    )


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_spec(name_or_path: str) -> WorkloadSpec:
    """What ``--workload`` names: with a directory or a known ending it is a file, otherwise a shipped workload."""
    path = Path(name_or_path).expanduser()
    if path.suffix.lower() not in _SPEC_SUFFIXES + _DATA_SUFFIXES and "/" not in name_or_path:
        return read_spec(workload_path(name_or_path))
    if not path.is_file():
        raise WorkloadError(f"--workload {name_or_path}: there is no such file; check the path")
    if path.suffix.lower() in _SPEC_SUFFIXES:
        return read_spec(path)
    description = f"data file {path.name}"
    if path.suffix.lower() == ".csv" or _is_trace(path):
        return TraceSpec(name=path.stem, description=description, file=path)
    return ShareGptSpec(name=path.stem, description=description, file=path)


def _is_trace(path: Path) -> bool:
    try:
        first = next(read_rows(path, ReadReport(path.stat().st_size)), None)
    except OSError as error:
        raise WorkloadError(f"--workload {path} cannot be read ({error.strerror}); check its rights") from None
    return isinstance(first, dict) and "timestamp" in first and "input_length" in first


def _generated(
    spec: SyntheticSpec | SharedPrefixSpec | TraceSpec, counter: TokenCounter, cache: DatasetCache, seed: int
) -> GeneratedSource:
    inputs: list[object] = [repr(spec), seed, counter.identity]
    if isinstance(spec, TraceSpec):
        inputs.append(file_identity(spec.file))
    elif isinstance(spec.lengths, JointLengths):
        inputs.append(file_identity(spec.lengths.file))

    def plan() -> Plan:
        if isinstance(spec, TraceSpec):
            return plan_trace(spec)
        return plan_synthetic(spec, seed) if isinstance(spec, SyntheticSpec) else plan_shared_prefix(spec, seed)

    key = cache_key("generated", *inputs)
    return GeneratedSource(cache.table("generated", key, SCHEMA, lambda: build_table(plan(), counter, seed)))
