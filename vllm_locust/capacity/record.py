"""``capacity.json``: a capacity search as it stands in its run's directory, so that it can be gone on with.

``probes`` are as judged while they ran, from histograms; ``judged`` and ``result`` are written by the merge, from every
request. What must be the same for a probe to count in another run is in ``terms``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Self

from vllm_locust.capacity.probe import ProbeResult
from vllm_locust.capacity.search import CapacitySearch, CapacitySettings
from vllm_locust.json_fields import SHOWN, JsonFields
from vllm_locust.load_profile import Quantity

SCHEMA: Final = 1
_WORDS: Final = {
    "model": "the model",
    "slos": "the SLOs",
    "workload": "the workload",
    "quantity": "what is searched for",
    "arrival": "the arrivals",
    "answers": "the answers' lengths",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedProbe:
    """``stage`` is None for a probe of an earlier run."""

    run_id: str
    stage: int | None
    result: ProbeResult
    left_out: str | None = None
    """Why it does not count."""

    def to_json(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "stage": self.stage, "left_out": self.left_out, **self.result.to_json()}

    @classmethod
    def from_json(cls, row: object, path: str = "") -> Self:
        """Raises ValueError, naming the field, for anything that ``to_json`` cannot have made."""
        given, own = JsonFields.of(row, path), ("run_id", "stage", "left_out")
        return cls(
            run_id=given.text("run_id"),
            stage=given.count_or_none("stage"),
            left_out=given.text_or_none("left_out"),
            result=ProbeResult.from_json({k: v for k, v in given.content.items() if k not in own}, path),
        )


@dataclass(slots=True, kw_only=True)
class SearchRecord:
    run_id: str
    settings: CapacitySettings
    terms: Mapping[str, Any]
    probes: list[RecordedProbe] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a reader of the result must know, in sentences."""
    ended: str | None = None
    """Why the search was given up, in a sentence."""

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "run_id": self.run_id,
            "settings": asdict(self.settings),
            "terms": dict(self.terms),
            "probes": [probe.to_json() for probe in self.probes],
            "notes": list(self.notes),
            "ended": self.ended,
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Raises ValueError, naming the field, for anything that ``to_json`` cannot have made. What the merge has
        added is not looked at.
        """
        given = JsonFields.of(data)
        if given.count("schema") != SCHEMA:
            raise ValueError(f"its schema is {given.value('schema')}, and this version reads {SCHEMA}")
        return cls(
            run_id=given.text("run_id"),
            settings=_settings(given.mapping("settings", keys=(item.name for item in fields(CapacitySettings)))),
            terms=given.mapping("terms").content,
            probes=_probes(given, "probes"),
            notes=given.texts("notes"),
            ended=given.text_or_none("ended"),
        )


def _settings(given: JsonFields) -> CapacitySettings:
    quantity = given.text("quantity")
    if quantity not in list(Quantity):
        raise ValueError(f"{given.name('quantity')} is {quantity[:SHOWN]!r}, not one of {', '.join(Quantity)}")
    return CapacitySettings(
        quantity=Quantity(quantity),
        start_load=given.number("start_load"),
        min_load=given.number("min_load"),
        max_load=given.number_or_none("max_load"),
        precision=given.number("precision"),
        max_probes=given.count("max_probes"),
        budget_s=given.number("budget_s"),
        probe_s=given.number_or_none("probe_s"),
        min_requests=given.count("min_requests"),
        settle_s=given.number("settle_s"),
    )


def _probes(given: JsonFields, key: str) -> list[RecordedProbe]:
    return [RecordedProbe.from_json(row, f"{given.name(key)}[{i}]") for i, row in enumerate(given.items(key))]


def judged_probes(data: object) -> list[RecordedProbe]:
    """As the merge has judged them; none before it. Raises ValueError as ``SearchRecord.from_json`` does."""
    given = JsonFields.of(data)
    return _probes(given, "judged") if "judged" in given.content else []


def search_of(settings: CapacitySettings, probes: Sequence[RecordedProbe]) -> CapacitySearch:
    """The search with the probes that count; the others have cost it a probe and their time."""
    return CapacitySearch(
        settings,
        [probe.result for probe in probes if probe.left_out is None],
        lost_s=[probe.result.elapsed_s for probe in probes if probe.left_out is not None],
    )


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """In which terms two searches differ, in words."""
    return [
        f"{_WORDS.get(name, name)}: {json.dumps(old.get(name))} there, {json.dumps(new[name])} here"
        for name in new
        if old.get(name) != new[name]
    ]


def final_json(record: Mapping[str, Any], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """``capacity.json`` with what came of the search by every request: ``numbers`` are those of ``summary.json``."""
    result = {name: value for name, value in numbers.items() if name not in ("probes", "settings")}
    found = ("held", "overload")
    judged = [{name: value for name, value in probe.items() if name not in found} for probe in numbers["probes"]]
    return {**record, "judged": judged, "result": result}
