"""The load of an open loop as it is planned before the first request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_locust.arrival import ArrivalProcess
from vllm_locust.config import RunConfig
from vllm_locust.errors import UsageError
from vllm_locust.run.course.planned_load import plan_load
from vllm_locust.workload.load import load_workload
from vllm_locust.workload.workload import Workload

TRACE = "Timestamp,Request tokens,Response tokens\n" + "".join(f"{at},5,5\n" for at in (7, 8, 8.5, 10, 14, 15))


def workload(directory: Path, content: str, name: str = "trace.csv") -> Workload:
    path = directory / name
    path.write_text(content)
    return load_workload(
        str(path), tokenizer=None, max_model_len=None, max_tokens=None, seed=0, cache_dir=directory / "cache"
    )


def config(run_time_s: float | None = None, **options: Any) -> RunConfig:
    return RunConfig.from_options(options, host="http://localhost:8000", run_time_s=run_time_s)


def test_the_warm_up_comes_first_at_the_first_stages_rate(tmp_path: Path) -> None:
    asked = config(rate_stages="10:2s,10-30:4s", warmup_requests="25", arrival="constant", seed="4")
    load = plan_load(asked, workload(tmp_path, TRACE))
    assert load.warmup_ns == 2_500_000_000
    assert [stage.name for stage in load.stages] == ["10/s", "10→30/s"]
    assert load.schedule.length_ns == 8_500_000_000
    offsets_ns = load.schedule.offsets_ns()
    assert len(offsets_ns) == 25 + 20 + 80
    assert offsets_ns[:26].tolist() == [number * 100_000_000 for number in range(26)]
    assert load.schedule.seed == 4


def test_the_warm_up_holds_the_first_arrivals_unless_its_time_is_up(tmp_path: Path) -> None:
    trace = workload(tmp_path, TRACE)
    load = plan_load(config(rate="20", warmup_requests="30"), trace)
    assert len(load.schedule.offsets_ns(load.warmup_ns)) == 30
    assert len(load.schedule.offsets_ns(load.warmup_ns + 1)) == 31
    assert plan_load(config(rate="20", warmup_requests="30", warmup_time="1s"), trace).warmup_ns == 10**9
    assert load.schedule.length_ns is None, "no -t: until it is stopped"


def test_a_trace_keeps_its_times(tmp_path: Path) -> None:
    trace = workload(tmp_path, TRACE)
    load = plan_load(config(arrival="trace", warmup_requests="2"), trace)
    assert load.schedule.process is ArrivalProcess.TRACE
    assert load.schedule.offsets_ns().tolist() == [0, 10**9, 1_500_000_000, 3 * 10**9, 7 * 10**9, 8 * 10**9]
    assert load.warmup_ns == 1_500_000_000
    (stage,) = load.stages
    # Four arrivals in 6.5 s have three gaps between them; the window ends after a fourth.
    assert stage.length_ns == 8_666_666_667
    assert load.schedule.length_ns == load.warmup_ns + 8_666_666_667
    assert stage.mean_value == pytest.approx(3 / 6.5)
    part = plan_load(config(3.0, arrival="trace", warmup_requests="2"), trace)
    assert part.schedule.offsets_ns().tolist() == [0, 10**9, 1_500_000_000, 3 * 10**9]
    assert part.stages[0].mean_value == pytest.approx(2 / 3)


def test_the_last_of_a_trace_is_inside_the_window(tmp_path: Path) -> None:
    steady = "Timestamp,Request tokens,Response tokens\n" + "".join(f"{at / 4},5,5\n" for at in range(13))
    load = plan_load(config(arrival="trace", warmup_requests="0"), workload(tmp_path, steady))
    assert load.stages[0].mean_value == pytest.approx(4)
    assert load.stages[0].length_ns == 3_250_000_000
    late = plan_load(config(arrival="trace", warmup_requests="5"), workload(tmp_path, TRACE))
    assert (late.warmup_ns, late.stages[0].length_ns, late.stages[0].mean_value) == (8 * 10**9, 10**9, 1.0)
    bursts = "Timestamp,Request tokens,Response tokens\n" + "3,5,5\n" * 4
    burst = plan_load(config(arrival="trace", warmup_requests="0"), workload(tmp_path, bursts))
    assert (burst.stages[0].length_ns, burst.stages[0].mean_value) == (10**9, 4.0)


def test_what_a_workload_cannot_give_is_refused(tmp_path: Path) -> None:
    trace = workload(tmp_path, TRACE)
    with pytest.raises(UsageError, match="--warmup-requests 6: the trace has 6 requests"):
        plan_load(config(arrival="trace", warmup_requests="6"), trace)
    words = workload(tmp_path, "kind: synthetic\nconversations: 3\nprompt_tokens: 5\noutput_tokens: 5\n", "words.yaml")
    with pytest.raises(UsageError, match="--arrival trace: the workload words has no recorded times"):
        plan_load(config(arrival="trace"), words)
