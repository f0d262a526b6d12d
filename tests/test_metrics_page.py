"""Addresses of pages of metrics, as people write them."""

from __future__ import annotations

import pytest

from vllm_locust.config import RunConfig, Target
from vllm_locust.errors import UsageError
from vllm_locust.metrics_page import MetricsPage


@pytest.mark.parametrize(
    ("text", "url", "target"),
    [
        ("http://h:8000/metrics", "http://h:8000/metrics", "http://h:8000"),
        ("http://h:8000", "http://h:8000/metrics", "http://h:8000"),
        ("http://h:8000/", "http://h:8000/metrics", "http://h:8000"),
        ("http://h:8000/v1", "http://h:8000/metrics", "http://h:8000"),
        ("https://h/llm/v1/", "https://h/llm/metrics", "https://h/llm"),
        ("https://h:443/llm/metrics", "https://h/llm/metrics", "https://h/llm"),
        ("http://h/prometheus/metrics", "http://h/prometheus/metrics", "http://h/prometheus"),
        ("http://h:9400/stats?format=text", "http://h:9400/stats?format=text", "http://h:9400/stats?format=text"),
        ("http://h:8000/v1/metrics", "http://h:8000/v1/metrics", "http://h:8000"),
        ("http://[::1]:8000", "http://[::1]:8000/metrics", "http://[::1]:8000"),
        ("unix:///run/vllm.sock", "unix:///run/vllm.sock/metrics", "unix:///run/vllm.sock"),
    ],
)
def test_written_in_many_ways(text: str, url: str, target: str) -> None:
    page = MetricsPage.parse(text)
    assert page.url == url
    assert page.target == target


@pytest.mark.parametrize("base", ["http://h:8000", "https://h/llm", "unix:///run/vllm.sock"])
def test_a_page_names_its_server_as_the_requests_do(base: str) -> None:
    assert MetricsPage.parse(base).target == Target.parse(base).url


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("h:8000/metrics", "is not a server address; write http://HOST:PORT/metrics"),
        ("http://user:secret@h/metrics", "must not hold a user or password"),
        ("http://h/metrics#top", "is not the address of a page"),
        ("http://h/a b", "is not the address of a page"),
        ("http://a..b/metrics", "names no possible host"),
        ("http://h:99999/metrics", "[Pp]ort"),
    ],
)
def test_addresses_that_are_none(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        MetricsPage.parse(text)
    assert "secret" not in str(caught.value)


def config(*urls: str) -> RunConfig:
    return RunConfig.from_options({"metrics_url": list(urls)}, host="http://h:8000", run_time_s=None)


def test_the_flag() -> None:
    assert config().metrics_pages is None
    assert config("none").metrics_pages == ()
    two = config("http://a:1", "http://b:2/metrics", "http://a:1/metrics")
    assert [page.url for page in two.metrics_pages or ()] == ["http://a:1/metrics", "http://b:2/metrics"]
    for one in (config(), config("none"), two):
        assert RunConfig.from_json(one.to_json()) == one


def test_all_faults_of_the_flag_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        config("a", "http://b", "c")
    assert [problem.partition(" is not")[0] for problem in caught.value.problems] == [
        "--metrics-url: 'a'",
        "--metrics-url: 'c'",
    ]
    with pytest.raises(UsageError, match=r"both of http://b; give one of them"):
        config("http://b/metrics", "http://b/v1/metrics")
    with pytest.raises(UsageError, match="--metrics-url none: nothing is read with it"):
        config("none", "http://b")
