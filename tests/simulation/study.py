"""The study behind RESULTS.md: ``python -m tests.simulation.study truth|search|overload [CASE ...]``.

``truth`` finds each case's capacity by exhaustive simulation, ``search`` how near the search comes to it and how often
its interval covers it, ``overload`` when the detector fires at which share of the load that the server can take.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tests.simulation.cases import CASES
from tests.simulation.probing import Case, OfflineTarget, run_search
from vllm_locust.capacity.probe import Probe
from vllm_locust.capacity.search import Capacity, CapacitySearch, CapacitySettings
from vllm_locust.load_profile import Quantity

TRUTH_LOADS: tuple[float, ...] = (0.96, 0.98, 1.0, 1.02, 1.04)
TRUTH_REQUESTS = 400_000
SEARCH_REQUESTS = 60_000
"""The budget of a search in arrivals at the true capacity: the same evidence for every case, whatever its speed."""
RUNS = 15
RATE_OF_USERS = 30.0
OVERLOAD_SHARES = (0.8, 0.9, 0.95, 1.0, 1.1, 1.2, 1.5, 2.0)
OVERLOAD_REQUESTS = 3_000
OVERLOAD_RUNS = 40
Floats = npt.NDArray[np.float64]


def excess(case: Case, load: float, requests: int, seed: int) -> dict[str, float]:
    """How far, in logits, the share beyond lies above what is allowed, for each SLO."""
    target = OfflineTarget(case, seed, detect=False)
    rate = load if case.quantity is Quantity.RATE else RATE_OF_USERS
    result = target.probe(Probe(load=load, settle_s=100, window_s=requests / rate, empty_first=False, why="truth"))
    half = 0.5 / requests
    share = {slo.slo: min(max(slo.share, half), 1 - half) for slo in result.slos}
    logit = {slo: math.log(one / (1 - one)) for slo, one in share.items()}
    return {slo.slo: logit[slo.slo] - math.log(slo.allowed / (1 - slo.allowed)) for slo in result.slos}


def truth(case: Case) -> tuple[float, float]:
    """The lowest root among the SLOs of lines through long simulations near it, and its standard error."""
    loads = [case.capacity * factor for factor in TRUTH_LOADS]
    if case.quantity is Quantity.USERS:
        loads = [float(round(load)) for load in loads]
    rows = [excess(case, load, TRUTH_REQUESTS, seed) for seed, load in enumerate(loads, start=1000)]
    roots = {slo: root(np.log(loads), np.array([row[slo] for row in rows])) for slo in rows[0]}
    return min(roots.values())


def root(log_loads: Floats, values: Floats) -> tuple[float, float]:
    centre = log_loads.mean()
    slope, height = np.polyfit(log_loads - centre, values, 1)
    residuals = values - height - slope * (log_loads - centre)
    error = math.sqrt(residuals @ residuals / (len(values) - 2) / len(values)) / slope
    at = math.exp(centre - height / slope)
    return at, at * error


def search_settings(case: Case, seed: int) -> CapacitySettings:
    """Started anywhere from a third to three times the capacity."""
    rate = case.capacity if case.quantity is Quantity.RATE else RATE_OF_USERS
    start = case.capacity * math.exp(np.random.default_rng(seed).uniform(-1.1, 1.1))
    return CapacitySettings(
        quantity=case.quantity,
        start_load=start if case.quantity is Quantity.RATE else round(start),
        min_load=case.capacity / 20 if case.quantity is Quantity.RATE else 1,
        budget_s=SEARCH_REQUESTS / rate,
        settle_s=200 / rate,
    )


def show_truth(cases: Sequence[Case]) -> None:
    for case in cases:
        root, error = truth(case)
        print(f"| {case.name} | {root:.3f} | {error:.3f} |", flush=True)


def show_search(cases: Sequence[Case]) -> None:
    for case in cases:
        found = []
        for seed in range(RUNS):
            search = run_search(case, search_settings(case, seed), seed)
            found.append((search.result(), search))
            if VERBOSE:
                result = found[-1][0]
                print(result.status, result.load, result.low, result.high, result.why)
                for p in search.probes:
                    print("    ", p.load, p.requests, [sum(s.beyond) for s in p.slos], p.overloaded)
        print(_row(case, found), flush=True)


def _row(case: Case, found: Sequence[tuple[Capacity, CapacitySearch]]) -> str:
    errors = np.array([result.load / case.capacity - 1 for result, _ in found if result.load is not None])
    covered = [
        result.low <= case.capacity <= result.high
        for result, _ in found
        if result.low is not None and result.high is not None
    ]
    widths = [(r.high - r.low) / r.load for r, _ in found if r.load and r.low and r.high]
    probes = [len(search.probes) for _, search in found]
    minutes = [sum(probe.elapsed_s for probe in search.probes) / 60 for _, search in found]
    requests = [sum(probe.requests for probe in search.probes) for _, search in found]
    return (
        f"| {case.name} | {case.capacity:g} | {len(errors)}/{len(found)} | {100 * errors.mean():+.1f} % "
        f"| {100 * errors.std():.1f} % | {100 * np.abs(errors).max():.1f} % | {sum(np.abs(errors) < 0.05)} "
        f"| {sum(covered)} | {100 * np.median(widths):.1f} % | {np.mean(probes):.1f} | {max(probes)} "
        f"| {np.mean(requests):,.0f} | {np.mean(minutes):.0f} |"
    )


def saturation_rps(case: Case) -> float:
    """What the server completes when it is flooded."""
    target = OfflineTarget(case, 1, detect=False)
    flood = Probe(
        load=2 * case.capacity,
        settle_s=600 / case.capacity,
        window_s=2000 / case.capacity,
        empty_first=False,
        why="flood",
    )
    completed = target.probe(flood).completed_rps
    assert completed is not None
    return completed


def arrivals_until_overload(case: Case, rate_rps: float, requests: int, seed: int) -> int | None:
    """Of a probe of so many requests; None where it ran to its end."""
    target = OfflineTarget(case, seed)
    probe = Probe(
        load=rate_rps, settle_s=200 / rate_rps, window_s=requests / rate_rps, empty_first=False, why="overload"
    )
    result = target.probe(probe)
    return None if result.overloaded is None else result.requests


def show_overload(cases: Sequence[Case]) -> None:
    for case in cases:
        if case.quantity is Quantity.USERS:
            continue
        saturation = saturation_rps(case)
        for share in OVERLOAD_SHARES:
            fired = [
                arrivals_until_overload(case, share * saturation, OVERLOAD_REQUESTS, seed)
                for seed in range(OVERLOAD_RUNS)
            ]
            arrivals = [one for one in fired if one is not None]
            middle, most = (f"{np.median(arrivals):,.0f}", f"{max(arrivals):,}") if arrivals else ("", "")
            print(
                f"| {case.name} | {saturation:.1f} | {100 * share:.0f} % | {len(arrivals)}/{len(fired)} "
                f"| {middle} | {most} |",
                flush=True,
            )


COMMANDS: dict[str, Callable[[Sequence[Case]], None]] = {
    "truth": show_truth,
    "search": show_search,
    "overload": show_overload,
}

if __name__ == "__main__":
    wanted = [word for word in sys.argv[2:] if word != "-v"]
    VERBOSE = "-v" in sys.argv
    COMMANDS[sys.argv[1]]([case for case in CASES if not wanted or any(word in case.name for word in wanted)])
