"""POST /swarm, the one way in which a page starts a run: checked before Locust's own handler acts on it, and answered
with what has come of it. Locust would say "success" whatever the form holds. POST /stop ends a start as well as a run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from flask import Response, jsonify, request
from werkzeug.datastructures import ImmutableMultiDict

from vllm_locust.errors import VllmLocustError
from vllm_locust.run.flags import WEB_LISTS
from vllm_locust.run.web.start_form import UNLIMITED

logger = logging.getLogger(__name__)

OUTCOME_TIMEOUT_S: Final = 60.0
"""A run that takes longer to get ready is told of by the pages' own state."""


class Starter(Protocol):
    def refuse_change(self) -> str | None:
        """Why the number of users cannot be changed, of a run that goes on."""

    def read_change(self, form: Mapping[str, Sequence[str]]) -> Mapping[str, str]:
        """Raises VllmLocustError where the form says what a run that goes on cannot take; else what it changes."""

    @property
    def is_going(self) -> bool: ...

    def check(self, form: Mapping[str, Sequence[str]]) -> None:
        """Raises VllmLocustError where no run can be started with this form; else remembers it for the start."""

    def forget_check(self) -> None:
        """Nothing has come of it."""

    def start_problems(self, timeout_s: float) -> tuple[str, ...]:
        """Wait until the run has begun, or cannot: why."""

    def stop_start(self) -> None:
        """A start that is under way shall come to nothing."""

    def cancel_run_time(self) -> None:
        """Locust's own timer would cut running requests; the run's window is ours."""


def guarded_swarm(locust_view: Callable[[], Any], starter: Starter, secret_fields: frozenset[str]) -> Callable[[], Any]:
    """``secret_fields``: they reach the page empty; what comes back empty leaves them as they are."""

    def swarm() -> Any:
        form = dict(request.form.lists())
        # Locust's own handler reads a list that was empty so far as one of whole numbers: ours are set by the check.
        request.form = ImmutableMultiDict(
            [(name, value) for name, value in request.form.items(multi=True) if _is_locusts(name, value, secret_fields)]
        )
        if starter.is_going:
            if reason := starter.refuse_change():
                return _refusal(reason)
            try:
                # Locust's handler would set any option that a request names, such as a file to write.
                said = {name: values for name, values in form.items() if any(values) or name not in secret_fields}
                request.form = ImmutableMultiDict(starter.read_change(said))
            except VllmLocustError as error:
                return _refusal(*error.problems)
            answer = locust_view()
            starter.cancel_run_time()
            return answer
        try:
            starter.check(form)
        except VllmLocustError as error:
            return _refusal(*error.problems)
        answer = locust_view()
        if not _began(answer):
            starter.forget_check()
            return answer
        problems = starter.start_problems(OUTCOME_TIMEOUT_S)
        return _refusal(*problems) if problems else answer

    return swarm


def guarded_stop(locust_view: Callable[[], Any], starter: Starter) -> Callable[[], Any]:
    """Locust's own view knows nothing of a run that is still being checked: it would say "success" and let it start."""

    def stop() -> Any:
        starter.stop_start()
        return locust_view()

    return stop


def _is_locusts(name: str, value: str, secret_fields: frozenset[str]) -> bool:
    if name == "run_time" and value == UNLIMITED:
        return False
    return name not in WEB_LISTS and (bool(value) or name not in secret_fields)


def _began(answer: Response) -> bool:
    return bool((answer.get_json(silent=True) or {}).get("success"))


def _refusal(*problems: str) -> Response:
    """In the shape of Locust's own, which its form shows."""
    for problem in problems:
        logger.warning("vllm-locust: the start form is refused: %s", problem)
    return jsonify({"success": False, "message": "\n".join(problems), "problems": problems})
