"""One run: a client at a load against a fresh truth server, with a steady window in the middle."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests.bench.accuracy import Accuracy, Quantiles, compare, quantiles
from tests.bench.clients.client import Client, Load, Session
from tests.bench.placement import Placement, Usage, UsageShare, usage
from tests.bench.truth import Schedule, TruthServer

_STARTUP_S = 120.0
_FULL_SHARE = 0.95
_FULL_PATIENCE_S = 6.0
_SETTLE_S = 1.5
DISTURBED_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run: ``window_s`` is the steady stretch that counts."""

    schedule: Schedule
    streams: int
    window_s: float
    prompt_bytes: int = 512


@dataclass(frozen=True, slots=True)
class Run:
    client: str
    streams: int
    exit_code: int
    tokens_per_s: float
    offered_tokens_per_s: float
    cpu_us_per_token: float | None
    cpu_share: float
    run_delay_share: float
    server_run_delay_share: float
    server_late: Quantiles | None
    rss_bytes: int
    failed: int
    accuracy: Accuracy
    headline: Mapping[str, float | str | None]
    repeats: int = 0
    disturbed: bool = False


class RunFailure(Exception):
    """The client did not do its work. The message ends with the last lines that it printed."""


@dataclass(frozen=True, slots=True)
class _Window:
    client: UsageShare
    server: UsageShare


def measure(client: Client, plan: Plan, work: Path, placement: Placement, *, tries: int = 3) -> Run:
    """Repeats a run whose processes waited for their cores for more than 1 % of the time. The calmest run is kept."""
    best: Run | None = None
    for attempt in range(tries):
        at = work / f"{client.name}-{plan.streams}-{attempt}"
        shutil.rmtree(at, ignore_errors=True)
        at.mkdir(parents=True)
        run = replace(_measure_once(client, plan, at, placement), repeats=attempt)
        disturbance = run.server_run_delay_share + (run.run_delay_share if client.alone else 0.0)
        run = replace(run, disturbed=disturbance > DISTURBED_SHARE)
        if best is None or not run.disturbed or _delay(run) < _delay(best):
            best = run
        if not run.disturbed:
            break
    assert best is not None
    return best


def _delay(run: Run) -> float:
    return run.run_delay_share + run.server_run_delay_share


def _measure_once(client: Client, plan: Plan, work: Path, placement: Placement) -> Run:
    with TruthServer(plan.schedule, work, placement) as server:
        load = Load(
            url=server.url,
            port=server.port,
            streams=plan.streams,
            seconds=_SETTLE_S + plan.window_s + 2.0,
            schedule=plan.schedule,
            work=work,
            placement=placement,
            prompt_bytes=plan.prompt_bytes,
        )
        session = client.start(load)
        try:
            window = _watch(session, server, plan, work)
            code = _wait(session, plan, work)
        finally:
            session.stop()
    if code not in client.exit_codes:
        raise RunFailure(f"{client.name} at {plan.streams} streams ended with exit code {code}\n{_tail(work)}")
    return _evaluate(client, load, server, window, code)


def _evaluate(client: Client, load: Load, server: TruthServer, window: _Window, code: int) -> Run:
    truth, reported = server.log(), client.read_report(load)
    start, end = window.client.start_ns, window.client.end_ns
    tokens = truth.tokens_between(start, end)
    schedule = load.schedule
    return Run(
        client=client.name,
        streams=load.streams,
        exit_code=code,
        tokens_per_s=tokens / window.client.wall_s,
        offered_tokens_per_s=load.streams * schedule.tokens / schedule.request_s,
        cpu_us_per_token=window.client.cpu_ns / 1e3 / tokens if tokens else None,
        cpu_share=window.client.cpu_share,
        run_delay_share=window.client.run_delay_share,
        server_run_delay_share=window.server.run_delay_share,
        server_late=quantiles(truth.lateness_ns(start, end)),
        rss_bytes=window.client.rss_bytes,
        failed=reported.failed,
        accuracy=compare(truth, reported, start, end),
        headline=reported.headline,
    )


def _watch(session: Session, server: TruthServer, plan: Plan, work: Path) -> _Window:
    _wait_for_streams(session, server, plan.streams, work)
    time.sleep(_SETTLE_S)
    before = _both(session, server)
    time.sleep(plan.window_s)
    after = _both(session, server)
    if session.exit_code() is not None:
        raise RunFailure(f"the client ended before the window of {plan.window_s} s did\n{_tail(work)}")
    return _Window(after[0].since(before[0]), after[1].since(before[1]))


def _both(session: Session, server: TruthServer) -> tuple[Usage, Usage]:
    return usage(session.measured_pids()), usage([server.pid])


def _wait_for_streams(session: Session, server: TruthServer, streams: int, work: Path) -> None:
    """Until nearly all streams run, or, where a client never gets there, some seconds after its first requests."""
    deadline, first_seen = time.monotonic() + _STARTUP_S, None
    while time.monotonic() < deadline:
        if session.exit_code() is not None:
            raise RunFailure(
                f"the client ended (exit code {session.exit_code()}) before it sent its load\n{_tail(work)}"
            )
        active = int(server.stats()["active"])
        if active >= _FULL_SHARE * streams:
            return
        if active > max(1, streams // 100) and first_seen is None:
            first_seen = time.monotonic()
        if first_seen is not None and time.monotonic() > first_seen + _FULL_PATIENCE_S:
            return
        time.sleep(0.1)
    raise RunFailure(f"the client sent no load within {_STARTUP_S:.0f} s\n{_tail(work)}")


def _wait(session: Session, plan: Plan, work: Path) -> int:
    deadline = time.monotonic() + 3 * plan.schedule.request_s + plan.window_s + 120
    while time.monotonic() < deadline:
        code = session.exit_code()
        if code is not None:
            return code
        time.sleep(0.1)
    raise RunFailure(f"the client did not end\n{_tail(work)}")


def _tail(work: Path) -> str:
    lines: list[str] = []
    for log in sorted(work.glob("*.log")):
        lines += [f"{log.name}: {line}" for line in log.read_text(errors="replace").splitlines()[-15:]]
    return "\n".join(lines)
