"""The numbers that two runs are compared by, as people write them: ``p99(ttft)``, ``mean(tpot)``, ``goodput_rps``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from vllm_locust.metrics import CATALOGUE, Better
from vllm_locust.statistics import PERCENTILES

MEAN: Final = "mean"
DISTRIBUTIONS: Final = ("ttft", "ttft_from_schedule", "tpot", "itl", "chunk_gap", "e2e")
POOLED: Final = ("itl", "chunk_gap")
"""Of them, those with many samples for each request."""
FRACTIONS: Final = ("good_fraction", "failed_fraction")
RATES: Final = ("requests_per_s", "output_tokens_per_s", "goodput_rps")
SCALARS: Final = (*RATES, *FRACTIONS)
_FUNCTION = re.compile(r"(?P<function>[a-z0-9._]+)\((?P<metric>\w+)\)")


@dataclass(frozen=True, slots=True)
class Quantity:
    """``statistic`` is ``mean`` or a percentile's key; None for a number that a stage has one of."""

    metric: str
    statistic: str | None

    @classmethod
    def parse(cls, text: str) -> Quantity:
        """Raises ValueError with the reason and the fix."""
        match = _FUNCTION.fullmatch(text)
        if match is None:
            if text in SCALARS:
                return cls(text, None)
            if text in DISTRIBUTIONS:
                raise ValueError(f"which number of {text}? write for example p99({text})")
            raise ValueError(f"there is no {text!r}; use p99(METRIC), mean(METRIC) or one of {', '.join(SCALARS)}")
        statistic, metric = match["function"].replace(".", "_"), match["metric"]
        if metric not in DISTRIBUTIONS:
            raise ValueError(f"there is no metric {metric!r}; use one of {', '.join(DISTRIBUTIONS)}")
        if statistic != MEAN and statistic not in PERCENTILES:
            known = ", ".join(name.replace("_", ".") for name in (MEAN, *PERCENTILES))
            raise ValueError(f"{match['function']!r} is no number of the report; use one of {known}")
        return cls(metric, statistic)

    @property
    def text(self) -> str:
        return self.metric if self.statistic is None else f"{self.statistic.replace('_', '.')}({self.metric})"

    @property
    def unit(self) -> str:
        return CATALOGUE[self.metric].unit

    @property
    def higher_is_better(self) -> bool:
        return CATALOGUE[self.metric].better is Better.HIGHER

    @property
    def is_fraction(self) -> bool:
        return self.metric in FRACTIONS

    @property
    def is_percentile(self) -> bool:
        return self.statistic is not None and self.statistic != MEAN


TABLE: Final = (
    *(Quantity(metric, statistic) for metric in DISTRIBUTIONS for statistic in (MEAN, "p50", "p90", "p99")),
    *(Quantity(name, None) for name in SCALARS),
)
"""What is compared of each stage."""
