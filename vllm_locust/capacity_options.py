"""The flags of a capacity search, read together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from vllm_locust.capacity.probe import allowed_share
from vllm_locust.capacity.search import CapacitySettings
from vllm_locust.duration import parse_duration_ns
from vllm_locust.load_profile import MAX_VALUE, MIN_RATE_RPS, LoadProfile, ProfileStage, Quantity
from vllm_locust.slo import SloKind, parse_slos

CAPACITY_FLAGS: Final = (
    ("--capacity", None, "rate or users: search for the most of it at which every per-stage --slo is met"),
    ("--start-load", None, "requests per second, or users, of the first probe (default: 8)"),
    ("--min-load", None, "the search goes no lower (default: a hundredth of --start-load, or one user)"),
    ("--max-load", None, "the search goes no higher"),
    ("--max-probes", "10", "probes, those of --resume included"),
    ("--precision", "5%", "width of the interval that is narrow enough, relative to the capacity"),
    ("--budget", "20m", "time for all probes together"),
    ("--probe-time", None, "shortest window of a probe (default: a thirtieth of --budget)"),
    ("--settle-time", None, "load before each window (default: from 2s to 10s, by --budget; longer if answers are)"),
    ("--resume", None, "directory of an earlier search: its probes count, and the search goes on from them"),
)
CAPACITY_SWITCHES: Final = (
    (
        "--reset-prefix-cache",
        "before each probe have the server forget its prefix cache (POST /reset_prefix_cache; vLLM needs "
        "VLLM_SERVER_DEV_MODE=1)",
    ),
)
START_LOAD: Final = 8.0
EXAMPLE: Final = "--slo 'p99(ttft)<=2s', or --slo 'ttft<=2s' --slo 'good_fraction>=0.99'"
JUDGED_LIVE: Final = ("ttft", "ttft_from_schedule", "tpot", "itl", "chunk_gap", "e2e")
"""Distributions that workers tell of while a probe runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityOrder:
    """What a search was asked for."""

    settings: CapacitySettings
    reset_prefix_cache: bool = False
    resume: str | None = None

    @property
    def first_load(self) -> LoadProfile:
        """For the warm-up, and for what hangs on whether the loop is open."""
        load, quantity = self.settings.start_load, self.settings.quantity
        return LoadProfile(quantity=quantity, stages=(hold(load, None, quantity),))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        settings = data["settings"]
        return cls(
            settings=CapacitySettings(**{**settings, "quantity": Quantity(settings["quantity"])}),
            reset_prefix_cache=data["reset_prefix_cache"],
            resume=data["resume"],
        )


def hold(load: float, length_ns: int | None, quantity: Quantity) -> ProfileStage:
    name = f"{load:g}/s" if quantity is Quantity.RATE else f"{load:g} users"
    return ProfileStage(name=name, start_value=load, end_value=load, length_ns=length_ns)


def read_capacity_options(options: Mapping[str, Any], problems: list[str]) -> CapacityOrder | None:
    """None where no search is asked for, or where what is asked for is no search: then ``problems`` says why."""
    given = {
        name: str(options[name])
        for flag, default, _ in CAPACITY_FLAGS
        if options.get(name := _name(flag)) not in (None, "") and str(options[name]) != default
    }
    reset = bool(options.get("reset_prefix_cache"))
    asked = given.pop("capacity", None)
    if asked is None:
        names = [*(_flag(name) for name in given), *(["--reset-prefix-cache"] if reset else [])]
        if names:
            problems.append(f"{', '.join(names)}: only a search has it; give --capacity rate or --capacity users too")
        return None
    if asked not in list(Quantity):
        problems.append(f"--capacity: {asked!r} is not one of {', '.join(Quantity)}")
        return None
    settings = _settings(Quantity(asked), options, problems)
    if settings is None:
        return None
    return CapacityOrder(settings=settings, reset_prefix_cache=reset, resume=given.get("resume"))


def slo_problems(texts: Sequence[str]) -> list[str]:
    """Why these SLOs bound no load. What is wrong with their texts is not told here."""
    try:
        slos = parse_slos(texts)
    except ValueError:
        return []
    per_stage = [slo for slo in slos if slo.kind is SloKind.STAGE]
    if not per_stage:
        return [f"--capacity: no SLO says from when on the load is too much; give for example {EXAMPLE}"]
    problems = []
    for slo in per_stage:
        try:
            allowed_share(slo)
        except ValueError as error:
            problems.append(f"--capacity: {error}")
            continue
        if slo.percentile is not None and slo.metric not in JUDGED_LIVE:
            problems.append(
                f"--capacity: SLO {slo.text!r}: {slo.metric} is not known while a probe runs; use one of "
                f"{', '.join(JUDGED_LIVE)}"
            )
    return problems


def _name(flag: str) -> str:
    return flag[2:].replace("-", "_")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _settings(quantity: Quantity, options: Mapping[str, Any], problems: list[str]) -> CapacitySettings | None:
    before = len(problems)

    def take(name: str, parse: Callable[[str], Any]) -> Any:
        text = options.get(name)
        if text in (None, ""):
            return None
        try:
            return parse(str(text))
        except ValueError as error:
            problems.append(f"{_flag(name)}: {error}")
            return None

    def load(text: str) -> float:
        return _load(text, quantity)

    start, lowest, highest = take("start_load", load), take("min_load", load), take("max_load", load)
    budget_s, probe_s, settle_s = (take(name, _seconds) for name in ("budget", "probe_time", "settle_time"))
    max_probes, precision = take("max_probes", _probes), take("precision", _precision)
    if len(problems) > before:
        return None
    if start is None:
        start = max(min(START_LOAD, highest or START_LOAD), lowest or 0.0)
    if lowest is None:
        lowest = 1.0 if quantity is Quantity.USERS else max(start / 100, MIN_RATE_RPS)
    try:
        return CapacitySettings(
            quantity=quantity,
            start_load=start,
            min_load=lowest,
            max_load=highest,
            precision=precision,
            max_probes=max_probes,
            budget_s=budget_s,
            probe_s=probe_s,
            settle_s=min(10.0, max(2.0, budget_s / 120)) if settle_s is None else settle_s,
        )
    except ValueError as error:
        problems += [f"--capacity: {line}" for line in str(error).splitlines()]
        return None


def _load(text: str, quantity: Quantity) -> float:
    value = _number(text)
    if not 0 < value <= MAX_VALUE:
        raise ValueError(f"{text[:40]!r} is not a number above 0 and up to {MAX_VALUE:,}")
    if quantity is Quantity.RATE and value < MIN_RATE_RPS:
        raise ValueError(f"the least rate is {MIN_RATE_RPS}/s; write that or more")
    if quantity is Quantity.USERS and value != int(value):
        raise ValueError(f"{text[:40]} users cannot be; write a whole number")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is not a number") from None


def _seconds(text: str) -> float:
    seconds = parse_duration_ns(text) / 1e9
    if not seconds:
        raise ValueError("it must be longer than 0")
    return seconds


def _probes(text: str) -> int:
    value = _number(text)
    if not 1 <= value <= 1000 or value != int(value):
        raise ValueError(f"{text[:40]!r} is not a whole number from 1 to 1000")
    return int(value)


def _precision(text: str) -> float:
    value = _number(text[:-1]) / 100 if text.endswith("%") else _number(text)
    if not 0.001 <= value <= 1:
        raise ValueError(f"{text[:40]!r} is not a share from 0.1% to 100%; write for example 5%")
    return value
