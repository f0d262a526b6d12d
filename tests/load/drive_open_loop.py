"""Plays a share of a schedule with real Locust users, in a gevent-patched process of its own.

``python -m tests.load.drive_open_loop`` reads one plan (JSON) per line and answers each with one line (JSON).
"""

from gevent import monkey

monkey.patch_all()

import json  # noqa: E402
import logging  # noqa: E402
import sys  # noqa: E402
from dataclasses import asdict, dataclass, field  # noqa: E402
from types import SimpleNamespace  # noqa: E402
from typing import Any  # noqa: E402

import gevent  # noqa: E402
import numpy as np  # noqa: E402
from locust import TaskSet, constant, task  # noqa: E402
from locust.env import Environment  # noqa: E402
from locust.exception import StopUser  # noqa: E402

from vllm_locust import clock  # noqa: E402
from vllm_locust.arrival import ArrivalProcess, Piece, Schedule  # noqa: E402
from vllm_locust.clock import WallAxis  # noqa: E402
from vllm_locust.config import RunConfig, Target  # noqa: E402
from vllm_locust.load.open_loop import OpenLoopChatUser, kind_problems  # noqa: E402
from vllm_locust.load.users import POST, ChatUser  # noqa: E402
from vllm_locust.load.worker import Assignment, LoadWorker  # noqa: E402
from vllm_locust.record import ArrivalRecord, FlushReport, HealthSample, RequestRecord  # noqa: E402
from vllm_locust.workload.prompt import Prompt, Session, Turn  # noqa: E402
from vllm_locust.workload.workload import ContextLimit, Workload  # noqa: E402

COMMON_CLOCK_AHEAD_NS = 5_000_000_000
"""Of this process's wall clock."""


class Numbered:
    """A source whose prompts and sessions are called by their row."""

    def __init__(self, rows: int, replays_times: bool) -> None:
        self.prompt_tokens = self.output_tokens = np.full(rows, 3, np.int64)
        self.offset_ns = np.zeros(rows, np.int64) if replays_times else None

    def prompt(self, conversation: int, epoch: int) -> Prompt:
        content = {"role": "user", "content": "Hello"}
        return Prompt(f"{epoch}:{conversation}", (content,), 3, 3, conversation_id=f"{conversation}")

    def prepare_sessions(self) -> None:
        """Nothing to do."""

    def session(self, conversation: int, epoch: int) -> Session:
        turns = tuple(Turn(f"{epoch}:{conversation}:{n}", n, "Hello", 3, 3) for n in range(2))
        return Session(f"{conversation}", None, 0, turns)


@dataclass
class Kept:
    """A sink that keeps what it is given."""

    requests: list[RequestRecord] = field(default_factory=list)
    arrivals: list[ArrivalRecord] = field(default_factory=list)
    health: list[HealthSample] = field(default_factory=list)
    spooled_batches: int = 0

    def announce_request(self) -> None: ...

    def put_request(self, record: RequestRecord) -> None:
        self.requests.append(record)

    def put_arrival(self, record: ArrivalRecord) -> None:
        self.arrivals.append(record)

    def put_health(self, sample: HealthSample) -> None:
        self.health.append(sample)

    def flush(self, deadline_ns: int) -> FlushReport:  # noqa: ARG002 - as the protocol says
        return FlushReport("w", 0, 0, len(self.requests), None)


class Asks(OpenLoopChatUser):
    @task
    def ask_next(self) -> None:
        self.ask(self.next_prompt())


class AsksTwice(OpenLoopChatUser):
    @task
    def ask_next(self) -> None:
        self.ask(self.next_prompt(), name="first")
        self.ask(self.next_prompt(), name="second")


class HoldsSessions(OpenLoopChatUser):
    @task
    def hold_next(self) -> None:
        self.hold_session(self.next_session())


class Dawdles(OpenLoopChatUser):
    @task
    def ask_late(self) -> None:
        gevent.sleep(0.6)
        self.ask(self.next_prompt())


class Chooses(OpenLoopChatUser):
    @task(3)
    def often(self) -> None:
        self.ask(self.next_prompt(), name="often")

    @task(1)
    def seldom(self) -> None:
        self.ask(self.next_prompt(), name="seldom")


class Fails(OpenLoopChatUser):
    """Of four arrivals one is asked, one breaks the task, one is ignored, and one ends the user."""

    @task
    def fail(self) -> None:
        prompt = self.next_prompt()
        match self.user_id % 4:
            case 0:
                self.ask(prompt)
            case 1:
                raise ValueError("broken")
            case 2:
                pass
            case _:
                raise StopUser


class Closed(ChatUser):
    @task
    def ask_next(self) -> None:
        self.ask(self.next_prompt())


class Thinks(Asks):
    wait_time = constant(1)


class Nested(OpenLoopChatUser):
    @task
    class Many(TaskSet):
        @task
        def nothing(self) -> None:
            pass


USERS: dict[str, Any] = {
    cls.__name__: cls for cls in (Asks, AsksTwice, HoldsSessions, Dawdles, Chooses, Fails, Closed, Thinks, Nested)
}


def play(plan: dict[str, Any]) -> dict[str, Any]:
    sink = Kept()
    schedule = Schedule(ArrivalProcess(plan["arrival"]), seed=1, pieces=[piece(one) for one in plan["pieces"]])
    load = LoadWorker(
        RunConfig(
            targets=(Target.parse(plan["url"]),),
            when_full=plan["when_full"],
            drain_timeout_ns=round(plan["drain_s"] * 1e9),
            slos=("ttft<=10s",),
        ),
        Assignment("run", "w", plan["share"], plan["shares"], 7, "m", False, plan["first_arrival"]),
        workload(plan["rows"], plan["replays_times"]),
        sink,
        None,
        WallAxis(),
        schedule,
        clock_shift_ns=COMMON_CLOCK_AHEAD_NS,
    )
    POST.put(load)
    environment = Environment(user_classes=[USERS[plan["user"]]], catch_exceptions=True)
    runner = environment.create_local_runner()
    runner.spawn_users({plan["user"]: plan["slots"]})
    gevent.sleep(0.05)
    t0_ns = clock.monotonic_ns() + round(plan["lead_s"] * 1e9)
    t0_unix_ns = t0_ns + load.axis.offset_ns + COMMON_CLOCK_AHEAD_NS
    for stage, (start_s, end_s) in enumerate(plan["stages"]):
        load.open_stage(stage, t0_unix_ns + round(start_s * 1e9), t0_unix_ns + round(end_s * 1e9))
    assert load.dispatcher is not None
    load.dispatcher.begin(t0_ns, t0_unix_ns)
    scene = SimpleNamespace(load=load, environment=environment, runner=runner, user=plan["user"])
    acts_s = []
    for at_s, name, argument in plan["acts"]:
        wait_until(t0_ns, at_s)
        started_ns = clock.monotonic_ns()
        ACTS[name](scene, argument)
        acts_s.append((clock.monotonic_ns() - started_ns) / 1e9)
    wait_until(t0_ns, plan["drain_at_s"])
    waiting = load.dispatcher.waiting
    load.drain()
    gevent.sleep(0.05)
    users_left = len(runner.user_greenlets)
    runner.quit()
    POST.put(None)
    return {
        "t0_ns": t0_ns,
        "t0_unix_ns": t0_unix_ns,
        "axis_offset_ns": load.axis.offset_ns,
        "requests": [asdict(record) for record in sink.requests],
        "arrivals": [asdict(record) for record in sink.arrivals],
        "health": [asdict(sample) for sample in sink.health],
        "acts_s": acts_s,
        "waiting_at_drain": waiting,
        "counters": load.snapshot(1)["counters"],
        "stages": [{name: part[name] for name in ("stage", "counters")} for part in load.snapshot(1)["stages"]],
        "users_left": users_left,
    }


def piece(one: list[float]) -> Piece:
    return Piece(round(one[0] * 1e9), one[1], one[2])


def workload(rows: int, replays_times: bool) -> Workload:
    selected = np.arange(rows)
    source = Numbered(rows, replays_times)
    return Workload(
        "w", "", "", {}, (), "", "", source, selected, ContextLimit(None, None, 0), (selected, selected), None
    )


def wait_until(t0_ns: int, at_s: float) -> None:
    gevent.sleep(max(0.0, (t0_ns - clock.monotonic_ns()) / 1e9 + at_s))


def stop_users(scene: Any, count: int) -> None:
    """As Locust does when the number of users goes down."""
    scene.runner.stop_users({scene.user: count})


def stop_users_gently(scene: Any, count: int) -> None:
    scene.environment.stop_timeout = 5
    scene.runner.stop_users({scene.user: count})


ACTS: dict[str, Any] = {
    "stop_users": stop_users,
    "stop_users_gently": stop_users_gently,
    "spawn_users": lambda scene, count: scene.runner.spawn_users({scene.user: count}),
    "extend": lambda scene, one: scene.load.dispatcher.extend(piece(one)),
}


def main() -> None:
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        plan = json.loads(line)
        if "kinds" in plan:
            classes = [USERS[name] for name in plan["kinds"]]
            answer: Any = kind_problems(classes, open_loop=plan["open_loop"])
        else:
            answer = play(plan)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
