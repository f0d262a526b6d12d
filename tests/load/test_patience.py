"""A simulated user gives up when no token comes in time, and the server sees it go; never after the first token."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.load.driving import Facts, call, drive
from tests.load.scripted_server import LAST_CHUNK, End, ScriptedServer, Step, chunk, chunked, serving
from tests.load.stream_cases import ABC, CHUNKED, ROLE, A, B
from vllm_locust.config import Target, Timeouts
from vllm_locust.load.patience import Patience
from vllm_locust.load.transport import WATCH_INTERVAL_S, Call, exceeded_limit, tokenless_until_ns
from vllm_locust.outcome import Outcome

TRANSPORTS = ["kernel", "sse", "openai"]
SECOND = 1_000_000_000
PATIENCE_NS = 400_000_000
LATE_NS = round(WATCH_INTERVAL_S * 1e9) + 250_000_000
"""How long after its patience a user may still be there: one look of the watchdog, and what two busy cores add."""
SCRIPTS: dict[str, tuple[Step, ...]] = {
    "silent": (End.BY_CLIENT,),
    "only_headers": (CHUNKED, chunk(ROLE), End.BY_CLIENT),
    "keep_alives": (CHUNKED, *(step for _ in range(6) for step in (chunk(b": x\n\n"), 0.05)), End.BY_CLIENT),
    "closing": (CHUNKED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), End.BY_CLIENT),
    "quick": chunked(*ABC),
    "slow_after_its_first_token": (
        CHUNKED,
        chunk(ROLE),
        chunk(A),
        1.0,
        chunk(B),
        *(chunk(event) for event in ABC[3:]),
        LAST_CHUNK,
    ),
}
LOST = ["silent", "only_headers", "keep_alives", "closing"]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with serving(SCRIPTS) as server:
        yield server


@pytest.fixture(scope="module", params=TRANSPORTS)
def results(request: pytest.FixtureRequest, server: ScriptedServer) -> tuple[str, dict[str, Facts], ScriptedServer]:
    transport: str = request.param
    host, port = server.listener.getsockname()
    users = [[call(f"{name}/{transport}", f"http://{host}:{port}", patience_ns=PATIENCE_NS)] for name in SCRIPTS]
    facts = drive(transport, users)
    for _ in range(100):
        if all(f"{name}/{transport}" in server.hung_up_ns for name in LOST):
            break
        time.sleep(0.02)
    return transport, facts, server


@pytest.mark.parametrize("name", LOST)
def test_a_user_without_a_token_gives_up_and_the_server_sees_it_go(
    name: str, results: tuple[str, dict[str, Facts], ScriptedServer]
) -> None:
    transport, facts, server = results
    seen = facts[f"{name}/{transport}"]
    assert seen["outcome"] == "abandoned"
    assert seen["error"] == "its user gave up: no token in time after it was sent (--patience)"
    assert seen["chunk_ns"] == []
    for moment_ns in (seen["ended_ns"], server.hung_up_ns[seen["name"]]):
        assert PATIENCE_NS < moment_ns - seen["sent_ns"] < PATIENCE_NS + LATE_NS


@pytest.mark.parametrize("name", ["quick", "slow_after_its_first_token"])
def test_nobody_gives_up_after_the_first_token(
    name: str, results: tuple[str, dict[str, Facts], ScriptedServer]
) -> None:
    transport, facts, _ = results
    seen = facts[f"{name}/{transport}"]
    assert (seen["outcome"], seen["error"], seen["text"]) == ("ok", None, "abc")
    assert seen["ended_ns"] - seen["sent_ns"] > (SECOND if name.startswith("slow") else 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_patience_counts_from_when_the_request_was_due(transport: str, server: ScriptedServer) -> None:
    host, port = server.listener.getsockname()
    now_ns = time.monotonic_ns()
    patience: Facts = {"patience_ns": 10 * SECOND, "patience_from_ns": now_ns - 9 * SECOND}
    seen = drive(transport, [[call(f"silent/due/{transport}", f"http://{host}:{port}", **patience)]])
    (facts,) = seen.values()
    assert facts["outcome"] == "abandoned"
    assert facts["error"] == "its user gave up: no token in time after it was due (--patience)"
    assert facts["attempts"] == 1
    assert SECOND < facts["ended_ns"] - now_ns < SECOND + LATE_NS + 200_000_000


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_gave_up_while_waiting_for_a_slot_sends_nothing(transport: str, server: ScriptedServer) -> None:
    host, port = server.listener.getsockname()
    patience: Facts = {"patience_ns": SECOND, "patience_from_ns": time.monotonic_ns() - 2 * SECOND}
    (facts,) = drive(transport, [[call(f"quick/never/{transport}", f"http://{host}:{port}", **patience)]]).values()
    assert (facts["outcome"], facts["attempts"], facts["sent_ns"]) == ("abandoned", 0, None)
    assert "--patience" in facts["error"]
    assert not [entry for entry in server.requests if entry.name == facts["name"]]


# The arithmetic of limits


def _call(
    patience_ns: int | None = None, patience_from_ns: int | None = None, first_sent_ns: int | None = None
) -> Call:
    return Call(
        target=Target.parse("http://h"),
        path="/",
        payload={},
        headers=(),
        streamed=True,
        timeouts=Timeouts(None, 50, 10, 100),
        patience_ns=patience_ns,
        patience_from_ns=patience_from_ns,
        first_sent_ns=first_sent_ns,
    )


@pytest.mark.parametrize(
    ("limited", "until_ns", "outcome"),
    [
        (_call(), 1050, Outcome.TIMEOUT_FIRST_TOKEN),
        (_call(20), 1020, Outcome.ABANDONED),
        (_call(60), 1050, Outcome.TIMEOUT_FIRST_TOKEN),
        (_call(20, 990), 1010, Outcome.ABANDONED),
        (_call(20, first_sent_ns=995), 1015, Outcome.ABANDONED),
        (_call(20, 990, 995), 1010, Outcome.ABANDONED),
        (_call(None, None, 960), 1010, Outcome.TIMEOUT_FIRST_TOKEN),
    ],
)
def test_without_a_token_the_first_limit_ends_a_call(limited: Call, until_ns: int, outcome: Outcome) -> None:
    assert tokenless_until_ns(limited, 1000) == until_ns
    assert exceeded_limit(limited, until_ns, sent_ns=1000, silent_ns=0, has_token=False) is None
    verdict = exceeded_limit(limited, until_ns + 1, sent_ns=1000, silent_ns=0, has_token=False)
    assert verdict is not None
    assert verdict[0] is outcome


@pytest.mark.parametrize("limited", [_call(1), _call(1, 0), _call(1, 0, 999)])
def test_after_a_token_there_is_no_patience_to_lose(limited: Call) -> None:
    assert exceeded_limit(limited, 1099, sent_ns=1000, silent_ns=10, has_token=True) is None
    verdict = exceeded_limit(limited, 1099, sent_ns=1000, silent_ns=11, has_token=True)
    assert verdict is not None
    assert verdict[0] is Outcome.TIMEOUT_IDLE


UNPARSED = """
import ssl

import gevent

from tests.load.test_patience import SECOND, limitless_call
from vllm_locust import clock
from vllm_locust.load.connection import Connection
from vllm_locust.load.kernel import KernelTransport, _Stream
from vllm_locust.load.receiver import raw_socket

now_ns = clock.monotonic_ns()
stream = _Stream(limitless_call(SECOND), Connection(raw_socket(), None, stamps=False, proxy_headers=None))
stream.exchange.sent_ns = now_ns - 2 * SECOND
stream.inbox.reads = [(b"", now_ns, now_ns, True, 0)]
transport = KernelTransport(ssl.create_default_context())
transport._running[0] = stream
transport._note_limit(0, stream, now_ns)
gevent.sleep(0.2)
print("turns", stream.finished.is_set())
stream.inbox.reads = []
gevent.sleep(0.2)
print(stream.exchange.outcome.value)
"""


def limitless_call(patience_ns: int) -> Call:
    return Call(
        target=Target.parse("http://h"),
        path="/",
        payload={},
        headers=(),
        streamed=True,
        timeouts=Timeouts(None, None, None, None),
        patience_ns=patience_ns,
    )


def test_a_limit_that_passes_while_bytes_wait_for_the_parser_stops_no_worker() -> None:
    """They may hold the first token, so the call goes on until they are parsed. In a process of its own: gevent
    patches it.
    """
    run = subprocess.run([sys.executable, "-c", UNPARSED], capture_output=True, text=True, timeout=30, check=False)
    assert run.stdout.split() == ["turns", "False", "abandoned"], run.stderr


# Draws


def test_patience_is_off_or_constant_or_uniform() -> None:
    assert Patience(None, seed=1, worker_id="w").draw_ns(0, 0) is None
    assert Patience((5, 5), seed=1, worker_id="w").draw_ns(3) == 5
    drawn = Patience((5 * SECOND, 20 * SECOND), seed=1, worker_id="w")
    values = [drawn.draw_ns(user) for user in range(50) for _ in range(40)]
    values += [drawn.draw_ns(0, arrival) for arrival in range(2000)]
    known = [value / SECOND for value in values if value is not None]
    assert len(known) == 4000
    assert 5 <= min(known) < 5.1
    assert 19.9 < max(known) <= 20
    # A uniform distribution on 5-20: mean 12.5, deviation 15/√12; four standard errors.
    assert abs(statistics.fmean(known) - 12.5) < 4 * 15 / 12**0.5 / 4000**0.5
    assert abs(statistics.stdev(known) - 15 / 12**0.5) < 0.2


def test_a_users_draws_hang_on_the_seed_and_on_nobody_else() -> None:
    alone = Patience((1, SECOND), seed=7, worker_id="w")
    among_others = Patience((1, SECOND), seed=7, worker_id="w")
    expected = [alone.draw_ns(1) for _ in range(5)]
    seen = []
    for _ in range(5):
        among_others.draw_ns(2)
        among_others.draw_ns(1, 40)
        seen.append(among_others.draw_ns(1))
    assert seen == expected
    assert len(set(seen)) == 5
    assert [Patience((1, SECOND), seed=8, worker_id="w").draw_ns(1)] != expected[:1]


def test_an_arrivals_patience_is_the_same_whoever_sends_it() -> None:
    here, there = (Patience((1, SECOND), seed=7, worker_id=name) for name in "ab")
    assert [here.draw_ns(1, k) for k in range(9)] == [there.draw_ns(k, k) for k in range(9)]
