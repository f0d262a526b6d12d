"""From what workers measured to one axis: drift, a Redis that was replaced by one with another clock, nonsense."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from tests.store.servers import Server, in_s
from vllm_locust import clock
from vllm_locust.run.common_clock import ClockTrack, WorkerClocks
from vllm_locust.run.server_axes import ServerAxes
from vllm_locust.store.clock_offset import ClockOffset
from vllm_locust.store.redis_store import RunStore
from vllm_locust.store.redis_url import redis_options
from vllm_locust.store.shipper import Shipper
from vllm_locust.store.shipper_config import ShipperConfig

SECOND = 1_000_000_000
BASE = 1_800_000_000 * SECOND


def measured(at_s: float, offset_ns: float, server: str = "a", uncertainty_ns: int = 50_000) -> ClockOffset:
    at_ns = round(at_s * SECOND)
    return ClockOffset(BASE + at_ns, at_ns, round(offset_ns), uncertainty_ns, server)


def control(**workers: list[ClockOffset]) -> dict[str, str]:
    return {
        f"clock:{name}": "\n".join(json.dumps(asdict(offset)) for offset in offsets)
        for name, offsets in workers.items()
    }


def offsets_at(clocks: WorkerClocks, worker: str, *seconds: float) -> list[int]:
    times = np.array([BASE + round(at * SECOND) for at in seconds], dtype=np.int64)
    return [int(offset) for offset in clocks.tracks[worker].at(times)]


def test_a_drift_is_followed() -> None:
    """50 ppm, which is 1.5 ms in the 30 s between two measurements."""
    clocks = WorkerClocks.from_control(control(w=[measured(at, 1e9 + at * 50_000) for at in (0, 30, 60)]))
    assert offsets_at(clocks, "w", 0, 15, 45, 60) == [10**9 + round(at * 50_000) for at in (0, 15, 45, 60)]
    told = clocks.as_json()
    assert (told["measurements"], told["uncertainty_ns"]) == ({"w": 3}, {"w": 50_000})


@pytest.mark.parametrize("ahead_ns", [3 * 10**9, -(10**8)])
def test_a_new_redis_with_another_clock_moves_nothing(ahead_ns: int) -> None:
    """Two workers saw both, of which one drifts; a third came later and saw only the new one."""
    clocks = WorkerClocks.from_control(
        control(
            steady=[measured(0, 10**9), measured(30, 10**9), measured(60, 10**9 + ahead_ns, "b")],
            drifting=[
                *(measured(at, at * 50_000) for at in (0, 30)),
                *(measured(at, at * 50_000 + ahead_ns, "b") for at in (60, 90)),
            ],
            late=[measured(70, -(10**9) + ahead_ns, "b")],
        )
    )
    assert clocks.axes.ahead_ns == {"a": 0, "b": ahead_ns}
    assert offsets_at(clocks, "steady", 0, 59, 60, 90) == [10**9] * 4
    assert offsets_at(clocks, "drifting", 0, 45, 75, 90) == [round(at * 50_000) for at in (0, 45, 75, 90)]
    assert offsets_at(clocks, "late", 0, 99) == [-(10**9)] * 2


def test_a_restart_with_the_same_clock_is_no_step() -> None:
    """The little that two measurements differ by is their own doubt."""
    axes = ServerAxes.of([[measured(0, 10**9), measured(5, 10**9 + 80_000, "b")]])
    assert axes.ahead_ns == {"a": 0, "b": 0}


def test_a_chain_of_servers() -> None:
    axes = ServerAxes.of(
        [
            [measured(0, 0), measured(20, 0), measured(40, 10**9, "b")],
            [measured(41, 10**9, "b"), measured(60, 10**9, "b"), measured(80, 5 * 10**9, "c")],
        ]
    )
    assert axes.ahead_ns == {"a": 0, "b": 10**9, "c": 5 * 10**9}


@pytest.mark.parametrize(
    "text", ["", "x", "[]", "{}", '{"offset_ns": 1e400}', json.dumps(asdict(measured(0, 0)) | {"offset_ns": 1 << 70})]
)
def test_what_is_no_measurement_is_none(text: str) -> None:
    fields = {"clock:bad": text, "flushed:bad": text} | control(w=[measured(0, 7 * 10**9)])
    clocks = WorkerClocks.from_control(fields)
    assert list(clocks.tracks) == ["w"]
    assert clocks.step_max_ns is None


def test_a_worker_measures_again_while_it_runs_and_at_its_end(tmp_path: Path) -> None:
    """Its clock gains 1 %, against a real server: what it shipped lies on the server's axis within a millisecond."""
    server = Server()
    store = RunStore(redis_options(server.url), "r")
    began_ns = clock.monotonic_ns()

    def drifting_unix_ns() -> int:
        return clock.unix_ns() + (clock.monotonic_ns() - began_ns) // 100

    config = ShipperConfig(
        worker_id="w", spool_dir=tmp_path, batch_interval_ns=SECOND // 20, clock_interval_ns=SECOND // 4
    )
    shipper = Shipper(store, config, unix_ns=drifting_unix_ns)
    clock.sleep(1.0)
    pairs = [(drifting_unix_ns(), clock.unix_ns()) for _ in range(3) if clock.sleep(0.1) is None]
    shipper.flush(in_s(2.0))
    shipper.close()
    clocks = WorkerClocks.from_control(store.read_control())
    store.close()
    server.close()
    track: ClockTrack = clocks.tracks["w"]
    assert len(track.offset_ns) >= 3
    assert track.offset_ns[0] - track.offset_ns[-1] > 5_000_000, "it drifted by 1 % of more than a second"
    for bent, true in pairs:
        moved = bent + int(track.at(np.array([bent], dtype=np.int64))[0])
        assert abs(moved - true) < 1_000_000 + track.uncertainty_ns
