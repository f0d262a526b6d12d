"""Locust's web UI with what this package adds to it, from the master's side: a start is checked, a run is told of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gevent
from gevent.event import AsyncResult
from locust.util.timespan import parse_timespan

from vllm_locust import clock
from vllm_locust.aggregate import Snapshots
from vllm_locust.errors import UsageError
from vllm_locust.run.controller import RunController
from vllm_locust.run.flags import WEB_LISTS
from vllm_locust.run.messenger import Messenger
from vllm_locust.run.preflight import Preflight
from vllm_locust.run.run_description import Checked
from vllm_locust.run.web.live_run import LiveRun
from vllm_locust.run.web.pages import fields_of_the_locustfile, install
from vllm_locust.run.web.start_form import StartForm

STOPPED = "it was stopped before it began"
_POLL_S = 0.05


class WebConsole:
    """A ``Starter``. ``given`` are the options as the command line set them."""

    def __init__(self, environment: Any, messenger: Messenger, preflight: Preflight, given: Mapping[str, Any]) -> None:
        self._environment = environment
        self._web_ui = environment.web_ui
        self._messenger = messenger
        self._preflight = preflight
        self._given_run_time_s: float | None = given.get("run_time")
        self._form = StartForm(environment, given, fields_of_the_locustfile(), parse_timespan)
        self._live = LiveRun(messenger)
        self._checked: Checked | None = None
        self._outcome: AsyncResult[tuple[str, ...]] = AsyncResult()
        self._stop_asked = False
        install(self._web_ui, self._live, self._form, self)

    @property
    def _host(self) -> str | None:
        environment = self._environment
        return environment.host or next((cls.host for cls in environment.user_classes if cls.host), None)

    # What a page asks for

    @property
    def is_going(self) -> bool:
        return self._live.is_going

    def refuse_change(self) -> str | None:
        controller, state = self._live.controller, self._live.state
        if controller is None or state != "running":
            return f"a run is {state}: wait until that is over"
        if controller.checked.config.open_loop or controller.checked.config.profile is not None:
            return "the run that goes on has a plan of its own for its load; stop it, then start another"
        return None

    def read_change(self, form: Mapping[str, Sequence[str]]) -> Mapping[str, str]:
        return self._form.read_change(form)

    def check(self, form: Mapping[str, Sequence[str]]) -> None:
        self._live.refuse(())
        self._live.preparing, self._stop_asked = True, False
        self._outcome = AsyncResult()
        try:
            if not self._messenger.worker_ids():
                raise UsageError("no worker is connected; start one with --worker, or Locust with --processes")
            order = self._form.read(form, run_time_s=self._given_run_time_s, host=self._host)
            self._checked = self._preflight.check(
                order.options, host=order.host, run_time_s=order.run_time_s, user_classes=order.user_classes
            )
            if self._stop_asked:
                raise UsageError(STOPPED)
        except BaseException:
            self.forget_check()
            raise
        vars(self._environment.parsed_options).update({name: order.options[name] for name in WEB_LISTS})

    def forget_check(self) -> None:
        self._checked = None
        self._live.preparing = False

    def start_problems(self, timeout_s: float) -> tuple[str, ...]:
        deadline_ns = clock.monotonic_ns() + round(timeout_s * 1e9)
        while not self._outcome.ready():
            if self._start_is_over():
                self.refused((STOPPED if self._stop_asked else "Locust has not started the run; read its log",))
            elif clock.monotonic_ns() > deadline_ns:
                return ()
            else:
                gevent.sleep(_POLL_S)
        problems: tuple[str, ...] = self._outcome.get()
        return problems

    def stop_start(self) -> None:
        if self._live.preparing:
            self._stop_asked = True
            spawning = self._environment.runner.spawning_greenlet
            if spawning is not None:
                spawning.kill()

    def _start_is_over(self) -> bool:
        """Of Locust's start, which a local runner leaves to a greenlet of its own."""
        starting, spawning = self._web_ui._swarm_greenlet, self._environment.runner.spawning_greenlet
        return starting is not None and starting.ready() and (spawning is None or spawning.ready())

    def cancel_run_time(self) -> None:
        vars(self._environment.parsed_options)["run_time"] = None
        self._web_ui._cancel_run_time_timer()

    # What the run tells

    def checked(self) -> Checked:
        """What was checked for the start that is under way. Where no page asked for it, it is checked now. Raises
        UsageError.
        """
        self._live.preparing = True
        checked, self._checked = self._checked, None
        now = vars(self._environment.parsed_options)
        run_time_s = now["run_time"] or self._given_run_time_s
        self.cancel_run_time()
        if checked is not None:
            return checked
        classes = list(self._environment.user_classes)
        return self._preflight.check(
            self._form.options(now), host=self._host, run_time_s=run_time_s, user_classes=classes
        )

    def begun(self, controller: RunController, snapshots: Snapshots) -> None:
        self._live.begin(controller, snapshots)
        self._outcome.set(())

    def refused(self, problems: Sequence[str]) -> None:
        self._live.refuse(problems)
        self._outcome.set(tuple(problems))

    def ended(self) -> None:
        self._live.end()
