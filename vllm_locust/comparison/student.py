"""The upper tail of Student's t distribution, by the continued fraction of the incomplete beta function.

DLMF 8.17.22, evaluated with Lentz's method (Press et al., Numerical Recipes, 6.4); relative error below 1e-10.
"""

from __future__ import annotations

import math
from typing import Final

_TINY: Final = 1e-300
_EXACT: Final = 1e-12
_MOST_STEPS: Final = 500


def upper_tail(t: float, degrees: float) -> float:
    """P(T >= t). ``degrees`` of freedom need not be whole; ``t`` may be infinite."""
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    tail = 0.5 * _incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5)
    return tail if t >= 0 else 1.0 - tail


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularised, I_x(a, b)."""
    if x <= 0.0 or x >= 1.0:
        return min(max(x, 0.0), 1.0)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(x, a, b) / a
    return 1.0 - front * _fraction(1.0 - x, b, a) / b


def _fraction(x: float, a: float, b: float) -> float:
    c, d = 1.0, 1.0 / _away_from_zero(1.0 - (a + b) * x / (a + 1.0))
    value = d
    for m in range(1, _MOST_STEPS):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / _away_from_zero(1.0 + numerator * d)
            c = _away_from_zero(1.0 + numerator / c)
            value *= c * d
        if abs(c * d - 1.0) < _EXACT:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
