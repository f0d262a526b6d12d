"""The Locust user that locustfiles subclass."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import gevent
from gevent.event import Event
from locust import User
from locust.exception import StopUser
from locust.user.task import LOCUST_STATE_STOPPING

from vllm_locust.duration import seconds
from vllm_locust.load.dispatcher import DueArrival
from vllm_locust.load.worker import LoadWorker
from vllm_locust.outcome import Outcome
from vllm_locust.workload.prompt import Prompt, Session


class RequestFailed(Exception):
    """What Locust's own failure table shows for a request that was not ``ok``."""


PAUSE_S: Final = 1.0
"""Of a closed-loop user whose request got no connection: there is no answer whose time would pace it."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What one request gave back. Times are seconds after the request was sent; None where there was no such moment."""

    text: str
    reasoning: str
    outcome: Outcome
    error: str | None
    finish_reason: str | None
    prompt_tokens: int | None
    output_tokens: int | None
    ttft_s: float | None
    e2e_s: float | None
    chunk_ns: Sequence[int]
    """Arrival of each token-bearing chunk, in nanoseconds."""
    request_id: str

    @property
    def chunk_s(self) -> list[float]:
        return [at_ns / 1e9 for at_ns in self.chunk_ns]

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK


class Post:
    """Where the plugin leaves the process's ``LoadWorker`` for the users: users wait here until it is ready."""

    def __init__(self) -> None:
        self._worker: LoadWorker | None = None
        self._ready = Event()

    def put(self, worker: LoadWorker | None) -> None:
        self._worker = worker
        if worker is None:
            self._ready.clear()
        else:
            self._ready.set()

    def wait(self) -> LoadWorker:
        self._ready.wait()
        assert self._worker is not None
        return self._worker

    @property
    def worker(self) -> LoadWorker | None:
        return self._worker


POST = Post()


class ChatUser(User):
    """A closed-loop user: sends its next request after the last one ended and its think time passed.

    Subclass it, give it ``@task`` methods, and call ``self.chat(...)`` or ``self.ask(self.next_prompt())`` in them::

        class Support(ChatUser):
            @task
            def question(self):
                answer = self.chat([{"role": "user", "content": "Hello"}], max_tokens=64, temperature=0)
                if answer.ok:
                    print(answer.text, answer.ttft_s)
    """

    abstract = True
    holds_sessions = False
    """Set it in a class that calls ``next_session``: what sessions need is then read before the load starts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._load = POST.wait()
        self.user_id = self._load.next_user_id()
        self._random: random.Random | None = None

    def wait_time(self) -> float:
        """Think time between two tasks: uniform within ``--think-time``."""
        low_ns, high_ns = self._load.config.think_time_ns
        if low_ns == high_ns:
            return low_ns / 1e9
        if self._random is None:
            self._random = random.Random(f"{self._load.config.seed}:{self._load.assignment.worker_id}:{self.user_id}")
        return self._random.uniform(low_ns, high_ns) / 1e9

    def next_prompt(self) -> Prompt:
        """The next prompt of the workload; never one that another worker gets too. The user ends with the workload."""
        prompt = self._load.next_prompt()
        if prompt is None:
            raise StopUser
        return prompt

    def next_session(self) -> Session:
        """The next conversation of the workload, its turns in order. The user ends with the workload."""
        session = self._load.next_session()
        if session is None:
            raise StopUser
        return session

    def stop(self, force: bool = False) -> bool:
        """Locust's way to stop a user, whether for a stage with fewer of them or at the end. One whose request is
        running ends it first: at the end of a run the drain sees to it that there is none.
        """
        if force and self._load.is_busy(self.greenlet):
            self._state = LOCUST_STATE_STOPPING
            return False
        return bool(super().stop(force))

    def ask(self, prompt: Prompt, *, name: str | None = None, **body: Any) -> ChatAnswer:
        """Send a prompt of the workload with its recorded answer's length as the limit."""
        return self._send(
            prompt.messages,
            prompt.output_tokens,
            name,
            body,
            prompt=prompt,
            conversation_id=prompt.conversation_id,
            turn=prompt.turn,
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        name: str | None = None,
        conversation_id: str | None = None,
        turn: int | None = None,
        **body: Any,
    ) -> ChatAnswer:
        """Send messages and wait for the whole answer. Further keywords go into the request's body.

        ``--max-tokens``, where given, overrides ``max_tokens``. ``name`` is what Locust's tables and the record's
        ``task`` show; it defaults to the class's name. Never raises for a failed request: look at ``ok``.
        """
        return self._send(messages, max_tokens, name, body, conversation_id=conversation_id, turn=turn)

    def hold_session(self, session: Session, *, name: str | None = None, **body: Any) -> None:
        """Play a conversation: each turn is sent with the history so far, in which the answers are the server's own.

        Ends early when a turn fails, since what would follow has no history."""
        history: list[Mapping[str, Any]] = []
        if session.system is not None:
            history.append({"role": "system", "content": session.system})
        for number, turn in enumerate(session.turns):
            if number:
                gevent.sleep(self.wait_time())
            history.append({"role": "user", "content": turn.text})
            answer = self._send(
                history, turn.output_tokens, name, body, conversation_id=session.conversation_id, turn=number
            )
            if not answer.ok:
                return
            history.append({"role": "assistant", "content": answer.text})

    def _begin_request(self) -> DueArrival | None:
        """The arrival for which a request is sent, where it is sent for one. Ends the user where none may be sent."""
        if self._load.draining.is_set() or self._state == LOCUST_STATE_STOPPING:
            raise StopUser
        return None

    def _send(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int | None,
        name: str | None,
        body: Mapping[str, Any],
        **meta: Any,
    ) -> ChatAnswer:
        load = self._load
        due = self._begin_request()
        task = name or type(self).__name__
        record, exchange = load.perform(
            messages, user_id=self.user_id, task=task, max_tokens=max_tokens, extra=body, due=due, **meta
        )
        completion = exchange.completion
        ended_ns = record.e2e_ns or record.done_ns or (record.chunk_ns[-1] if record.chunk_ns else 0)
        failure = None if record.outcome is Outcome.OK else RequestFailed(_words(record.outcome, record.error))
        self.environment.events.request.fire(
            request_type=load.config.api.value,
            name=task,
            response_time=ended_ns / 1e6,
            response_length=len(completion.text.encode()),
            exception=failure,
            context={},
        )
        if load.dispatcher is None and record.outcome in (Outcome.CONNECT_ERROR, Outcome.CLIENT_ERROR):
            load.draining.wait(PAUSE_S)
        return ChatAnswer(
            text=completion.text,
            reasoning=completion.reasoning,
            outcome=record.outcome,
            error=record.error,
            finish_reason=record.finish_reason,
            prompt_tokens=record.prompt_tokens,
            output_tokens=record.output_tokens,
            ttft_s=seconds(record.ttft_ns),
            e2e_s=seconds(record.e2e_ns),
            chunk_ns=record.chunk_ns,
            request_id=record.request_id,
        )


def _words(outcome: Outcome, error: str | None) -> str:
    """One row in Locust's table per kind of failure, so without what differs between two requests."""
    return outcome.value if error is None else f"{outcome.value}: {error[:120]}"
