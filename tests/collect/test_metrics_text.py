"""The reader of Prometheus pages against Prometheus' own parsers, and line by line where it must be more patient."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from tests.goldens import GOLDENS
from vllm_locust.collect.metrics_text import Sample, read_samples

generate_openmetrics: Any = openmetrics.generate_latest
PAGES = sorted(GOLDENS.glob("*/metrics.txt"))


class Everything:
    def __contains__(self, name: object) -> bool:
        return True


EVERYTHING = Everything()


def by_their_parser(text: str) -> list[Sample]:
    return [
        Sample(sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not math.isnan(sample.value)
    ]


def in_order(samples: list[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda sample: (sample.name, sorted(sample.labels.items())))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_real_pages_read_as_prometheus_reads_them(page: Path) -> None:
    text = page.read_text()
    mine = read_samples(text, EVERYTHING)
    assert len(mine.found) > 400
    assert mine.broken_lines == 0
    assert in_order(mine.found) == in_order(by_their_parser(text))


def test_only_wanted_names_are_read() -> None:
    read = read_samples('a 1\nab{x="y"} 2\nb{ 3', {"a"})
    assert read.found == [Sample("a", {}, 1.0)]
    assert read.broken_lines == 0, "the labels of other names are not looked at"


LABEL_VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=12)


@given(LABEL_VALUES, st.floats(allow_nan=False), st.floats(0, 1e12))
def test_whatever_a_label_holds_comes_back(value: str, gauge: float, counted: float) -> None:
    registry = CollectorRegistry()
    Gauge("g", "a gauge", ["odd"], registry=registry).labels(value).set(gauge)
    Counter("c", "a counter", ["odd"], registry=registry).labels(value).inc(counted)
    for page in (generate_latest(registry), generate_openmetrics(registry)):
        read = read_samples(page.decode(), {"g", "c_total"})
        assert read.found == [Sample("g", {"odd": value}, gauge), Sample("c_total", {"odd": value}, counted)]
        assert read.broken_lines == 0


def test_openmetrics_with_exemplars() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("h_seconds", "a histogram", ["engine"], buckets=(0.5, 1), registry=registry)
    histogram.labels("0").observe(0.25, {"trace_id": 'a"b # c}'})
    page = generate_openmetrics(registry).decode()
    assert " # {trace_id=" in page
    read = read_samples(page, EVERYTHING)
    assert read.broken_lines == 0
    values = {(one.name, one.labels.get("le")): one.value for one in read.found if not one.name.endswith("_created")}
    assert values == {
        ("h_seconds_bucket", "0.5"): 1,
        ("h_seconds_bucket", "1.0"): 1,
        ("h_seconds_bucket", "+Inf"): 1,
        ("h_seconds_count", None): 1,
        ("h_seconds_sum", None): 0.25,
    }


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("m 1", 1.0),
        ("m\t1e3", 1000.0),
        ("m{} 2 1796059559000", 2.0),
        ('m { a = "b" , } -3\r', -3.0),
        ("m +Inf", math.inf),
        ("m 0x10", None),
        ("m 1_000", None),
        ("m", None),
        ("m one", None),
        ('m{a="b} 1', None),
        ("m{a=b} 1", None),
        ('m{a="b" c="d"} 1', None),
        ("m 1 2 3", None),
    ],
)
def test_a_line_and_its_neighbours(line: str, value: float | None) -> None:
    read = read_samples(f"m 7\n{line}\nm 8", {"m"})
    assert [one.value for one in read.found] == [7.0, *([] if value is None else [value]), 8.0]
    assert read.broken_lines == (value is None)


def test_what_is_no_page_at_all() -> None:
    assert read_samples("<!doctype html>\n<p>404</p>\n", {"m"}).broken_lines == 2
    assert read_samples("", {"m"}).found == []
    assert read_samples("m NaN", {"m"}).found == []
    assert read_samples("  # HELP m text\n\n", {"m"}).broken_lines == 0


def test_a_long_broken_line_takes_no_long_time() -> None:
    """A pattern that tried every way to split it would not come back."""
    line = 'm{a="' + '\\"' * 200_000
    assert read_samples(f"{line}\nm 1", {"m"}).found == [Sample("m", {}, 1.0)]
