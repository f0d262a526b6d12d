"""``report.html`` in a browser, from disk: hostile names, every chart drawn, wide and narrow, light, dark, on paper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Dialog, Page

from tests.report.big_run import Size, page
from tests.report.rows import batch, request
from tests.report.rows import run as facts
from tests.run.simulated import FAST, LocustRun, end_of, simserver, start_locust
from tests.web.browser import browser_page, chromium
from vllm_locust.report.charts.chart_data import chart_data
from vllm_locust.report.html import render_html
from vllm_locust.report.summary import measure

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'{{7*7}}"
CHARTS = ("load-curve", "course", "ttft-course", "e2e-course", "gap-map", "percentiles", "by-prompt", "by-output")
INKED = """(id) => {
    const place = document.getElementById(id), canvas = place.querySelector("canvas");
    const shown = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    let inked = 0;
    for (let i = 3; i < shown.length; i += 4) inked += shown[i] > 0;
    const box = canvas.getBoundingClientRect();
    return { inked: inked / (shown.length / 4), width: box.width, height: box.height, room: place.clientWidth,
        layers: place.querySelectorAll("canvas").length };
}"""
CHART = "echarts.getInstanceByDom(document.getElementById('{name}'))"
PAPER = "getComputedStyle(document.body).backgroundColor"
BOXES = "[...document.body.children].map((part) => part.getBoundingClientRect()).map((box) => [box.top, box.bottom])"


@dataclass
class Opened:
    page: Page
    errors: list[str]
    dialogs: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def dismiss(self, dialog: Dialog) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()


@contextmanager
def opened(report: Path, profile: Path, *, width: int = 1280, dark: bool = False) -> Iterator[Opened]:
    """Nothing may be said on the console, asked in a dialog, or fetched but the file itself."""
    with browser_page(profile, width=width, dark=dark) as (tab, errors):
        found = Opened(tab, errors)
        tab.on("dialog", found.dismiss)
        tab.on("request", lambda request: found.requests.append(request.url))
        tab.goto(report.as_uri())
        tab.wait_for_function("document.documentElement.dataset.drawn > 0")
        yield found
        assert found.errors == []
        assert found.dialogs == []
        assert found.requests == [report.as_uri()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> LocustRun:
    """Two stages of a few seconds, in which some requests fail."""
    chromium()
    directory = tmp_path_factory.mktemp("report")
    with simserver(directory, *FAST, "--served-model-name", HOSTILE, "--fault", "status:share=0.1,code=500") as server:
        flags = (
            *("--headless", "--only-summary", "--run-dir", "run", "--user-stages", "4:3s,8:3s"),
            *("--workload", "short_chat", "--max-failures", "100%", "--warmup-requests", "4"),
            *("--run-name", HOSTILE, "--tag", f"note={HOSTILE}"),
        )
        load = start_locust(directory, server.url, *flags, VLLM_LOCUST_METRICS_URL=f"{server.url}/metrics")
        return end_of(load, directory)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of rows that hold everything: GPUs, failures with hostile words, several stages."""
    path = tmp_path_factory.mktemp("made") / "report.html"
    path.write_text(page(Size(requests=1500, name=HOSTILE, error=f"{HOSTILE}\u2028")), encoding="utf-8")
    return path


def assert_drawn(tab: Page, charts: tuple[str, ...]) -> None:
    for name in charts:
        found = tab.evaluate(INKED, name)
        assert found["inked"] > 0.005, name
        assert found["layers"] == 1, name
        assert found["width"] == pytest.approx(found["room"], abs=1), name
        assert found["height"] > 100, name


def zoom(name: str) -> str:
    return f"{CHART.format(name=name)}.getOption().dataZoom[0].start"


def test_a_real_run_with_hostile_names(run: LocustRun, tmp_path: Path) -> None:
    report = run.run_dir / "report.html"
    assert report.exists(), run.output
    assert run.summary["totals"]["requests"]["ok"] > 20
    with opened(report, tmp_path) as found:
        assert_drawn(found.page, (*CHARTS, "failures-course"))
        shown = found.page.inner_text("body")
        assert shown.count("<img src=x onerror=alert(2)>") >= 3, "the model, the name and the tag, as they are"
        assert "{{7*7}}" in found.page.inner_text(".facts")
        assert found.page.locator("script").count() == 3
        assert found.page.locator("img").count() == 0
        found.page.locator("#course").hover(position={"x": 400, "y": 80})


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_every_size_and_scheme(made: Path, tmp_path: Path, width: int, dark: bool) -> None:
    with opened(made, tmp_path, width=width, dark=dark) as found:
        tab = found.page
        assert_drawn(tab, (*CHARTS, "failures-course"))
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, "only tables scroll, inside themselves"
        assert (tab.evaluate(PAPER) == "rgb(255, 255, 255)") is not dark
        tab.select_option("#course-gpu", index=1)
        tab.select_option("#percentiles-of", value="stage:1")
        assert_drawn(tab, ("course", "percentiles"))


def test_a_run_in_which_nothing_was_ok(tmp_path: Path) -> None:
    rows = [batch([request(10 + n, outcome="http_error", http_status=500, error=HOSTILE) for n in range(9)])]
    found = measure(facts(), rows)
    report = tmp_path / "report.html"
    report.write_text(render_html(found.summary, facts(), chart_data(found, rows, None)), encoding="utf-8")
    with opened(report, tmp_path / "profile") as shown:
        assert_drawn(shown.page, ("course", "failures-course"))
        visible = shown.page.locator(".chart:visible").evaluate_all("all => all.map((one) => one.id)")
        assert visible == ["course", "failures-course"], "no empty axes"


def test_charts_over_time_zoom_together(made: Path, tmp_path: Path) -> None:
    with opened(made, tmp_path) as found:
        tab = found.page
        tab.evaluate(f"{CHART.format(name='course')}.dispatchAction({{type: 'dataZoom', start: 40, end: 60}})")
        for name in ("course", "ttft-course", "e2e-course", "gap-map", "failures-course"):
            assert tab.evaluate(zoom(name)) == pytest.approx(40), name
        tab.emulate_media(color_scheme="dark")
        assert tab.evaluate(zoom("course")) == pytest.approx(40), "also after it was drawn anew"


def test_on_paper_it_is_light_and_nothing_lies_on_top_of_anything(made: Path, tmp_path: Path) -> None:
    with opened(made, tmp_path, width=800, dark=True) as found:
        tab = found.page
        assert tab.evaluate(PAPER) != "rgb(255, 255, 255)"
        tab.emulate_media(media="print")
        assert tab.evaluate(PAPER) == "rgb(255, 255, 255)"
        assert_drawn(tab, (*CHARTS, "failures-course"))
        shown = [(top, bottom) for top, bottom in tab.evaluate(BOXES) if bottom > top]
        assert len(shown) > 30
        assert all(below[0] >= above[1] - 1 for above, below in pairwise(shown))


def test_without_a_script_the_tables_are_there(made: Path, tmp_path: Path) -> None:
    text = made.read_text(encoding="utf-8").replace("script-src", "script-src 'none'; x")
    (tmp_path / "plain.html").write_text(text, encoding="utf-8")
    with browser_page(tmp_path / "profile") as (tab, _):
        tab.goto((tmp_path / "plain.html").as_uri())
        assert tab.evaluate("document.documentElement.dataset.drawn") is None
        assert tab.locator("table:visible").count() >= 10
