import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_locust.capacity.model import (
    CapacityPosterior,
    Observation,
    _log_beta_binomial,
    _log_gamma,
    batch_scatter,
    capacity_posterior,
    root_posterior,
)
from vllm_locust.capacity.probe import ProbeResult, SloCount

SLO = "p99(ttft)<=1s"


def evenly(total: int, parts: int = 10) -> tuple[int, ...]:
    return tuple(total * (i + 1) // parts - total * i // parts for i in range(parts))


def probe(load: float, beyond: int, samples: int, overloaded: str | None = None, slo: str = SLO) -> ProbeResult:
    counted = SloCount(slo=slo, allowed=0.01, beyond=evenly(beyond), samples=evenly(samples))
    return ProbeResult(
        load=load,
        achieved=load,
        window_s=60,
        elapsed_s=70,
        requests=samples,
        completed_rps=load,
        latency_s=None,
        slos=(counted,),
        overloaded=overloaded,
    )


@given(st.floats(1e-9, 1e7))
@settings(max_examples=100)
def test_log_gamma(x: float) -> None:
    assert _log_gamma(np.array(x)) == pytest.approx(math.lgamma(x), rel=1e-7, abs=1e-7)


@pytest.mark.parametrize(("samples", "share", "inflation"), [(30, 0.1, 4.0), (12, 0.5, 1.3), (5, 0.01, 2.5)])
def test_counts_have_the_mean_and_the_inflated_variance(samples: int, share: float, inflation: float) -> None:
    counts = np.arange(samples + 1)
    logs = [
        math.log(math.comb(samples, k)) + float(_log_beta_binomial(k, samples, np.array(share), np.array(inflation)))
        for k in range(samples + 1)
    ]
    masses = np.exp(logs)
    assert masses.sum() == pytest.approx(1, rel=1e-6)
    mean = float(masses @ counts)
    assert mean == pytest.approx(samples * share, rel=1e-6)
    assert float(masses @ (counts - mean) ** 2) == pytest.approx(samples * share * (1 - share) * inflation, rel=1e-6)


def test_the_scatter_of_batches() -> None:
    rng = np.random.default_rng(0)
    alone = Observation(0, tuple(rng.binomial(1000, 0.1, 200).tolist()), (1000,) * 200)
    assert batch_scatter(alone) == pytest.approx(1, abs=0.25)
    crowds = Observation(0, tuple((20 * rng.poisson(5, 200)).tolist()), (1000,) * 200)
    assert batch_scatter(crowds) == pytest.approx(20 / 0.9, rel=0.25)
    assert batch_scatter(Observation(0, (4, 0), (1000, 1000))) is None


def spread(posterior: CapacityPosterior) -> float:
    return math.log(posterior.quantile(0.975) / posterior.quantile(0.025))


def test_what_holds_and_what_misses_enclose_the_capacity() -> None:
    known = capacity_posterior([probe(10, 0, 3000), probe(20, 2000, 3000)])
    assert 10 < known.quantile(0.025) < known.quantile(0.975) < 20
    assert known.limiting_slo == SLO
    nearer = capacity_posterior([probe(10, 0, 3000), probe(20, 2000, 3000), probe(14, 5, 3000), probe(15, 90, 3000)])
    assert spread(nearer) < 0.5 * spread(known)


def test_more_requests_say_more() -> None:
    widths = [spread(capacity_posterior([probe(9, n // 200, n), probe(11, n // 40, n)])) for n in (400, 4_000, 40_000)]
    assert all(later < earlier for earlier, later in pairwise(widths))


def test_crowds_make_a_probe_say_less() -> None:
    def counted(batches: tuple[int, ...]) -> Observation:
        return Observation(math.log(10), batches, (400,) * 10)

    def width(one: Observation) -> float:
        posterior = root_posterior([one], 0.01, 1.0, 4.0)
        return float(np.diff(np.interp([0.025, 0.975], np.cumsum(posterior.weights), posterior.log_loads))[0])

    assert width(counted((40, *(0,) * 9))) > 1.3 * width(counted((4,) * 10))


def test_the_lowest_root_is_the_capacity() -> None:
    loose = [probe(load, 0, 5000, slo="p99(e2e)<=9s") for load in (10, 14)]
    tight = [probe(10, 10, 5000), probe(14, 500, 5000)]
    both = [
        ProbeResult.from_json({**a.to_json(), "slos": [*a.to_json()["slos"], *b.to_json()["slos"]]})
        for a, b in zip(loose, tight, strict=True)
    ]
    known, alone = capacity_posterior(both), capacity_posterior(tight)
    assert known.limiting_slo == SLO
    assert known.quantile(0.5) == pytest.approx(alone.quantile(0.5), rel=0.01)


def test_a_load_that_floods_the_server_is_above_the_capacity() -> None:
    known = capacity_posterior([probe(10, 0, 3000), probe(12, 0, 300, overloaded="queue grows")])
    assert known.quantile(0.95) <= 12.01
    assert 0 < known.probability_above(12.5) < 0.05
    assert capacity_posterior([probe(10, 0, 3000), probe(12, 0, 300)]).quantile(0.97) > 15
