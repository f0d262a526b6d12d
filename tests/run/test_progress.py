"""Lines about a run while it goes on: of snapshots whose answers are plain, and of a whole run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.run.simulated import FAST, run_locust, simserver
from vllm_locust.aggregate import RunAggregate
from vllm_locust.outcome import Outcome
from vllm_locust.run import progress as progress_lines
from vllm_locust.run.progress import SCHEMA, Progress

SECOND = 1_000_000_000
PROBE = {
    "number": 2,
    "load": 18.0,
    "unit": "requests/s",
    "low": None,
    "high": None,
    "held_load": 9.0,
    "missed_load": None,
}


def known(sent: int, ok: int, failed: int = 0, *, tokens: int = 0, ttft_ms: tuple[int, ...] = ()) -> RunAggregate:
    aggregate = RunAggregate(sent=sent, in_flight=sent - ok - failed, output_tokens=tokens)
    aggregate.finished = {Outcome.OK: ok, Outcome.HTTP_ERROR: failed}
    for milliseconds in ttft_ms:
        aggregate.histograms["ttft"].record(milliseconds * 1_000_000)
    return aggregate


class Screen:
    """Standard error, be it a terminal or not."""

    def __init__(self, terminal: bool) -> None:
        self.text = ""
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Screen:
    screen = Screen(terminal=False)
    monkeypatch.setattr(progress_lines, "sys", SimpleNamespace(stderr=screen))
    return screen


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Screen:
    screen = Screen(terminal=True)
    monkeypatch.setattr(progress_lines, "sys", SimpleNamespace(stderr=screen))
    return screen


def objects(screen: Screen) -> list[dict[str, Any]]:
    return [json.loads(line) for line in screen.text.splitlines()]


def test_json_has_rates_and_percentiles_of_the_last_ten_seconds(pipe: Screen) -> None:
    progress = Progress("json")
    early, late = (1000,) * 10, (20,) * 99 + (50,)
    steps = [
        (-5, known(0, 0)),
        (0, known(0, 0)),
        (1, known(12, 10, tokens=100, ttft_ms=early)),
        (11, known(112, 110, 5, tokens=600, ttft_ms=early + late)),
    ]
    for second, aggregate in steps:
        progress.show(second * SECOND, "window", 60 - second, lambda now=aggregate: now, stage="10/s", offered_rps=10.0)  # type: ignore[misc]
    _, first, second_one, last = objects(pipe)
    assert (first["recent_s"], first["achieved_rps"], first["ttft_p50_s"]) == (0, None, None), "nothing was sent"
    assert (second_one["recent_s"], second_one["achieved_rps"], second_one["output_tokens_per_s"]) == (1, 12, 100)
    assert second_one["ttft_p50_s"] == pytest.approx(1, rel=0.01)
    assert (last["recent_s"], last["achieved_rps"], last["requests_per_s"]) == (10, 10, 10.5)
    assert last["output_tokens_per_s"] == 50
    assert last["ttft_p50_s"] == pytest.approx(0.02, rel=0.01), "those of the first second are over"
    assert last["ttft_p99_s"] == pytest.approx(0.02, rel=0.01)
    assert {k: last[k] for k in ("schema", "sent", "finished", "failed", "in_flight", "output_tokens", "left_s")} == {
        "schema": SCHEMA,
        "sent": 112,
        "finished": 115,
        "failed": 5,
        "in_flight": -3,
        "output_tokens": 600,
        "left_s": 49,
    }
    assert (last["stage"], last["offered_rps"], last["search"], last["probe"]) == ("10/s", 10, None, None)


def test_one_line_a_second_however_often_it_is_asked(pipe: Screen) -> None:
    progress = Progress("json")
    for tenth in range(35):
        progress.show(tenth * SECOND // 10, "window", None, lambda: known(1, 1), search="probe 2: 18/s", probe=PROBE)
    lines = objects(pipe)
    assert len(lines) == 4
    assert all((line["search"], line["probe"], line["left_s"]) == ("probe 2: 18/s", PROBE, None) for line in lines)


def test_a_worker_that_left_gives_no_negative_rate(pipe: Screen) -> None:
    progress = Progress("json")
    steps = (known(100, 90, ttft_ms=(5,) * 90), known(101, 45, ttft_ms=(5,) * 45), known(111, 55, ttft_ms=(5,) * 55))
    for second, aggregate in enumerate(steps):
        progress.show(second * SECOND, "window", None, lambda now=aggregate: now)  # type: ignore[misc]
    _, after, later = objects(pipe)
    assert (after["achieved_rps"], after["ttft_p50_s"], after["sent"]) == (None, None, 101)
    assert (later["achieved_rps"], later["recent_s"]) == (10, 1)


def test_failures_that_a_worker_took_along_give_no_negative_rate(pipe: Screen) -> None:
    """No answer was ok, so its histograms say nothing."""
    progress = Progress("json")
    for second, aggregate in enumerate((known(20, 0, 15), known(12, 0, 9), known(15, 0, 12))):
        progress.show(second * SECOND, "window", None, lambda now=aggregate: now)  # type: ignore[misc]
    _, after, later = objects(pipe)
    assert (after["achieved_rps"], after["requests_per_s"], after["output_tokens_per_s"]) == (None, None, None)
    assert (later["achieved_rps"], later["requests_per_s"]) == (3, 3)


def test_a_terminal_has_one_line_that_is_drawn_anew(terminal: Screen) -> None:
    progress = Progress("auto")
    for second in range(3):
        now = known(10 * second, 8 * second, second, tokens=400 * second, ttft_ms=(30,) * 8 * second)
        progress.show(second * SECOND, "window", 7.0, lambda now=now: now, offered_rps=12.0)  # type: ignore[misc]
    progress.end()
    drawn = terminal.text.split("\r\x1b[K")
    assert len(drawn) == 4
    assert terminal.text.count("\n") == 1
    assert terminal.text.endswith("\n")
    for words in (
        "in flight 2",
        "failed 2",
        "offered 12.0/s sent 10.0/s",
        "400 output tokens/s",
        "TTFT p50 30",
        "p99",
        "7 s left",
    ):
        assert words in drawn[-1]


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_without_a_terminal_it_is_quiet(pipe: Screen, mode: Any) -> None:
    progress = Progress(mode)
    for second in range(30):
        progress.show(second * SECOND, "window", 1.0, lambda: known(1, 1))
    progress.end()
    assert pipe.text == ""


def test_lines_agree_with_the_result_although_locust_resets_its_own(tmp_path: Path) -> None:
    with simserver(tmp_path, *FAST) as server:
        flags = ("-u", "4", "-r", "4", "-t", "4s", "--warmup-requests", "4", "--max-tokens", "40")
        run = run_locust(tmp_path, server.url, *flags, "--progress", "json", "--json", "--reset-stats")
        truth = server.truth()
    lines = [json.loads(line) for line in run.output.splitlines() if line.startswith('{"schema"')]
    assert len(lines) >= 3, run.output
    assert [line["schema"] for line in lines] == [SCHEMA] * len(lines)
    for name in ("sent", "finished", "output_tokens"):
        counts = [line[name] for line in lines]
        assert counts == sorted(counts), name
    totals = run.summary["totals"]["all_phases"]
    assert totals["requests"] == len(truth)
    assert totals["requests"] / 2 < lines[-1]["finished"] <= totals["requests"]
    assert lines[-1]["failed"] == 0
    assert 0 < lines[-1]["ttft_p50_s"] <= lines[-1]["ttft_p99_s"]
