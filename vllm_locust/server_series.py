"""The names in ``server.parquet``: of series that belong to a page as a whole, and how a label is part of a name.

``up`` is 1 with each page that was read and 0 where it could not be; while it is 0 there are no other rows.
"""

from __future__ import annotations

from typing import Final

UP: Final = "up"
SCRAPE_DURATION: Final = "scrape_duration_seconds"
PROCESS_START: Final = "process_start_time_seconds"
"""Told by most servers, in the way of Prometheus' own libraries: that of the front end."""


def labelled(metric: str, label: str, value: str) -> str:
    """``request_success_total{finished_reason="stop"}``."""
    return f'{metric}{{{label}="{value}"}}'


def split_label(name: str) -> tuple[str, str | None]:
    """The metric, and the value of its label where it has one."""
    metric, brace, label = name.partition("{")
    return metric, label.partition('"')[2].removesuffix('"}') if brace else None
