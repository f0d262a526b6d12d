"""What the start form may say, and what it comes to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_locust.errors import UsageError
from vllm_locust.run.flags import FLAG_DEFAULTS, WEB_OPTIONS
from vllm_locust.run.web.start_form import StartForm

BASE = {"user_count": ["4"], "spawn_rate": ["2"]}


class Chat:
    host = None


KEPT = {"rate": "5", "slo": ["ttft<=2s", "e2e<=9s"], "own_option": None, "warmup_requests": 4, "insecure": False}
CHANGE = {"user_count": "8", "spawn_rate": "1.5"}


def form(**given: Any) -> StartForm:
    options = FLAG_DEFAULTS | {"num_users": None, "run_time": None} | given
    environment = SimpleNamespace(
        parsed_options=SimpleNamespace(**options), available_user_classes=None, user_classes=[Chat], web_ui=None
    )
    return StartForm(environment, options, frozenset({"own_option"}), float)


def read(made: StartForm, **fields: list[str]) -> Any:
    return made.read(BASE | fields, run_time_s=None, host="http://a:1")


def test_what_it_says_holds_and_the_rest_is_the_command_lines() -> None:
    order = read(form(retries="3", rate="5"), rate=["20"], slo=["ttft<=2s, e2e<=9s", "tpot<=1s"], run_time=["90"])
    assert order.options["rate"] == "20"
    assert order.options["retries"] == "3"
    assert order.options["slo"] == ["ttft<=2s", "e2e<=9s", "tpot<=1s"]
    assert (order.run_time_s, order.host, order.user_classes) == (90.0, "http://a:1", [Chat])
    assert read(form(), host=["http://b:<2>"]).host == "http://b:2"


@pytest.mark.parametrize(
    "name", ["api_key_file", "redis_url", "run_dir", "target", "ca_file", "extra_body", "web_host", "master_bind_host"]
)
def test_what_the_form_does_not_show_is_refused_by_name(name: str) -> None:
    assert name not in WEB_OPTIONS
    with pytest.raises(UsageError, match=name):
        read(form(), **{name: ["/etc/passwd"]})


def test_an_option_of_the_locustfile_itself_may_be_set() -> None:
    read(form(), own_option=["x"])


@pytest.mark.parametrize("name", ["workload", "shape"])
def test_no_text_of_it_becomes_a_path(name: str) -> None:
    for path in ("/etc/passwd", "../workloads/sharegpt.yaml", "x.json"):
        with pytest.raises(UsageError, match=f"--{name}"):
            read(form(), **{name: [path]})
    given = read(form(**{name: "/data/mine.yaml"}), **{name: ["/data/mine.yaml"]})
    assert given.options[name] == "/data/mine.yaml"


def test_shipped_names_are_known() -> None:
    order = read(form(), workload=["short_chat"], shape=["spike"])
    assert order.options["workload"] == "short_chat"
    assert order.options["shape"].endswith("workloads/shapes/spike.yaml")
    choices = {field["name"]: field["choices"] for field in form().fields()}
    assert {"", "spike", "day"} <= set(choices["shape"])
    assert "short_chat" in choices["workload"]
    assert set(choices) == WEB_OPTIONS


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        read(form(), user_count=["-1"], spawn_rate=["inf"], run_time=["soon"], shape=["/x"])
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "number of users",
        "ramp up",
        "run time",
        "--shape",
    ]


def change(**fields: str) -> Any:
    return form(**KEPT).read_change({name: [value] for name, value in (CHANGE | fields).items()})


def test_of_a_run_that_goes_on_only_the_users_may_be_changed() -> None:
    as_it_is = {"rate": "5", "slo": "e2e<=9s, ttft<=2s", "own_option": "", "warmup_requests": "4", "shape": ""}
    assert change() == change(**as_it_is) == change(user_classes="Chat") == CHANGE


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("html_file", "/tmp/x", "html_file: the start form cannot set that"),
        ("stop_timeout", "x", "stop_timeout: the start form cannot set that"),
        ("workload", "/etc/passwd", "workload: the run that goes on keeps"),
        ("rate", "6", "rate: the run that goes on keeps"),
        ("slo", "e2e<=9s", "slo: the run"),
        ("own_option", "x", "own_option: the run"),
        ("warmup_requests", "many", "warmup_requests: the run"),
        ("run_time", "9s", "run_time: the run"),
        ("user_classes", "Other", "user_classes: the run"),
        ("user_count", "0", "number of users"),
    ],
)
def test_what_a_run_that_goes_on_keeps(name: str, value: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        change(**{name: value})


def test_the_run_time_of_the_command_line_is_not_for_stages_and_can_be_unset() -> None:
    made = form(run_time=6.0)
    assert made.given_run_time_s == 6.0
    for fields, meant in (
        ({}, 6.0),
        ({"run_time": [""]}, 6.0),
        ({"run_time": ["none"]}, None),
        ({"run_time": [""], "user_stages": ["3:1s"]}, None),
        ({"run_time": ["9"], "user_stages": ["3:1s"]}, 9.0),  # said in the form, and refused by the check
    ):
        order = made.read(BASE | fields, run_time_s=made.given_run_time_s, host=None)
        assert order.run_time_s == meant, fields


def test_a_user_class_that_there_is_not_is_refused() -> None:
    options = FLAG_DEFAULTS | {"num_users": None, "run_time": None}
    environment = SimpleNamespace(
        parsed_options=SimpleNamespace(**options),
        available_user_classes={"Chat": Chat, "Other": int},
        user_classes=[Chat],
        web_ui=SimpleNamespace(userclass_picker_is_active=True),
    )
    made = StartForm(environment, options, frozenset(), float)
    assert read(made, user_classes=["Chat"]).user_classes == [Chat]
    with pytest.raises(UsageError, match="user class: 'Nope' is not one of Chat, Other"):
        read(made, user_classes=["Chat", "Nope"])
