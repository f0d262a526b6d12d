"""What a workload file asks for, as frozen values. Reading reports every fault at once, each naming the key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal, TypeAlias

from vllm_locust.errors import WorkloadError
from vllm_locust.workload.lengths import Fixed, JointLengths, Length, Lengths, Lognormal, Marginals, Uniform
from vllm_locust.workload.spec_reader import SpecReader, read_yaml_mapping

TraceLayout = Literal["auto", "mooncake", "burstgpt", "azure"]

ONE_TURN = Fixed(1)
TEMPLATE_TOKENS = 64
"""What a chat template may add to a request, so that rows at the limit of the context are not rejected: the largest
common one, Llama 3.1 with its date header, adds about 40."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseSpec:
    name: str
    description: str = ""
    template_tokens: int = TEMPLATE_TOKENS
    """Room left for the chat template when rows are held against the server's context length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGptSpec(BaseSpec):
    """Conversations from a file.

    vLLM's own bench drops prompts and answers below 4 tokens, prompts above 1,024 and sums above 2,048. That cuts off
    the long tail, which loads a server most, so here nothing is dropped unless a limit is set.
    """

    file: Path
    min_prompt_tokens: int = 1
    max_prompt_tokens: int | None = None
    min_output_tokens: int = 1
    max_output_tokens: int | None = None
    max_total_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSpec(BaseSpec):
    """Generated text; no two prompts start alike."""

    lengths: Lengths
    conversations: int
    turns: Length = ONE_TURN


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixSpec(BaseSpec):
    """Groups of conversations that start with the same text; what follows is unique."""

    lengths: Lengths
    groups: int
    prefix_tokens: int
    conversations_per_group: int
    prefix_role: Literal["system", "user"] = "system"
    turns: Length = ONE_TURN


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpec(BaseSpec):
    """Requests at recorded times with recorded lengths. ``speed`` 2 replays twice as fast."""

    file: Path
    layout: TraceLayout = "auto"
    speed: float = 1.0
    block_tokens: int = 512
    max_rows: int = 200_000


WorkloadSpec: TypeAlias = ShareGptSpec | SyntheticSpec | SharedPrefixSpec | TraceSpec


def workload_path(name: str) -> Path:
    """Where the shipped workload ``name`` lies: the checkout's ``workloads/``, or the installed package's data."""
    known: set[str] = set()
    for directory in _workload_directories():
        path = directory / f"{name}.yaml"
        if path.is_file():
            return path
        known.update(found.stem for found in directory.glob("*.yaml"))
    raise WorkloadError(
        f"--workload {name}: there is no such workload; use one of {', '.join(sorted(known))}, or the path of a file"
    )


def _workload_directories() -> tuple[Path, ...]:
    package = Path(str(resources.files("vllm_locust")))
    return package.parent / "workloads", package / "data" / "workloads"


def read_spec(path: Path) -> WorkloadSpec:
    return parse_spec(read_yaml_mapping(path), path)


def parse_spec(mapping: Mapping[str, object], path: Path) -> WorkloadSpec:
    """The typed form of a workload file's content; file names in it are relative to ``path``."""
    reader = SpecReader(mapping, path.name, [])
    kind = reader.choice("kind", tuple(_KINDS))
    if reader.problems:
        # The other keys mean nothing without it.
        raise WorkloadError(*reader.problems)
    spec = _KINDS[kind](reader, path)
    reader.finish()
    if reader.problems:
        raise WorkloadError(*reader.problems)
    return spec


def _sharegpt(reader: SpecReader, path: Path) -> ShareGptSpec:
    return ShareGptSpec(
        name=reader.text("name", path.stem),
        description=reader.text("description", None),
        template_tokens=reader.integer("template_tokens", TEMPLATE_TOKENS, minimum=0),
        file=_file(reader, "file", path),
        min_prompt_tokens=reader.integer("min_prompt_tokens", 1),
        max_prompt_tokens=reader.optional_integer("max_prompt_tokens"),
        min_output_tokens=reader.integer("min_output_tokens", 1),
        max_output_tokens=reader.optional_integer("max_output_tokens"),
        max_total_tokens=reader.optional_integer("max_total_tokens"),
    )


def _synthetic(reader: SpecReader, path: Path) -> SyntheticSpec:
    return SyntheticSpec(
        name=reader.text("name", path.stem),
        description=reader.text("description", None),
        template_tokens=reader.integer("template_tokens", TEMPLATE_TOKENS, minimum=0),
        lengths=_lengths(reader, path),
        conversations=reader.integer("conversations"),
        turns=_length(reader, "turns", 1),
    )


def _shared_prefix(reader: SpecReader, path: Path) -> SharedPrefixSpec:
    role = reader.choice("prefix_role", ("system", "user"), "system")
    return SharedPrefixSpec(
        name=reader.text("name", path.stem),
        description=reader.text("description", None),
        template_tokens=reader.integer("template_tokens", TEMPLATE_TOKENS, minimum=0),
        lengths=_lengths(reader, path),
        groups=reader.integer("groups"),
        prefix_tokens=reader.integer("prefix_tokens"),
        conversations_per_group=reader.integer("conversations_per_group"),
        prefix_role="user" if role == "user" else "system",
        turns=_length(reader, "turns", 1),
    )


def _trace(reader: SpecReader, path: Path) -> TraceSpec:
    layouts: dict[str, TraceLayout] = {"auto": "auto", "mooncake": "mooncake", "burstgpt": "burstgpt", "azure": "azure"}
    return TraceSpec(
        name=reader.text("name", path.stem),
        description=reader.text("description", None),
        template_tokens=reader.integer("template_tokens", TEMPLATE_TOKENS, minimum=0),
        file=_file(reader, "file", path),
        layout=layouts[reader.choice("layout", tuple(layouts), "auto")],
        speed=reader.number("speed", 1.0),
        block_tokens=reader.integer("block_tokens", 512),
        max_rows=reader.integer("max_rows", 200_000),
    )


_KINDS: Mapping[str, Callable[[SpecReader, Path], WorkloadSpec]] = {
    "synthetic": _synthetic,
    "sharegpt": _sharegpt,
    "shared_prefix": _shared_prefix,
    "trace": _trace,
}


def _file(reader: SpecReader, key: str, path: Path) -> Path:
    file = path.parent / Path(reader.text(key)).expanduser()
    if not file.is_file() and reader.has(key):
        reader.fault(key, f"names {file}, which is not a file; correct the path (relative to the workload file)")
    return file


def _lengths(reader: SpecReader, path: Path) -> Lengths:
    if not reader.has("joint_lengths"):
        return Marginals(_length(reader, "prompt_tokens"), _length(reader, "output_tokens"))
    for key in ("prompt_tokens", "output_tokens"):
        if reader.has(key):
            reader.value(key)
            reader.fault(key, "cannot stand beside joint_lengths; remove one of them")
    return JointLengths(_file(reader, "joint_lengths", path))


def _length(reader: SpecReader, key: str, default: int | None = None) -> Length:
    """A whole number, or a mapping with ``distribution``: uniform or lognormal."""
    if not reader.has(key) and default is not None:
        reader.value(key, default)
        return Fixed(default)
    if not reader.has(key) or not isinstance(reader.value(key), dict):
        return Fixed(reader.integer(key))
    nested = reader.nested(key)
    if nested is None:
        return Fixed(1)
    distribution = nested.choice("distribution", ("uniform", "lognormal"))
    low, high = nested.integer("min", 1), nested.integer("max")
    if nested.has("max") and high < low:
        nested.fault("max", f"must not be below min ({low})")
    length: Length = Uniform(low, high)
    if distribution == "lognormal":
        length = Lognormal(nested.integer("median"), nested.number("sigma"), low, high)
    nested.finish()
    return length
