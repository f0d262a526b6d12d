"""Whether two runs can be compared at all, and in which settings they differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Json = Mapping[str, Any]

_MUST_AGREE: Final = (
    "workload",
    "tokenizer",
    "max_tokens",
    "force_length",
    "extra_body",
    "api",
    "stream",
    "model",
    "load",
    "users",
    "arrival",
    "when_full",
    "think_time",
    "patience",
    "retries",
    "timeouts",
    "warmup",
    "slo",
    "transport",
    "token_detail",
    "token_source",
    "stamp_source",
    "schema",
)
"""They decide what was sent, when, and how it was counted. The rest is what a comparison is usually about."""


_OF_ANSWERS: Final = ("token_source", "stamp_source")
"""Not known of a run whose every request failed without a token: nothing of it could mean something else."""


@dataclass(frozen=True, slots=True)
class Differing:
    """A setting that two runs do not share. ``must_agree``: their numbers mean different things."""

    name: str
    base: object
    new: object
    must_agree: bool

    @property
    def text(self) -> str:
        return f"{self.name}: {_short(self.base)} → {_short(self.new)}"

    def as_json(self) -> dict[str, Any]:
        return {"setting": self.name, "base": self.base, "new": self.new, "must_agree": self.must_agree}


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"


def settings(run: Json, summary: Json) -> dict[str, Any]:
    """``run.json`` and ``summary.json`` of one run, by the names that ``--expect-different`` takes."""
    config, workload, server = run["config"], run["workload"], run["server"]
    totals = summary["totals"]["all_phases"]
    profile = config["profile"]
    own = {
        "workload": {name: workload.get(name) for name in ("name", "fingerprint", "content")},
        "load": None if profile is None else {**profile, "window_ns": config["window_ns"]},
        "users": run.get("users"),
        "arrival": {name: config[name] for name in ("arrival", "burstiness")},
        "think_time": config["think_time_ns"],
        "patience": config["patience_ns"],
        "warmup": {name: config[name] for name in ("warmup_requests", "warmup_time_ns")},
        "slo": sorted(config["slos"]),
        "token_detail": run["token_detail"],
        "token_source": sorted(totals["token_sources"]),
        "stamp_source": sorted(totals["stamp_sources"]),
        "schema": summary["schema"],
        "model": server["model"],
        "server_version": server["version"],
        "max_model_len": server["max_model_len"],
        "target": [target["socket_path"] or f"{target['host']}:{target['port']}" for target in config["targets"]],
        "seed": config["seed"],
        "tls": config["tls"],
        "proxy": config["proxy"],
        "gpus": sorted(gpu["gpu_uuid"] for gpu in (run.get("telemetry") or {}).get("gpus") or ()),
        "host": run["hosts"]["master"],
        "workers": run["workers"]["expected"],
        **run["versions"],
        **{f"tag {key}": value for key, value in run["tags"].items()},
    }
    return own | {name: config[name] for name in _MUST_AGREE if name not in own}


def differing(base: Mapping[str, Any], new: Mapping[str, Any]) -> list[Differing]:
    """Of two results of ``settings``, those that must agree first."""
    names = [*_MUST_AGREE, *sorted((set(base) | set(new)) - set(_MUST_AGREE))]
    return [
        Differing(name, base.get(name), new.get(name), name in _MUST_AGREE)
        for name in names
        if base.get(name) != new.get(name)
        and not _explained_by_seed_or_age(name, base, new)
        and not (name in _OF_ANSWERS and not (base[name] and new[name]))
    ]


def _explained_by_seed_or_age(name: str, base: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Another seed draws other requests from the same workload, whose content is the same."""
    if name != "workload":
        return False
    one, other = base[name], new[name]
    if base["seed"] == new["seed"]:
        # Of an earlier version only the content is not known.
        return all(one[key] == other[key] for key in ("name", "fingerprint")) and None in (
            one["content"],
            other["content"],
        )
    return one["content"] is not None and all(one[key] == other[key] for key in ("name", "content"))


def unexpected(found: Sequence[Differing], expected: Sequence[str]) -> list[Differing]:
    """Those that nobody has said would differ. ``tag`` stands for every tag."""
    return [one for one in found if one.name not in expected and one.name.partition(" ")[0] not in expected]


def known_names(*of: Mapping[str, Any]) -> set[str]:
    """What ``--expect-different`` takes for these runs."""
    names = {name for one in of for name in one} | set(_MUST_AGREE)
    return names | {name.partition(" ")[0] for name in names}
