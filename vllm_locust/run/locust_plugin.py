"""Hooks the package to Locust. A locustfile that imports a user class from ``vllm_locust`` loads this module."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import gevent
from gevent.event import Event
from locust import argument_parser, events
from locust.runners import LocalRunner, Runner, WorkerRunner

from vllm_locust.aggregate import Snapshots
from vllm_locust.errors import RunFailed, VllmLocustError
from vllm_locust.load.preflight import reset_prefix_cache
from vllm_locust.load.users import POST
from vllm_locust.load_options import read_load_options
from vllm_locust.load_profile import Quantity
from vllm_locust.run.agreement import given_flags
from vllm_locust.run.capacity.probes import CapacityProbes
from vllm_locust.run.capacity.terms import terms_of
from vllm_locust.run.controller import RunController
from vllm_locust.run.course.course import ClosedCourse, Course, RunView, Search
from vllm_locust.run.course.open import OpenCourse
from vllm_locust.run.course.planned_load import OPEN_LOOP_SLOTS, plan_load
from vllm_locust.run.course.spawning import OrderedDispatcher, SpawnOrder
from vllm_locust.run.course.user_stages import UserStagesCourse
from vllm_locust.run.engine_time import steady_engine_time
from vllm_locust.run.flags import add_flags, bound_time_spans, unknown_variables
from vllm_locust.run.messenger import FLUSHED, PRESENT, READY, SNAPSHOT, Messenger
from vllm_locust.run.preflight import Preflight
from vllm_locust.run.run_description import Checked
from vllm_locust.run.secrets import Secrets
from vllm_locust.run.web.console import STOPPED, WebConsole
from vllm_locust.run.worker_side import WorkerSide
from vllm_locust.standard_streams import open_closed_streams

open_closed_streams(output_is_needed=False)
logger = logging.getLogger(__name__)

search: Callable[[RunView], Search] | None = None
"""Set before a run by a locustfile that decides itself on the next stages while it goes on."""

_PR_SET_PDEATHSIG = 1
_WORKERS_ARE_FORKED = Event()


def _in_forked_worker() -> None:
    """``--processes`` forks workers that nothing would end if the master died before they were connected. What is
    forked later, the recorder and the embedded Valkey, outlives the master: it keeps what the workers still send.
    """
    if _WORKERS_ARE_FORKED.is_set():
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # Until it has a handler of its own, an interrupt ends a forked worker at once instead of with a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


os.register_at_fork(after_in_child=_in_forked_worker)


def _on_parser(parser: Any, **_: Any) -> None:
    add_flags(parser)
    bound_time_spans(parser)


def _on_init(environment: Any, runner: Runner, web_ui: Any, **_: Any) -> None:
    _WORKERS_ARE_FORKED.set()
    steady_engine_time()
    options = dict(vars(environment.parsed_options))
    try:
        secrets = Secrets.read(options)
        if isinstance(runner, WorkerRunner):
            _WorkerProcess(environment, runner, secrets)
        else:
            for name in unknown_variables(os.environ):
                logger.warning("%s is no setting of this package (vllm-locust flags lists them) and is ignored", name)
            _MasterProcess(environment, runner, secrets, options, headless=web_ui is None)
    except VllmLocustError as error:
        _exit_with(error)
    except KeyboardInterrupt:
        # The server is asked and the workload loaded before Locust has a handler for it.
        _exit_with(RunFailed("interrupted before the run began; no load was sent"))


_events: Any = events
_events.init_command_line_parser.add_listener(_on_parser)
_events.init.add_listener(_on_init)


def _exit_with(error: VllmLocustError) -> None:
    for problem in error.problems:
        sys.stderr.write(f"vllm-locust: {problem}\n")
    sys.stderr.flush()
    sys.exit(error.exit_code)


def _interrupt_main() -> None:
    """What Ctrl-C does in Locust, once our own ending is over."""
    gevent.kill(gevent.get_hub().parent, KeyboardInterrupt())


class _WorkerProcess:
    """A worker that is told to end drains and flushes first."""

    def __init__(self, environment: Any, runner: WorkerRunner, secrets: Secrets) -> None:
        options = environment.parsed_options
        # Locust builds its whole command-line parser anew for every option of every spawn message: a stop of the event
        # loop of some 300 ms at each step of a ramp-up.
        argument_parser.default_args_dict = functools.cache(argument_parser.default_args_dict)
        messenger = Messenger(runner)
        self._side = WorkerSide(messenger, secrets, options.redis_url, given_flags(vars(options)))
        messenger.to_master(PRESENT, {})
        self._forked = bool(options.processes)
        environment.process_exit_code = 0
        environment.events.quitting.add_listener(lambda **_: self._side.leave())
        gevent.signal_handler(signal.SIGINT, self._on_interrupt)

    def _on_interrupt(self) -> None:
        # Ctrl-C reaches the whole foreground group: a forked worker then waits for what its master, interrupted too,
        # says.
        if self._forked and POST.worker is not None:
            return
        _interrupt_main()


class _MasterProcess:
    """The master, or the only process: checks what it is given, conducts runs, ends each before Locust may quit."""

    def __init__(
        self, environment: Any, runner: Any, secrets: Secrets, options: dict[str, Any], *, headless: bool
    ) -> None:
        self._environment = environment
        self._runner = runner
        self._secrets = secrets
        self._options = options
        self._headless = headless
        # The run's clock is ours: Locust's would start with the ramp-up and cut running requests.
        environment.parsed_options.run_time = None
        self._preflight = Preflight(secrets, options, host=self._host(), headless=headless)
        self._messenger = Messenger(runner)
        self._snapshots = Snapshots()
        self._controller: RunController | None = None
        self._interrupted = False
        self._present: set[str] = set()
        # Before the check, which takes a while: workers may connect and announce themselves meanwhile.
        self._messenger.on(PRESENT, self._on_present)
        self._messenger.on(READY, self._to_controller("on_ready"))
        self._messenger.on(SNAPSHOT, self._to_controller("on_snapshot"))
        self._messenger.on(FLUSHED, self._to_controller("on_flushed"))
        self._console = None if headless else WebConsole(environment, self._messenger, self._preflight, options)
        self._checked = self._check() if headless else None
        self._spawn_order = SpawnOrder()
        environment.dispatcher_class = functools.partial(OrderedDispatcher, self._spawn_order)
        self._set_default_users(environment.parsed_options)
        if isinstance(runner, LocalRunner):
            WorkerSide(self._messenger, secrets, None)
        self._locust_stop, self._locust_quit = runner.stop, runner.quit
        runner.stop = self._stop
        runner.quit = self._quit
        environment.events.test_start.add_listener(self._on_test_start)
        environment.events.spawning_complete.add_listener(self._on_spawned)
        environment.events.worker_connect.add_listener(self._on_worker_connect)
        environment.events.quitting.add_listener(self._on_quitting)
        gevent.signal_handler(signal.SIGINT, self._on_interrupt)

    def _check(self) -> Checked:
        """Everything that can be found out before load is sent. Raises UsageError."""
        if self._console is not None:
            return self._console.checked()
        classes = self._environment.user_classes
        return self._preflight.check(
            self._options, host=self._host(), run_time_s=self._options.get("run_time"), user_classes=classes
        )

    def _set_default_users(self, options: Any) -> None:
        """What Locust starts, or its start form shows, where the command line does not say how many users."""
        load = read_load_options(self._options, None)
        if load.profile is not None and load.profile.quantity is Quantity.USERS:
            options.num_users = round(load.profile.stages[0].start_value)
        elif options.num_users is None and load.open_loop:
            options.num_users = OPEN_LOOP_SLOTS

    def _host(self) -> str | None:
        return self._environment.host or next((u.host for u in self._environment.user_classes if u.host), None)

    def _to_controller(self, method: str) -> Callable[[str, Any], None]:
        def handler(sender: str, payload: Any) -> None:
            if self._controller is not None:
                getattr(self._controller, method)(sender, payload)

        return handler

    def _on_test_start(self, **_: Any) -> None:
        """Locust starts its users only when this returns. Where a run cannot begin, no user is started."""
        try:
            self._snapshots = Snapshots()
            checked = self._checked if self._checked is not None else self._check()
            self._spawn_order.reset()
            controller = RunController(
                self._messenger,
                checked,
                self._snapshots,
                self._spawn_order,
                self._course,
                one_of_many=not self._headless,
            )
            self._controller = controller
            controller.start(self._end_of_run)
        except Exception as error:
            if not isinstance(error, VllmLocustError):
                logger.exception("The run cannot begin")
            self._cannot_begin(error.problems if isinstance(error, VllmLocustError) else (str(error),))
            self._environment.process_exit_code = error.exit_code if isinstance(error, VllmLocustError) else 1
            if self._headless:
                gevent.spawn(self._locust_quit)
            raise gevent.GreenletExit from None
        except gevent.GreenletExit:
            self._cannot_begin((STOPPED,))
            raise
        if self._console is not None:
            self._console.begun(controller, self._snapshots)

    def _cannot_begin(self, problems: Sequence[str]) -> None:
        self._controller = None
        # Locust has made it for this start's user classes, and would keep it for the next start.
        self._runner._users_dispatcher = None
        for problem in problems:
            logger.error("vllm-locust: %s", problem)
        if self._console is not None:
            self._console.refused(problems)

    def _course(self, view: RunView) -> Course:
        config = view.config
        decider = self._capacity_search(view) if search is None else search(view)
        if config.open_loop:
            return OpenCourse(view, plan_load(config, view.workload), decider)
        if config.profile is None:
            return ClosedCourse(view)
        form = vars(self._environment.parsed_options)
        spawn_rate = self._options["spawn_rate"] if self._headless else form["spawn_rate"]
        return UserStagesCourse(view, config.profile, spawn_rate=spawn_rate, search=decider)

    def _capacity_search(self, view: RunView) -> Search | None:
        order, checked = view.config.capacity, self._checked
        if order is None or checked is None:
            return None
        reset = functools.partial(reset_prefix_cache, checked.config, checked.secrets.api_key)
        return CapacityProbes(
            view,
            order,
            terms=terms_of(order, checked.config, checked.server, checked.workload),
            earlier=self._preflight.earlier,
            reset_prefix_cache=reset if order.reset_prefix_cache else None,
        )

    def _on_present(self, worker_id: str, _payload: Any) -> None:
        if not self._messenger.has_left(worker_id):
            self._present.add(worker_id)
            self._on_worker_connect(worker_id)

    def _on_worker_connect(self, client_id: str, **_: Any) -> None:
        if self._controller is not None and client_id in self._present:
            self._controller.on_worker_connected(client_id)

    def _on_spawned(self, **_: Any) -> None:
        if self._controller is not None:
            self._controller.on_spawned()

    def _end_of_run(self) -> None:
        autoquit = self._environment.parsed_options.autoquit
        if self._headless:
            self._quit()
            return
        self._stop()
        if autoquit not in (-1, None):
            # As Locust's own timer does, which is not set.
            gevent.sleep(autoquit)
            self._quit()
            self._environment.web_ui.stop()

    def _finish(self, reason: str | None) -> None:
        controller = self._controller
        if controller is None:
            return
        controller.finish(reason)
        self._environment.process_exit_code = controller.exit_code
        if self._console is not None:
            self._console.ended()
        if self._controller is controller:
            self._controller = None

    def _stop(self, *args: Any, **kwargs: Any) -> None:
        if self._headless and self._controller is not None:
            # Locust's master only stops a test whose last worker went missing, and without a web UI nobody would ever
            # end it.
            self._quit()
        else:
            self._then(lambda: self._locust_stop(*args, **kwargs))

    def _quit(self) -> None:
        self._then(self._locust_quit)

    def _then(self, go_on: Callable[[], None]) -> None:
        """Finish the run, then let Locust go on. Its own message loop must not wait here: it carries what we wait
        for.
        """

        def end() -> None:
            self._finish("stopped before its planned end")
            go_on()

        if self._controller is not None and gevent.getcurrent() in self._runner.greenlet.greenlets:
            gevent.spawn(end)
        else:
            end()

    def _on_quitting(self, **_: Any) -> None:
        self._finish("ended by a signal")

    def _run_dir_name(self) -> str:
        return "on the run directory" if self._controller is None else str(self._controller.run_dir.path)

    def _on_interrupt(self) -> None:
        if self._interrupted:
            sys.stderr.write(
                f"vllm-locust: interrupted twice: no merge; run vllm-locust merge {self._run_dir_name()}\n"
            )
            os._exit(1)
        self._interrupted = True
        self._finish("interrupted")
        _interrupt_main()
