"""What the start form asks for: which of its fields may say what, and what they come to.

Locust's own handler takes whatever a request names. Here only what the form shows is heard, and no text of it becomes
a path: workloads and shapes are those that are shipped, or the one that the command line names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm_locust.arrival import ArrivalProcess
from vllm_locust.errors import UsageError
from vllm_locust.protocol import Api
from vllm_locust.run.flags import WEB_LISTS, WEB_OPTIONS, web_texts
from vllm_locust.shipped import shipped_directory

LOCUST_FIELDS: Final = frozenset(
    {"user_count", "spawn_rate", "host", "run_time", "user_classes", "shape_class", "profile"}
)
UNLIMITED: Final = "none"
"""A run time of the form: until the run is stopped, whatever the command line says."""
_TIMED: Final = ("rate_stages", "user_stages", "shape")
"""Loads with a length of their own: the command line's run time is not meant for them."""
_CHANGED: Final = ("user_count", "spawn_rate")
"""What may be changed while a run goes on."""
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "api": tuple(map(str, Api)),
    "arrival": ("", *map(str, ArrivalProcess)),
    "when_full": ("queue", "drop"),
}


@dataclass(frozen=True, slots=True)
class StartOrder:
    options: Mapping[str, Any]
    host: str | None
    run_time_s: float | None
    user_classes: Sequence[type[Any]]


class StartForm:
    """``given`` are the options as the command line set them."""

    def __init__(
        self,
        environment: Any,
        given: Mapping[str, Any],
        own_fields: frozenset[str],
        parse_time_s: Callable[[str], float],
    ) -> None:
        """``own_fields``: options of the locustfile that Locust's form shows. ``parse_time_s``: how Locust reads a run
        time; raises ValueError.
        """
        self._parse_time_s = parse_time_s
        self._environment = environment
        self._given = given
        self._heard = LOCUST_FIELDS | WEB_OPTIONS | own_fields

    @property
    def given_run_time_s(self) -> float | None:
        """On the command line."""
        return self._given.get("run_time")

    def options(self, now: Mapping[str, Any]) -> dict[str, Any]:
        """All options, those of the form as ``now`` has them. Raises UsageError for a path."""
        options = dict(self._given) | {name: now.get(name) for name in WEB_OPTIONS}
        for name in WEB_LISTS:
            options[name] = [part for text in now.get(name) or () for part in _split(str(text))]
        shipped = {"workload": {name: name for name in _shipped("*.yaml")}, "shape": _shipped("shapes/*.yaml")}
        problems = []
        for name, values in shipped.items():
            value = options[name]
            if value not in (None, "", self._given.get(name), *values):
                problems.append(
                    f"--{name}: {str(value)[:80]!r} is not one of {', '.join(values)}; the start form opens no other "
                    f"file: name it when Locust is started, with --{name}"
                )
            options[name] = values.get(value, value)
        if problems:
            raise UsageError(*problems)
        return options

    def read(self, form: Mapping[str, Sequence[str]], *, run_time_s: float | None, host: str | None) -> StartOrder:
        """``form``: each field's values. ``run_time_s`` and ``host`` hold where it does not say. Raises UsageError."""
        self._refuse_unknown(form)
        last = {name: values[-1] for name, values in form.items() if values}
        problems = _number_problems(last)
        text = last.get("run_time")
        if text == UNLIMITED or (not text and any(last.get(name) for name in _TIMED)):
            run_time_s = None
        elif text:
            try:
                run_time_s = float(self._parse_time_s(text))
            except (ValueError, OverflowError):
                problems.append(f"run time: {text[:40]!r} is not a time; write 60, 60s, 3m or 1h30m")
        now = dict(vars(self._environment.parsed_options))
        now |= {name: last[name] for name in WEB_OPTIONS & set(last)}
        now |= {name: list(form[name]) for name in WEB_LISTS & set(form)}
        try:
            options = self.options(now)
        except UsageError as error:
            raise UsageError(*problems, *error.problems) from None
        problems += self._class_problems(form.get("user_classes", ()))
        if problems:
            raise UsageError(*problems)
        if "host" in last:
            host = last["host"].replace("<", "").replace(">", "") or None
        return StartOrder(options, host, run_time_s, self._classes(form.get("user_classes", ())))

    def read_change(self, form: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """``user_count`` and ``spawn_rate`` for a run that goes on, which keeps the rest: Locust's own form sends that
        too, as it is. Raises UsageError where it says anything else.
        """
        self._refuse_unknown(form)
        last = {name: values[-1] for name, values in form.items() if values}
        problems = _number_problems(last)
        now = vars(self._environment.parsed_options) | {
            "user_classes": sorted(cls.__name__ for cls in self._environment.user_classes)
        }
        problems += [
            f"{name[:40]}: the run that goes on keeps what it was started with; stop it, then start another"
            for name in sorted(set(last) - set(_CHANGED))
            if not _says(form[name], now.get(name))
        ]
        if problems:
            raise UsageError(*problems)
        return {name: last[name] for name in _CHANGED}

    def _refuse_unknown(self, form: Mapping[str, Sequence[str]]) -> None:
        if unknown := sorted(set(form) - self._heard):
            raise UsageError(
                f"{', '.join(name[:40] for name in unknown[:10])}: the start form cannot set that; give it when Locust "
                "is started"
            )

    def _class_problems(self, names: Sequence[str]) -> list[str]:
        available = self._environment.available_user_classes
        if not available or not self._environment.web_ui.userclass_picker_is_active:
            return []
        return [
            f"user class: {name[:80]!r} is not one of {', '.join(sorted(available))}"
            for name in names
            if name and name not in available
        ]

    def _classes(self, names: Sequence[str]) -> Sequence[type[Any]]:
        """As Locust's own handler will choose them."""
        available = self._environment.available_user_classes
        if not available or not self._environment.web_ui.userclass_picker_is_active:
            return list(self._environment.user_classes)
        return [cls for name, cls in available.items() if name in names] or list(available.values())

    def fields(self) -> list[dict[str, Any]]:
        """For a form: ``name``, ``help``, ``value`` as it is now and ``choices``, None where any text will do."""
        now = vars(self._environment.parsed_options)
        return [
            {
                "name": name,
                "help": text,
                "value": ", ".join(value) if isinstance(value := now.get(name), list) else value,
                "choices": self._choices(name),
            }
            for name, text in web_texts().items()
        ]

    def _choices(self, name: str) -> list[str] | None:
        if name in _CHOICES:
            return list(_CHOICES[name])
        given = self._given.get(name)
        if name == "workload":
            return list(dict.fromkeys([str(given), *_shipped("*.yaml")]))
        if name == "shape":
            return ["", *([str(given)] if given else []), *_shipped("shapes/*.yaml")]
        return None


def _shipped(pattern: str) -> dict[str, str]:
    return {path.stem: str(path) for path in sorted(shipped_directory("workloads").glob(pattern))}


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.replace("\n", ",").split(",") if part.strip()]


def _says(texts: Sequence[str], value: Any) -> bool:
    """Whether a form's field holds the value of the option."""
    told = sorted(part for text in texts for part in _split(text))
    if value is None or value is False:
        return not told or (value is False and told == ["false"])
    if isinstance(value, list):
        return told == sorted(map(str, value))
    if value is True:
        return told == ["true"]
    if isinstance(value, int | float):
        try:
            return float(texts[-1]) == value
        except ValueError:
            return False
    return texts[-1].strip() == str(value)


def _number_problems(form: Mapping[str, str]) -> list[str]:
    problems = []
    users, rate = form.get("user_count", ""), form.get("spawn_rate", "")
    if not (users.isascii() and users.isdecimal() and int(users) > 0):
        problems.append(f"number of users: {users[:40]!r} is not a whole number of at least 1")
    try:
        usable = 0 < float(rate) < math.inf
    except ValueError:
        usable = False
    if not usable:
        problems.append(f"ramp up: {rate[:40]!r} is not a number of users per second above 0")
    return problems
