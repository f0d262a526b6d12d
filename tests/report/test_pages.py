import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.report.rows import MIXED, batch, health, health_row, interval, request, run
from vllm_locust.report import figures
from vllm_locust.report.html import render_html
from vllm_locust.report.summary import summarize
from vllm_locust.report.text import WIDTH, render_text

GOLDEN = Path(__file__).parent / "golden_report.txt"
HOSTILE = "<script>alert(1)</script>&\"'\x1b[31m\u202e\u2028{{ 7*7 }}{% raw %}"


def mixed_summary() -> dict[str, Any]:
    stages = [
        {"stage": 0, "name": "hold", "stage_kind": "hold", "users": 8, **interval(10, 16)},
        {"stage": 1, "name": "ramp", "stage_kind": "ramp", **interval(16, 20)},
    ]
    rows = [{**row, "stage": (0 if i < 4 else 1) if row["phase"] == "window" else None} for i, row in enumerate(MIXED)]
    facts = run(slos=("ttft<=1s", "p50(e2e)<=3s", "good_fraction>=50%"), stages=stages, run_name="mixed")
    facts["workload"] = {
        "name": "sharegpt",
        "token_count_method": "estimate",
        "filters": {"no_answer": 3, "too_long": 0},
        "warnings": ["the file is cut off"],
    }
    workers = [health([health_row(11 + i, cpu_fraction=0.95) for i in range(5)])]
    return summarize(facts, [batch(rows)], workers=workers, length_reference=([10, 20, 30], [2, 3, 4]))  # type: ignore[arg-type]


def test_the_text_page_is_the_golden_one() -> None:
    """Look at the difference; where it is right, write the page anew into the golden file."""
    assert render_text(mixed_summary()) == GOLDEN.read_text(encoding="utf-8")


def test_the_verdict_is_the_first_line_in_colour_only_when_asked() -> None:
    summary = mixed_summary()
    plain = render_text(summary)
    assert plain.startswith("DEGRADED: Worker w1 used 95 % of a core")
    assert "\x1b" not in plain
    assert render_text(summary, colour=True).startswith("\x1b[33mDEGRADED: Worker w1")
    valid = summarize(run(), [batch(MIXED)])
    assert render_text(valid).startswith("VALID: ")


def test_one_stage_fits_in_a_hundred_columns() -> None:
    # Large and odd values in every column.
    rows = [
        request(10 + i / 1000, [900 + i, 1234.5678 + i], [1, 3], scheduled=9, prompt=10**6, ttft_answer_ns=10**12)
        for i in range(1500)
    ]
    rows += [request(11, outcome="http_error", http_status=500, error="x" * 500)]
    names = {"worker_id": "a-worker-with-a-long-name-of-forty-letters", "host": "h"}
    health_rows = [health_row(11, **names, loop_lag_ns=10**11, schedule_lag_max_ns=1, rss_bytes=10**11)]
    summary = summarize(
        run(slos=("ttft<=1s", "p99.9(ttft_from_schedule)<=1s")), [batch(rows)], workers=[health(health_rows)]
    )
    page = render_text(summary)
    assert max(len(line) for line in page.split("\n")[1:]) <= WIDTH
    assert not any(line != line.rstrip() for line in page.split("\n"))
    assert re.search(r"TTFT +1,500 +[\d,.]+ s +[\d,.]+ s ", page)


def test_the_headings_of_user_stages_are_whole_and_say_the_users_once() -> None:
    names = (("2 users", 2), ("2→16 users", 9), ("100000→1000000 users", 550_000), ("x" * 60, None))
    stages = [
        {"stage": n, "name": name, "stage_kind": "hold", "users": users, **interval(10 + n, 11 + n)}
        for n, (name, users) in enumerate(names)
    ]
    page = render_text(summarize(run(stages=stages), [batch(MIXED)]))
    tables = page[: page.index("LATENCY")]
    for name in ("2 users", "2→16 users", "100000→1000000 users", f"{'x' * 39}…"):
        assert len(re.findall(rf"(?<=  ){re.escape(name)}(?= |\n)", tables)) == 2, "in the table of stages and in LOAD"
    assert not re.search(r"users \d+u", page)
    html = render_html(summarize(run(stages=stages), [batch(MIXED)]), run())
    assert "2 users (" not in html


def test_a_percentile_with_few_samples_or_on_a_failed_request_says_so() -> None:
    page = render_text(summarize(run(), [batch(MIXED)]))
    assert "- ? fewer than 10 samples lie beyond this percentile" in page
    (line,) = (line for line in page.split("\n") if line.startswith("  TTFT"))
    assert line.split() == ["TTFT", "3", "1.33", "s", "1", "s?", "2", "s?", "2", "s?", "2", "s?", "2", "s?", "2", "s"]
    assert "failed   failed   failed" in page


def test_a_line_that_says_the_same_as_another_is_left_out() -> None:
    def labels(**more: Any) -> list[str]:
        page = render_text(summarize(run(), [batch([request(11, [1, 2, 4], [1, 1, 1], **more)])]))
        return re.findall(r"^  (TTFT|answer TTFT|ITL|chunk gap) ", page, re.MULTILINE)

    assert labels(ttft_answer_ns=1_000_000_000) == ["TTFT", "ITL"]
    assert labels(ttft_answer_ns=1_000_000_001) == ["TTFT", "ITL", "answer TTFT"], "shown alike, and yet not the same"
    assert labels(ttft_answer_ns=None, chunk_tokens=[1, 2, 1]) == ["TTFT", "ITL", "chunk gap"]


def test_text_from_outside_cannot_leave_its_line() -> None:
    hostile_workload = {"name": HOSTILE, "warnings": [HOSTILE], "filters": {HOSTILE: 1}}
    rows = [request(11, outcome="http_error", error=HOSTILE + "\nVALID: all is well\r"), request(12, [1], [1])]
    workers = [health([health_row(11, worker_id=HOSTILE)])]
    page = render_text(summarize(run(run_name=HOSTILE, workload=hostile_workload), [batch(rows)], workers=workers))
    assert not set(page) & {"\x1b", "\r", "\u202e", "\u2028"}
    assert not any(line.startswith("VALID: all") for line in page.split("\n"))


class Page(HTMLParser):
    """Counts tags, and fails on one that is not closed."""

    VOID = frozenset({"meta", "br", "link", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.parametrize("measured", [True, False])
def test_the_html_page_stands_alone(measured: bool) -> None:
    facts = run(slos=("ttft<=1s",))
    text = render_html(summarize(facts, [batch(MIXED)] if measured else []), facts)
    page = Page(text)
    assert "script" not in page.tags
    assert all(value is not None and value.startswith("#") for name, value in page.attributes if name == "href")
    assert not [value for name, value in page.attributes if name == "src" or name.startswith("on")]
    assert "url(" not in text
    assert "@import" not in text
    assert page.tags.index("section") < page.tags.index("table")
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_text_from_outside_is_escaped_everywhere() -> None:
    rows = [
        request(11, outcome="http_error", error=HOSTILE),
        request(12, [1, 2], [1, 1], stamp_source=HOSTILE, token_source=HOSTILE),
    ]
    stages = [{"stage": 0, "name": HOSTILE, "stage_kind": "hold", **interval(10, 20)}]
    facts = run(
        run_name=HOSTILE,
        tags={HOSTILE: HOSTILE},
        stages=stages,
        command=HOSTILE,
        versions={HOSTILE: HOSTILE},
        hosts=[HOSTILE],
        stopped_early=HOSTILE,
        workers={"expected": 2, "missing": [HOSTILE]},
        workload={"name": HOSTILE, "warnings": [HOSTILE], "filters": {HOSTILE: 1}},
    )
    facts["run_id"] = HOSTILE
    workers = [health([health_row(11, worker_id=HOSTILE, host=HOSTILE)])]
    text = render_html(summarize(facts, [batch(rows)], workers=workers), facts)
    page = Page(text)
    assert "script" not in page.tags
    assert "<script" not in text
    words = "".join(page.words)
    # Shown, and not executed by the template either.
    assert words.count("<script>alert(1)</script>&\"'") >= 10
    assert "{{ 7*7 }}" in words
    assert "49{%" not in words


def test_the_html_page_has_the_numbers_of_the_summary() -> None:
    summary = mixed_summary()
    words = "".join(Page(render_html(summary, run(command=["locust", "-f", "my chat.py"]))).words)
    for expected in (
        "p50(e2e)<=3s",
        "http_error",
        "HTTP 503: overloaded",
        "locust -f 'my chat.py'",
        "GuideLLM",
        "hold (8 users)",
    ):
        assert expected in words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0 ms"),
        (0.0000123, "12.3 µs"),
        (0.00123456, "1.23 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (12.345, "12.3 s"),
        (123.456, "123 s"),
        (1234.56, "1,235 s"),
    ],
)
def test_times_have_three_digits_and_a_unit_that_fits(value: float | None, text: str) -> None:
    assert figures.time(value) == text


def test_rates_and_shares() -> None:
    assert [figures.rate(value) for value in (None, 0.0, 0.0123, 12.34, 999.4, 12345.6)] == [
        "–",
        "0",
        "0.0123",
        "12.3",
        "999",
        "12,346",
    ]
    assert [figures.share(value) for value in (None, 0.0, 0.00001, 0.1234, 1.0)] == [
        "–",
        "0 %",
        "0.001 %",
        "12.3 %",
        "100 %",
    ]
