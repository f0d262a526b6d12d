"""A probe of the capacity search: a load held for a while, and what it says of each SLO.

Every SLO that can bound the load is one of shares: of the samples in a probe, at most so many may lie beyond a limit.
``p99(ttft)<=2s`` allows 1 % above 2 s, ``good_fraction>=0.99`` 1 % that is not good. A share of a short probe is
unbiased, while a high percentile of one is biased low, since the rare crowds that make it are missing in most short
probes. The counts are kept by batches in order of time, so that the crowding can be seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from vllm_locust.json_fields import JsonFields
from vllm_locust.slo import Slo, SloKind
from vllm_locust.statistics import PERCENTILES

BATCHES: Final = 10
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What to try next: ``load`` for ``settle_s``, which is not judged, and then for ``window_s``, which is.
    ``empty_first``: the load before was too much, and its queue would be counted against this one; send nothing until
    the server has finished what it has.
    """

    load: float
    settle_s: float
    window_s: float
    empty_first: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SloCount:
    """How many samples of a probe lay beyond an SLO's limit, by batches in order of time."""

    slo: str
    allowed: float
    """The largest share that may lie beyond."""
    beyond: tuple[int, ...]
    samples: tuple[int, ...]
    value: float | None = None
    """For the table: in seconds or the metric's unit; None where a percentile falls on a failed request."""
    limit: float | None = None

    @property
    def share(self) -> float:
        return sum(self.beyond) / sum(self.samples)

    @property
    def met(self) -> bool | None:
        """None: there was nothing to judge."""
        if not sum(self.samples):
            return None
        return sum(self.beyond) <= self.allowed * sum(self.samples) + _ROUNDING

    @classmethod
    def from_json(cls, row: object, path: str = "") -> Self:
        """Raises ValueError, naming the field, for what is no such count."""
        given = JsonFields.of(row, path, keys=(item.name for item in fields(cls)))
        allowed = given.number("allowed", above=0)
        beyond, samples = given.counts("beyond"), given.counts("samples")
        if allowed >= 1:
            raise ValueError(f"{given.name('allowed')} is {allowed:g}; it must be below 1")
        if len(beyond) != len(samples) or any(one > of for one, of in zip(beyond, samples, strict=True)):
            raise ValueError(
                f"{given.name('beyond')} does not fit samples: as many parts, none larger than its samples"
            )
        return cls(
            slo=given.text("slo"),
            allowed=allowed,
            beyond=beyond,
            samples=samples,
            value=given.number_or_none("value"),
            limit=given.number_or_none("limit"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    load: float
    achieved: float
    """Requests per second really sent, or users really there."""
    window_s: float
    """The part that was judged, shorter than asked for where it ended early."""
    elapsed_s: float
    """All the time that the probe took, settling before and emptying after it included."""
    requests: int
    completed_rps: float | None
    """Requests that ended within the window, per second."""
    latency_s: float | None
    """Median E2E, for the knee."""
    slos: tuple[SloCount, ...]
    overloaded: str | None = None
    """Why the load was more than the server could take."""
    ended_early: str | None = None
    figures: Mapping[str, float | None] = field(default_factory=dict)
    """What else the table of probes shows, by name."""

    @property
    def held(self) -> bool | None:
        """Whether every SLO was met; None where nothing decided it."""
        if self.overloaded is not None:
            return False
        verdicts = [slo.met for slo in self.slos]
        if False in verdicts:
            return False
        return True if True in verdicts else None

    def to_json(self) -> dict[str, Any]:
        row = {item.name: getattr(self, item.name) for item in fields(self)}
        slos = [{item.name: getattr(slo, item.name) for item in fields(slo)} for slo in self.slos]
        for slo in slos:
            slo |= {"beyond": list(slo["beyond"]), "samples": list(slo["samples"])}
        return row | {"slos": slos, "figures": dict(self.figures)}

    @classmethod
    def from_json(cls, row: object, path: str = "") -> Self:
        """Raises ValueError, naming the field, for anything that ``to_json`` cannot have made."""
        given = JsonFields.of(row, path, keys=(item.name for item in fields(cls)))
        figures = given.mapping("figures")
        return cls(
            load=given.number("load", above=0),
            achieved=given.number("achieved", least=0),
            window_s=given.number("window_s", above=0),
            elapsed_s=given.number("elapsed_s", least=0),
            requests=given.count("requests"),
            completed_rps=given.number_or_none("completed_rps", least=0),
            latency_s=given.number_or_none("latency_s", least=0),
            slos=tuple(
                SloCount.from_json(slo, f"{given.name('slos')}[{i}]") for i, slo in enumerate(given.items("slos"))
            ),
            overloaded=given.text_or_none("overloaded"),
            ended_early=given.text_or_none("ended_early"),
            figures={name: figures.number_or_none(name) for name in figures.content},
        )


def allowed_share(slo: Slo) -> float:
    """The share of samples that may lie beyond the limit of a per-stage SLO.

    Raises ValueError with the fix for one that bounds no load from above, or that no finite probe can show.
    """
    if slo.kind is not SloKind.STAGE:
        raise ValueError(
            f"SLO {slo.text!r}: it judges single requests; say how many must be good, for example "
            "--slo 'good_fraction>=0.99'"
        )
    if slo.percentile is not None:
        return float(1 - PERCENTILES[slo.percentile])
    if slo.metric not in ("good_fraction", "failed_fraction"):
        raise ValueError(
            f"SLO {slo.text!r}: it does not say from which load on the server is too slow; use percentiles, "
            "good_fraction or failed_fraction"
        )
    allowed = 1 - slo.limit if slo.at_least else slo.limit
    if not 0 < allowed < 1:
        raise ValueError(
            f"SLO {slo.text!r}: it allows {'everything' if allowed else 'no exception'}, which no probe can judge; "
            "write for example good_fraction>=0.999"
        )
    return allowed


def count_slo(
    slo: Slo,
    beyond: npt.NDArray[Any],
    samples: npt.NDArray[np.int64] | None = None,
    *,
    value: float | None = None,
) -> SloCount:
    """``beyond[i]``: whether request i, in order of time, lies beyond the limit; where one request has several samples
    (gaps), how many of its ``samples[i]`` do.
    """
    each = np.ones(len(beyond), dtype=np.int64) if samples is None else samples
    return SloCount(
        slo=slo.text,
        allowed=allowed_share(slo),
        beyond=_batch_sums(beyond),
        samples=_batch_sums(each),
        value=value,
        limit=slo.limit / 1e9 if slo.is_duration else slo.limit,
    )


def _batch_sums(values: npt.NDArray[Any]) -> tuple[int, ...]:
    return tuple(int(part.sum()) for part in np.array_split(values, BATCHES))


def by_slo(results: Sequence[ProbeResult]) -> dict[str, list[tuple[ProbeResult, SloCount]]]:
    """The probes that have samples for each SLO."""
    found: dict[str, list[tuple[ProbeResult, SloCount]]] = {}
    for result in results:
        for slo in result.slos:
            if sum(slo.samples):
                found.setdefault(slo.slo, []).append((result, slo))
    return found
