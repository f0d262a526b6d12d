"""``--fail-if``: when a difference is a regression.

``p99(ttft) +5%`` fails where both hold:

1. there is evidence that NEW is worse at all: the one-sided test of "no worse" rejects at 5 % (with several stages:
   by Holm's rule over them, so that 5 % is the chance of a false alarm in any);
2. the change that was measured is beyond the limit.

Where the two sides are the same, a limit fails at most 5 % of the time, whatever its size. Where NEW is worse by more
than the limit, it fails as often as the samples allow for. A change of just the limit's size fails half of the time:
the limit says which size matters, and the test whether there is a change at all. Each limit is a test of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from vllm_locust.comparison.difference import Difference
from vllm_locust.comparison.quantity import Quantity
from vllm_locust.duration import UNIT_NS

_EXPRESSION = re.compile(r"(?P<quantity>[^+\-−]+)(?P<sign>[+\-−])(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>[a-zµ%]*)")
_NS_PER_UNIT: Final = {**UNIT_NS, "µs": UNIT_NS["us"]}


@dataclass(frozen=True, slots=True)
class Limit:
    """``size`` is at least 0: of the change where ``relative``, else of the difference in the quantity's unit."""

    text: str
    quantity: Quantity
    size: float
    relative: bool

    @classmethod
    def parse(cls, text: str) -> Limit:
        """Raises ValueError with a sentence that names the text, the reason and the fix."""
        match = _EXPRESSION.fullmatch(re.sub(r"\s+", "", text))
        if match is None:
            raise ValueError(f"{text!r} is not QUANTITY +SIZE; write for example 'p99(ttft) +5%'")
        try:
            quantity = Quantity.parse(match["quantity"])
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from error
        bad = "-" if quantity.higher_is_better else "+"
        if match["sign"].replace("−", "-") != bad:
            way = "lower" if quantity.higher_is_better else "higher"
            raise ValueError(f"{text!r}: {quantity.text} is worse when it is {way}; write {bad}{match['number']}")
        number, unit = float(match["number"]), match["unit"]
        if unit == "%":
            return cls(text, quantity, number / 100, relative=True)
        if quantity.unit != "s":
            if unit:
                raise ValueError(f"{text!r}: {quantity.text} has no unit {unit!r}; write a plain number or %")
            return cls(text, quantity, number, relative=False)
        if unit not in _NS_PER_UNIT or not unit:
            raise ValueError(f"{text!r}: {unit!r} is no unit of time; write for example +5% or +10ms")
        return cls(text, quantity, number * _NS_PER_UNIT[unit] / 1e9, relative=False)

    def is_beyond(self, difference: Difference) -> bool:
        """Whether the change that was measured is worse by more than the limit."""
        measured = difference.change if self.relative else difference.difference
        if measured is None:
            # BASE's percentile falls on a failed request and NEW's does not.
            return False
        return (-measured if self.quantity.higher_is_better else measured) > self.size
