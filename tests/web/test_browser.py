"""The dashboard and the tab in a real browser, with master and workers of their own against the simulated server."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from tests.run.simulated import FAST, OPEN_LOOP, free_port, get, processes, simserver, start_locust, wait_for_web
from tests.web.browser import browser_page

pytestmark = pytest.mark.timeout(300)

HOSTILE = "<img src=x onerror=document.title='taken'>"
LOGIN = str(Path(__file__).parent / "login_locustfile.py")


@contextmanager
def web_master(directory: Path, url: str, *flags: str, locustfile: str, **extra: str) -> Iterator[str]:
    """The address of a master's web UI with two workers."""
    port = free_port()
    web = f"http://127.0.0.1:{port}"
    fixed = ("--web-host", "127.0.0.1", "--web-port", str(port), "--run-dir", "run", *processes(2))
    load = start_locust(directory, url, *fixed, *flags, locustfile=locustfile, **extra)
    try:
        wait_for_web(f"{web}/login", load)
        yield web
    finally:
        os.killpg(load.pid, signal.SIGKILL)
        output = load.communicate()[0]
        (directory / "locust.log").write_text(output, encoding="utf-8")
    assert "Traceback" not in output, output


def await_stats(page: Page, web: str, condition: Callable[[Any], bool], timeout_s: float = 60) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        stats = json.loads(page.request.get(f"{web}/llm/stats.json").text())
        if condition(stats):
            return stats
        time.sleep(0.3)
    raise AssertionError(f"it did not come to that within {timeout_s} s: {stats}")


def shown(page: Page, chart: str) -> dict[str, dict[float, float | None]]:
    """What a chart draws: by series, value by time."""
    series = page.evaluate("id => LlmCharts.shown(id)", chart)
    return {name: {pair[0]: pair[1] for pair in data} for name, data in series.items()}


CHARTED = {
    ("rate", "offered"): ("offered_rps", 1),
    ("rate", "achieved"): ("achieved_rps", 1),
    ("rate", "goodput"): ("goodput_rps", 1),
    ("flight", "in flight"): ("in_flight", 1),
    ("ttft", "p50"): ("ttft_p50_s", 1e3),
    ("ttft", "p99"): ("ttft_p99_s", 1e3),
    ("ttft", "from schedule p99"): ("ttft_from_schedule_p99_s", 1e3),
    ("tpot", "TPOT p50"): ("tpot_p50_s", 1e3),
    ("tpot", "ITL p99"): ("itl_p99_s", 1e3),
    ("e2e", "p90"): ("e2e_p90_s", 1e3),
    ("tokens", "input"): ("input_tokens_per_s", 1),
    ("tokens", "output"): ("output_tokens_per_s", 1),
    ("server", "running"): ("server_requests_running", 1),
    ("server", "KV cache %"): ("server_kv_cache_usage", 100),
    ("generator", "schedule lag p99"): ("schedule_lag_p99_s", 1e3),
    ("generator", "loop lag max"): ("loop_lag_max_s", 1e3),
    ("generator", "CPU max %"): ("cpu_fraction_max", 100),
}


def assert_charts_are_the_json(page: Page, stats: Any) -> None:
    points = stats["history"]["points"]
    assert len(points) >= 5
    for (chart, name), (key, scale) in CHARTED.items():
        drawn = shown(page, chart)[name]
        compared = 0
        for point in points:
            if point["t_s"] in drawn:
                expected = point.get(key)
                assert drawn[point["t_s"]] == (None if expected is None else pytest.approx(expected * scale)), key
                compared += expected is not None
        assert compared >= 3, f"{name} of {chart} shows hardly anything"


def cells(page: Page, table: str) -> list[list[str]]:
    rows: list[list[str]] = page.evaluate(
        "id => [...document.querySelectorAll(`#${id} tr`)].slice(1).map(r => [...r.cells].map(c => c.textContent))",
        table,
    )
    return rows


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_an_open_loop_from_the_dashboard_to_its_summary(tmp_path: Path) -> None:
    with (
        simserver(tmp_path, *FAST, "--served-model-name", HOSTILE, "--fault", "status:share=0.2") as server,
        browser_page(tmp_path / "profile") as (page, errors),
        web_master(tmp_path, server.url, locustfile=OPEN_LOOP, VLLM_LOCUST_METRICS_URL="") as web,
    ):
        await_stats(page, web, lambda stats: stats["workers_connected"] == 2)
        page.goto(f"{web}/llm")
        page.select_option("select[name=load_kind]", "rate")
        page.fill("input[name=rate]", HOSTILE)
        page.click("#go")
        page.wait_for_selector("#banner:not([hidden])")
        told = page.inner_text("#banner")
        assert "--rate" in told
        assert "<img" in told
        page.fill("input[name=rate]", "15")
        page.fill("input[name=run_time]", "9s")
        page.fill("input[name=slo]", "ttft<=2s, e2e<=9s, p50(ttft)<=1us")
        page.click("summary")
        for name, value in {"warmup_requests": "0", "max_tokens": "20", "run_name": HOSTILE}.items():
            page.fill(f"input[name={name}]", value)
        page.click("#go")
        page.wait_for_selector("#live:not([hidden])")
        assert page.is_hidden("#banner")
        await_stats(page, web, lambda stats: stats["totals"]["finished"] > 60)
        page.wait_for_timeout(1500)
        assert_charts_are_the_json(page, json.loads(page.request.get(f"{web}/llm/stats.json").text()))
        assert shown(page, "failures")["http_error"]
        tab = page.context.new_page()
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.goto(f"{web}/?tab=llm")
        tab.wait_for_selector("text=TTFT from schedule")
        tab.click("#llm-link")
        tab.wait_for_selector("#live:not([hidden])")
        tab.close()
        stats = await_stats(page, web, lambda stats: stats["state"] == "ready" and stats["result"] is not None)
        page.wait_for_selector("#result:not([hidden])")
        page.wait_for_timeout(1500)
        assert_charts_are_the_json(page, stats)
        summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
        assert_end_is_the_summary(page, stats, summary)
        assert_a_missed_slo_is_plain(page)
        assert HOSTILE in page.inner_text("#facts")
        assert page.title() != "taken"
        assert page.query_selector("img") is None
        assert_fits(page, tmp_path)
        assert page.request.get(f"{web}/llm/results/summary.json").json() == summary
        assert errors == []
        assert_what_is_old_is_not_shown_as_new(page)


def assert_end_is_the_summary(page: Page, stats: Any, summary: Any) -> None:
    """Of a run without warm-up every request is in the window, so that the live figures and the exact ones agree."""
    totals, phases = stats["totals"], summary["totals"]["all_phases"]
    assert totals["finished"] == phases["requests"] == summary["totals"]["requests"]["attempted"] > 100
    assert stats["outcomes"] == phases["by_outcome"]
    assert phases["by_outcome"]["http_error"] > 5
    for name in ("ok", "prompt_tokens", "output_tokens", "chunks", "coalesced_chunks"):
        assert totals[name] == phases[name], name
    assert totals["good"] == summary["totals"]["good_requests"]
    table = {row[0]: row[1:] for row in cells(page, "latency")}
    for row in stats["latency"]:
        exact = summary["totals"][f"{row['metric']}_s"]
        assert row["n"] == exact["n"], row
        assert row["max_s"] == pytest.approx(exact["max"]), row
        for label in ("p50", "p90", "p99"):
            assert row[f"{label}_s"] == pytest.approx(exact[label], rel=0.006), (row["metric"], label)
        shown_p50 = number(table[row["title"]][2])
        assert shown_p50 == pytest.approx(row["p50_s"] * 1e3, abs=0.006)
    assert stats["result"]["verdict"] == summary["verdict"]
    (stage,) = cells(page, "stages")
    assert number(stage[3]) == summary["stages"][0]["requests"]["ok"]
    assert number(stage[7]) == pytest.approx(summary["stages"][0]["ttft_from_schedule_s"]["p50"] * 1e3, abs=0.006)


def assert_a_missed_slo_is_plain(page: Page) -> None:
    assert "SLO missed" in page.inner_text("#result h2")
    assert page.get_attribute("#result h2", "class") == "invalid"
    assert "SLO missed" in page.inner_text("#verdict")
    lines = page.eval_on_selector_all("#result li.invalid", "found => found.map(one => one.textContent)")
    assert [line for line in lines if line.startswith("SLO p50(ttft)<=1us in stage 15/s: MISSED (")]


def assert_what_is_old_is_not_shown_as_new(page: Page) -> None:
    """While the next run is prepared the last one's figures are hidden; without news all is marked as old."""
    page.route("**/llm/stats.json*", lambda route: route.abort())
    page.wait_for_selector("#state:has-text('no news since')")
    assert page.evaluate("document.body.classList.contains('stale')")
    page.evaluate("stats.state = 'preparing'; draw()")
    assert page.is_hidden("#live")
    assert page.is_hidden("#verdict")
    assert page.is_visible("#stop")


def assert_fits(page: Page, directory: Path) -> None:
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.screenshot(path=directory / f"{width}.png", full_page=True)
        page.click("#theme")
        page.screenshot(path=directory / f"{width}-theme.png", full_page=True)


def test_a_closed_loop_behind_a_login_from_locusts_own_form(tmp_path: Path) -> None:
    flags = ("--web-login", "--max-tokens", "20", "--warmup-requests", "0")
    with (
        simserver(tmp_path, *FAST) as server,
        browser_page(tmp_path / "profile", dark=True) as (page, errors),
        web_master(tmp_path, server.url, *flags, locustfile=LOGIN) as web,
    ):
        for path in ("/llm", "/llm/stats.json", "/llm/metrics", "/llm/form.json", "/llm/assets/llm.js"):
            assert page.request.get(f"{web}{path}", max_redirects=0).status == 302, path
        assert page.request.post(f"{web}/swarm", form={"user_count": "1"}, max_redirects=0).status == 302
        page.goto(f"{web}/llm")
        page.fill("input[name=username]", "operator")
        page.fill("input[name=password]", "right")
        page.click("button[type=submit]")
        page.wait_for_selector("#llm-link")
        await_stats(page, web, lambda stats: stats["workers_connected"] == 2)
        start_from_locusts_form(page)
        page.goto(f"{web}/llm")
        page.wait_for_selector("#stop:not([hidden])")
        assert page.evaluate("document.documentElement.classList.contains('dark')")
        await_stats(page, web, lambda stats: stats["totals"]["finished"] > 30)
        page.click("#stop")
        stats = await_stats(page, web, lambda stats: stats["state"] == "ready")
        page.wait_for_selector("#result:not([hidden])")
        codes = [reason["code"] for reason in stats["result"]["verdict"]["reasons"]]
        assert "stopped_early" not in codes, "it had no set length"
        assert stats["run"]["slos"] == ["ttft<=2s"]
        page.goto(f"{web}/?tab=llm-workers")
        page.wait_for_selector("text=Schedule lag p99")
    assert errors == []


def start_from_locusts_form(page: Page) -> None:
    """What cannot be used is said in the form; what can starts a run."""
    page.fill("input[name=userCount]", "4")
    page.fill("input[name=spawnRate]", "4")
    page.click("text=Custom parameters")
    page.fill("input[name=rate]", "fast")
    page.click("button[type=submit]")
    page.wait_for_selector("text=--rate: 'fast' is not a number")
    page.fill("input[name=rate]", "")
    page.fill("input[name=slo]", "ttft<=2s")
    page.click("button[type=submit]")
    page.wait_for_selector("button:has-text('Stop')")


def test_what_locust_answers_reaches_no_other_site(tmp_path: Path) -> None:
    """A page of another origin, in the browser that has the UI open, neither reads nor starts anything."""
    with (
        simserver(tmp_path, *FAST) as server,
        browser_page(tmp_path / "profile") as (page, _errors),
        web_master(tmp_path, server.url, locustfile=OPEN_LOOP) as web,
    ):
        page.goto(server.url + "/version")
        tried = """async web => {
          const read = await fetch(web + "/llm/stats.json").then(() => "read", () => "blocked");
          const body = new URLSearchParams({user_count: 4, spawn_rate: 4, rate: 5});
          const order = {method: "POST", body, mode: "no-cors"};
          const sent = await fetch(web + "/swarm", order).then(() => "sent", () => "no");
          return [read, sent];
        }"""
        assert page.evaluate(tried, web) == ["blocked", "sent"]
        stats = json.loads(get(f"{web}/llm/stats.json"))
        assert (stats["state"], stats["run"]) == ("ready", None)
