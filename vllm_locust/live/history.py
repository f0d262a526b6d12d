"""The points of a chart, of which there are never more than a limit: old ones are thinned out evenly."""

from __future__ import annotations

from typing import Any, Final

LIMIT: Final = 3600


class History:
    """Points are numbered from 1. While they are fewer than the limit all are kept, then every second, fourth …"""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._points: list[dict[str, Any]] = []
        self._offered = 0
        self.step = 1
        """Of the points offered, one in so many is kept."""

    def add(self, point: dict[str, Any]) -> dict[str, Any]:
        """The point with its number ``n``."""
        self._offered += 1
        numbered = {"n": self._offered, **point}
        if (self._offered - 1) % self.step == 0:
            self._points.append(numbered)
            if len(self._points) > self._limit:
                self._points = self._points[::2]
                self.step *= 2
        return numbered

    def after(self, n: int, at_most: int) -> list[dict[str, Any]]:
        """The points with a higher number; where those are too many, evenly taken ones, the last among them."""
        first = next((at for at, point in enumerate(self._points) if point["n"] > n), len(self._points))
        points = self._points[first:]
        stride = -(-len(points) // at_most) if points else 1
        return points[::-1][::stride][::-1]
