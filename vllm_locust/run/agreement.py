"""What master and workers must have in common before any load is sent: versions, workload, flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final

from vllm_locust import __version__
from vllm_locust.run.flags import FLAG_DEFAULTS

_OF_EACH_PROCESS: Final = frozenset(
    {
        *("api_key_file", "redis_url", "redis_password_file"),
        *("progress", "web_names", "ttl", "run_name", "tag", "metrics_url"),
    }
)
"""Ways to secrets and to Redis are each host's own; the others mean nothing to a worker."""
_SHOWN: Final = 80


def versions() -> dict[str, str]:
    return {"vllm-locust": __version__, "Locust": version("locust")}


def given_flags(options: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that a process was started with, on its command line or in its environment, as far as all must agree
    on them: those that are not at their defaults.
    """
    return {
        name: options[name]
        for name, default in FLAG_DEFAULTS.items()
        if name not in _OF_EACH_PROCESS and options.get(name) not in (None, "", default)
    }


def disagreements(own: Mapping[str, Any], masters: Mapping[str, Any]) -> list[str]:
    """A sentence for each flag that a worker was given, and whose value is another one than the master's."""
    return [
        f"--{name.replace('_', '-')}: this worker was started with {_shown(value)}, the master with "
        f"{_shown(masters.get(name, FLAG_DEFAULTS[name]))}; start the worker without it, since the master's flags hold "
        "for all"
        for name, value in own.items()
        if masters.get(name, FLAG_DEFAULTS[name]) != value
    ]


def version_problems(own: Mapping[str, str], masters: Mapping[str, str]) -> list[str]:
    return [
        f"this worker runs {program} {own[program]}, the master {masters.get(program)}; install the same version"
        for program in own
        if own[program] != masters.get(program)
    ]


def _shown(value: object) -> str:
    if value in (None, "", [], False):
        return "none"
    text = " ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
    # What stands before the @ of an address may be a password.
    return "a value that is not shown" if "@" in text else repr(text[:_SHOWN])
