"""The page with its charts as text: what is in it, what may run in it, how large it is."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

from tests.report.big_run import Size, described, measured, page
from vllm_locust.report.html import render_html

HOSTILE = "</script><script>alert(1)</script><!--<script>&\"'\u2028\u2029{{7*7}}\x1b[31m"
MEGABYTE = 1_000_000


class Elements(HTMLParser):
    """Reads as a browser does: the text of a script ends with the first ``</script``."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.policy = ""
        self.ids: set[str] = set()
        self.loads: list[str] = []
        self.handlers: list[str] = []
        self._inside = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids.add(found.get("id") or "")
        self.loads += [f"{tag} {name}" for name in ("src", "srcset", "data", "action") if name in found]
        self.loads += [f"{tag} href" for value in [found.get("href")] if value is not None and value[:1] != "#"]
        self.handlers += [name for name in found if name.startswith("on")]
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append((found, ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._inside:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data


def test_the_data_of_the_charts_stands_in_the_page_as_it_is() -> None:
    size = Size(name=HOSTILE, error=HOSTILE)
    found, charts = measured(size)
    data, library, ours = Elements(render_html(found.summary, described(size), charts)).scripts
    assert data[0] == {"type": "application/json", "id": "data"}
    assert json.loads(data[1]) == charts
    assert any(HOSTILE in span["name"] for span in charts["spans"])
    assert not set(data[1]) & set("<>&\u2028\u2029")
    assert (library[0], ours[0]) == ({}, {})
    assert "echarts" in library[1]
    assert HOSTILE not in library[1] + ours[1]


def test_only_the_two_scripts_of_the_report_may_run_and_nothing_is_fetched() -> None:
    elements = Elements(page(Size(name=HOSTILE, error=HOSTILE)))
    directives = dict(part.strip().split(" ", 1) for part in elements.policy.split(";"))
    hashes = [f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for _, text in elements.scripts[1:]]
    assert directives == {
        "default-src": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "style-src": "'unsafe-inline'",
        "script-src": " ".join(hashes),
    }
    assert elements.loads == []
    assert elements.handlers == []


def test_every_chart_has_its_place_and_the_tables_need_no_script() -> None:
    size = Size()
    text = page(size)
    places = {"load-curve", "course", "ttft-course", "e2e-course", "gap-map", "percentiles", "by-prompt", "by-output"}
    assert places | {"failures-course", "course-gpu", "percentiles-of"} <= Elements(text).ids
    without = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert without.count("<table>") >= 10
    assert len(without) < 200_000
    assert "<noscript>" in without
    found, _ = measured(size)
    tables_only = render_html(found.summary, described(size))
    assert Elements(tables_only).scripts == []
    assert not places & Elements(tables_only).ids


def test_the_same_run_gives_the_same_bytes() -> None:
    assert page(Size()) == page(Size())


def test_a_page_of_a_very_large_run_is_small() -> None:
    """The tables of all stages and workers, and the charts, whatever the number of requests, tokens and samples."""
    small, large = (
        len(page(size).encode())
        for size in (
            Size(requests=3000, tokens=10, length_s=1200, stages=40, gpus=40, workers=100, engines=2),
            Size(requests=60_000, tokens=10, length_s=1200, stages=40, gpus=40, workers=100, engines=2),
        )
    )
    assert large < 5 * MEGABYTE
    assert large < 1.2 * small, "twenty times the requests"


def test_a_part_of_the_configuration_that_is_too_long_is_cut_and_says_so() -> None:
    size = Size()
    found, charts = measured(size)
    text = render_html(found.summary, described(size) | {"workers": {"ids": ["w" * 50] * 2000}}, charts)
    assert text.count("Cut here; the whole of it is in run.json.") == 1
    assert "Cut here" not in page(size)
