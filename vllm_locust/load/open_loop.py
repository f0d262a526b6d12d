"""The Locust user of an open loop: a slot that sends when the schedule says so."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, NoReturn

import gevent
from locust import User
from locust.exception import RescheduleTask, StopUser
from locust.user.task import LOCUST_STATE_RUNNING, LOCUST_STATE_WAITING, TaskSet

from vllm_locust.load.dispatcher import DueArrival
from vllm_locust.load.users import ChatUser
from vllm_locust.outcome import Outcome
from vllm_locust.workload.prompt import Prompt, Session


class OpenLoopChatUser(ChatUser):
    """A slot of an open loop: runs one task for each arrival of the schedule that it gets, when that is due.

    Subclass it and use it like ``ChatUser``; ``-u`` is the number of slots. A task's first request is the arrival's;
    what else it sends follows at once and has no schedule. Which task is run, and which prompt or session it gets,
    hangs on the arrival's number alone: not on the number of workers, nor on what was dropped before.
    """

    abstract = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._load.dispatcher is None:
            raise RuntimeError(f"{type(self).__name__} is a slot of an open loop, and this run has no schedule")
        self._dispatcher = self._load.dispatcher
        self._due: DueArrival | None = None
        """What the running task is for."""
        self._unsent = False
        if self.tasks:
            self.tasks = [OpenLoopChatUser._serve_arrival]

    def wait_time(self) -> float:
        """A slot does not think."""
        return 0.0

    def next_prompt(self) -> Prompt:
        """The prompt of the arrival that the running task is for, however often it is asked for."""
        due = self._running_arrival("next_prompt")
        prompt = self._load.prompt_of(due)
        if prompt is None:
            self._without_text(due)
        return prompt

    def next_session(self) -> Session:
        """The conversation of the arrival that the running task is for."""
        due = self._running_arrival("next_session")
        session = self._load.session_of(due)
        if session is None:
            self._without_text(due)
        return session

    def _running_arrival(self, asked: str) -> DueArrival:
        if self._due is None:
            raise RuntimeError(f"{asked}() is for an arrival: call it in a task of {type(self).__name__}")
        return self._due

    def _without_text(self, due: DueArrival) -> NoReturn:
        words = f"the workload ends before arrival {due.number}; give a longer one, or a shorter test"
        self._load.put_unsent(due, Outcome.CLIENT_ERROR, words, user_id=self.user_id)
        raise RescheduleTask

    def _serve_arrival(self) -> None:
        """Wait for an arrival and run a task for it. One for which nothing was sent goes to another user where this
        one ends, and is put on record otherwise.
        """
        due = self._due = self._take()
        self._unsent = True
        words = "its task ended without a request"
        try:
            task: Any = self._task_for(due)
            task(self)
        except (gevent.GreenletExit, StopUser):
            self._dispatcher.give_back(due)
            raise
        except Exception as error:
            words = f"its task failed before it sent a request: {type(error).__name__}: {error}"
            raise
        finally:
            self._due = None
            self._load.put_unsent(due, Outcome.CLIENT_ERROR, words[:500], user_id=self.user_id)

    def _task_for(self, due: DueArrival) -> object:
        tasks = type(self).tasks
        if len(tasks) == 1:
            return tasks[0]
        return random.Random(self._load.config.seed ^ due.number).choice(tasks)

    def _take(self) -> DueArrival:
        """The state is that of Locust's own waiting between tasks: a user that is stopped meanwhile is killed at
        once.
        """
        self._state = LOCUST_STATE_WAITING
        due = self._dispatcher.take()
        if due is None:
            raise StopUser
        self._state = LOCUST_STATE_RUNNING
        return due

    def _begin_request(self) -> DueArrival | None:
        due = self._due
        if due is None or not self._unsent:
            return super()._begin_request()
        self._unsent = False
        if not self._dispatcher.settle(due):
            raise StopUser
        return due


def kind_problems(user_classes: Iterable[type[User]], *, open_loop: bool) -> list[str]:
    """What is wrong with a locustfile's user classes for this kind of run, each with its fix."""
    ours = [cls for cls in user_classes if issubclass(cls, ChatUser)]
    problems = []
    for cls in ours:
        name = cls.__name__
        slots = issubclass(cls, OpenLoopChatUser)
        if open_loop and not slots:
            problems.append(
                f"{name} is a closed-loop user and cannot follow a rate or a trace: derive it from OpenLoopChatUser "
                "(as in locustfiles/open_loop.py), or leave out --rate, --rate-stages, --shape and --arrival"
            )
        elif slots and not open_loop:
            problems.append(
                f"{name} is a slot of an open loop, which needs a schedule: give --rate, --rate-stages, --shape or "
                "--arrival trace, or derive it from ChatUser (as in locustfiles/chat.py)"
            )
        elif slots and any(isinstance(task, type) and issubclass(task, TaskSet) for task in cls.tasks):
            problems.append(
                f"{name} has a TaskSet among its tasks, which would go on sending after its arrival: write what "
                "follows one arrival as one @task method"
            )
        elif slots and cls.wait_time is not OpenLoopChatUser.wait_time:
            problems.append(f"{name} sets wait_time, but the slots of an open loop do not think: remove it")
    return problems
