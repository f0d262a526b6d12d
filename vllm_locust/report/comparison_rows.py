"""The cells of a comparison's tables, and its lines in words, for the text and the Markdown page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from vllm_locust.report import figures

Json = Mapping[str, Any]

HEADINGS: Final = ("base", "new", "difference", "change", "95 % interval", "verdict")
SCALING_HEADINGS: Final = (
    "runs", "output tok/s", "each", "speed-up", "efficiency", "TPOT p50", "GPU busy", "SM busy", "NVLink", "PCIe",
)  # fmt: skip


def cells(row: Json) -> tuple[str, ...]:
    """Under ``HEADINGS``."""
    show = figures.time if row["unit"] == "s" else figures.share if row["unit"] == "1" else figures.rate
    base, new = (figures.BEYOND if side in row["beyond"] else show(row[side]) for side in ("base", "new"))
    difference = figures.UNKNOWN if row["difference"] is None else _signed(row["difference"], row["unit"], show)
    change = figures.UNKNOWN if row["change"] is None else _percent(row["change"])
    return base, new, difference, change, _interval(row), row.get("mark") or row["status"]


def _signed(value: float, unit: str, show: Callable[[float], str]) -> str:
    if unit == "1":
        return f"{_hundredths(value, 2)} points"
    return f"{'+' if value >= 0 else '−'}{show(abs(value))}"


def _percent(value: float) -> str:
    return f"{_hundredths(value, 1)} %"


def _hundredths(value: float, digits: int) -> str:
    return f"{'+' if value >= 0 else '−'}{abs(value) * 100:.{digits}f}"


def _interval(row: Json) -> str:
    """Of the change; of a fraction, of the difference."""
    points = row["unit"] == "1"
    bounds = row["difference_ci95"] if points else row["change_ci95"]
    if bounds == [None, None]:
        return figures.UNKNOWN
    low, high = (None if bound is None else _hundredths(bound, 2 if points else 1) for bound in bounds)
    lowest, highest = ("−100", "+100") if points else ("−100", "∞")
    return f"{low or lowest} … {high or highest} {'points' if points else '%'}"


def gate_sentence(gate: Json) -> str:
    base, new, difference, change, interval, _ = cells(gate)
    if gate["undecided"] is not None:
        return f"{gate['fail_if']}, stage {gate['stage']}: {gate['undecided']}"
    p = gate["p_worse"]
    chance = "one-sided p < 0.0001" if p < 0.0001 else f"one-sided p = {p:.4f}"
    return (
        f"{gate['fail_if']}, stage {gate['stage']}: {base} → {new} ({difference}, {change}; 95 % interval {interval}; "
        f"{chance})"
    )


def heading(result: Json, comparison: Json) -> str:
    sides = (_side(side) for side in (comparison["new"], result["base"]))
    return " against ".join(sides)


def _side(side: Json) -> str:
    runs = side["runs"]
    more = f" ({len(runs)} runs)" if len(runs) > 1 else ""
    return f"{side['label']}{more}"


def notes(comparison: Json) -> Iterator[str]:
    """What must be known to read the numbers."""
    if comparison["differing"]:
        said = "; ".join(one["text"] for one in comparison["differing"])
        yield f"settings that differ: {said}"
    else:
        yield "no setting differs"
    yield from comparison["remarks"]


def scaling_cells(point: Json) -> tuple[str, ...]:
    """Under ``SCALING_HEADINGS``."""
    traffic = (
        figures.UNKNOWN if point[name] is None else f"{figures.size(point[name])}/s"
        for name in ("nvlink_bytes_per_s", "pcie_bytes_per_s")
    )
    return (
        str(len(point["runs"])),
        figures.rate(point["output_tokens_per_s"]),
        figures.rate(point["output_tokens_per_s_each"]),
        f"{point['speed_up']:.2f}×",
        f"{point['efficiency'] * 100:.0f} %",
        _between(point["tpot_p50_s"]),
        figures.share(point["gpu_utilization"]),
        figures.share(point["sm_activity"]),
        *traffic,
    )


def _between(bounds_s: Sequence[float] | None) -> str:
    if bounds_s is None:
        return figures.UNKNOWN
    return " … ".join(dict.fromkeys(figures.time(bound) for bound in bounds_s))


def scaling_remarks(scaling: Json) -> Iterator[str]:
    for point in scaling["points"]:
        for remark in point["remarks"]:
            yield f"{scaling['tag']}={point['size']}: {remark}"


def words_of_method(comparisons: Sequence[Json]) -> str:
    paired = any(one["paired"] for one in comparisons)
    return (
        "A percentile counts a failed request as slower than everything; a mean is of ok requests. better and worse: "
        "5 % is the chance that any of a table's marks is there by chance (Holm)."
        + (" Requests of the same arrival are compared with each other." if paired else "")
    )
