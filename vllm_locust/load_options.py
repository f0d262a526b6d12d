"""The flags that say how much load is sent and when, read together: few of them mean anything alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from vllm_locust.arrival import MAX_BURSTINESS, MIN_BURSTINESS, ArrivalProcess
from vllm_locust.capacity_options import CapacityOrder, read_capacity_options
from vllm_locust.errors import UsageError
from vllm_locust.load_profile import LoadProfile, Quantity, constant_rate, parse_stages, profile_from_shape
from vllm_locust.workload.spec_reader import read_yaml_mapping

_LOAD_FLAGS: Final = ("rate", "rate_stages", "user_stages", "shape")


@dataclass(slots=True)
class LoadOptions:
    """What the flags say. ``problems`` holds every fault, each with its fix."""

    profile: LoadProfile | None = None
    arrival: ArrivalProcess = ArrivalProcess.POISSON
    burstiness: float = 1.0
    capacity: CapacityOrder | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def open_loop(self) -> bool:
        return is_open_loop(self.profile, self.arrival)


def is_open_loop(profile: LoadProfile | None, arrival: ArrivalProcess) -> bool:
    return arrival is ArrivalProcess.TRACE or (profile is not None and profile.quantity is Quantity.RATE)


def read_load_options(options: Mapping[str, Any], run_time_s: float | None) -> LoadOptions:
    given = {name: str(options[name]) for name in (*_LOAD_FLAGS, "arrival", "burstiness") if _is_given(options, name)}
    load = LoadOptions()
    flags = [_flag(name) for name in _LOAD_FLAGS if name in given]
    load.capacity = read_capacity_options(options, load.problems)
    if _is_given(options, "capacity"):
        flags.append("--capacity")
    if len(flags) > 1:
        load.problems.append(f"{' and '.join(flags)}: each of them sets the load; give one of them")
        return load
    if flags == ["--capacity"] and run_time_s:
        load.problems.append("-t with --capacity: the search ends by itself; drop -t and give --budget")
    elif flags and flags != ["--rate"] and run_time_s:
        load.problems.append(f"-t with {flags[0]}: the stages' own lengths end the run; drop -t")
    before = len(load.problems)
    _read_profile(load, given, run_time_s)
    if len(load.problems) == before:
        _read_arrival(load, given, flags)
    return load


def _is_given(options: Mapping[str, Any], name: str) -> bool:
    return options.get(name) not in (None, "")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _read_profile(load: LoadOptions, given: Mapping[str, str], run_time_s: float | None) -> None:
    if load.capacity is not None:
        load.profile = load.capacity.first_load
    for name in _LOAD_FLAGS:
        if name not in given:
            continue
        try:
            if name == "rate":
                load.profile = constant_rate(given[name], round(run_time_s * 1e9) if run_time_s else None)
            elif name == "shape":
                load.profile = profile_from_shape(read_yaml_mapping(Path(given[name]), "shape", first_key="quantity"))
            else:
                quantity = Quantity.RATE if name == "rate_stages" else Quantity.USERS
                load.profile = parse_stages(given[name], quantity)
        except UsageError as error:
            load.problems += [f"--shape: {problem}" for problem in error.problems]
        except ValueError as error:
            where = f"--shape {given[name]}" if name == "shape" else _flag(name)
            load.problems += [f"{where}: {line}" for line in str(error).splitlines()]


def _read_arrival(load: LoadOptions, given: Mapping[str, str], flags: list[str]) -> None:
    """``--burstiness`` alone means gamma."""
    text = given.get("arrival", "gamma" if "burstiness" in given else load.arrival)
    if text not in list(ArrivalProcess):
        load.problems.append(f"--arrival: {text!r} is not one of {', '.join(ArrivalProcess)}")
        return
    arrival = ArrivalProcess(text)
    if arrival is ArrivalProcess.TRACE and flags:
        load.problems.append(f"--arrival trace with {flags[0]}: a trace has times of its own; drop one of the two")
    elif arrival is not ArrivalProcess.TRACE and not load.open_loop and "arrival" in given:
        load.problems.append(f"--arrival {arrival}: there is no rate to arrive at; give --rate or --rate-stages")
    elif "burstiness" in given and arrival is not ArrivalProcess.GAMMA:
        load.problems.append(f"--burstiness with --arrival {arrival}: only gamma has it; write --arrival gamma")
    elif "burstiness" in given and not load.open_loop:
        load.problems.append("--burstiness: there is no rate to arrive at; give --rate or --rate-stages")
    load.arrival = arrival
    if "burstiness" in given:
        _read_burstiness(load, given["burstiness"])


def _read_burstiness(load: LoadOptions, text: str) -> None:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if MIN_BURSTINESS <= value <= MAX_BURSTINESS:
        load.burstiness = value
    else:
        load.problems.append(
            f"--burstiness: {text[:40]!r} is not a number from {MIN_BURSTINESS} to {MAX_BURSTINESS:,.0f}; "
            "1 is Poisson, less comes in bursts"
        )
