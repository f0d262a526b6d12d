from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_locust.arrival import ArrivalProcess
from vllm_locust.config import RunConfig, Target, Timeouts
from vllm_locust.duration import parse_duration_ns
from vllm_locust.errors import UsageError
from vllm_locust.load_profile import Quantity
from vllm_locust.option_values import parse_fraction
from vllm_locust.protocol import Api

HOST = "http://127.0.0.1:8000"


def built(host: str | None = HOST, run_time_s: float | None = None, **options: Any) -> RunConfig:
    return RunConfig.from_options(options, host=host, run_time_s=run_time_s)


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("500ms", 500_000_000),
        ("2s", 2_000_000_000),
        ("1m", 60_000_000_000),
        ("1m30s", 90_000_000_000),
        ("1.5", 1_500_000_000),
        ("0", 0),
        ("250us", 250_000),
    ],
)
def test_durations(text: str, ns: int) -> None:
    assert parse_duration_ns(text) == ns


@pytest.mark.parametrize("text", ["", "soon", "-1s", "1s2", "s", "1 fortnight", "١s"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration_ns(text)


@pytest.mark.parametrize("text", ["99999999999999h", "87601h", "9" * 40])
def test_no_duration_is_longer_than_ten_years(text: str) -> None:
    assert parse_duration_ns("87600h") == 3650 * 86_400 * 10**9
    with pytest.raises(ValueError, match="longer than ten years; write a shorter time"):
        parse_duration_ns(text)


def test_names_that_are_not_utf8_are_refused() -> None:
    with pytest.raises(UsageError) as refused:
        built(run_name="a\udcff", tag=["ok=ü", "k=\udcfe"])
    assert refused.value.problems == (
        "--run-name: 'a\\udcff' is not UTF-8; write it in UTF-8, or in ASCII",
        "--tag: 'k=\\udcfe' is not UTF-8; write it in UTF-8, or in ASCII",
    )


def test_fractions() -> None:
    assert parse_fraction("5%") == 0.05
    assert parse_fraction("0.25") == 0.25
    for text in ("101%", "-1", "nan", "x"):
        with pytest.raises(ValueError):  # noqa: PT011 - the message is Python's own for some
            parse_fraction(text)


@pytest.mark.parametrize(
    ("text", "url", "authority"),
    [
        ("http://host:8000", "http://host:8000", "host:8000"),
        ("http://host:8000/v1", "http://host:8000", "host:8000"),
        ("http://host:8000/v1/", "http://host:8000", "host:8000"),
        ("https://host/openai/v1", "https://host/openai", "host"),
        ("http://host", "http://host", "host"),
        ("http://[::1]:8000/v1", "http://[::1]:8000", "[::1]:8000"),
        ("unix:///run/vllm.sock", "unix:///run/vllm.sock", "localhost"),
    ],
)
def test_targets(text: str, url: str, authority: str) -> None:
    target = Target.parse(text)
    assert (target.url, target.authority) == (url, authority)


@pytest.mark.parametrize(
    "text", ["host:8000", "ftp://host", "http://", "http://u:p@host", "http://host/?x=1", "unix://"]
)
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(ValueError, match="address"):
        Target.parse(text)


@pytest.mark.parametrize(
    ("flag", "address"),
    [
        (flag, form.format(scheme=scheme))
        for flag, scheme in (("target", "http"), ("host", "http"), ("proxy", "http"), ("redis_url", "redis"))
        for form in (
            "{scheme}://user:hunter2@127.0.0.1",
            "ftp://user:hunter2@127.0.0.1",
            "user:hunter2@127.0.0.1",
            "{scheme}:user:hunter2@h",
            "{scheme}://user:hunter2@h:99999/x",
            "{scheme}://user:hunter2@h/?x=1#y",
            "{scheme}://user:x#hunter2@h",
            "{scheme}://user:x/hunter2@h",
            "{scheme}://[user:hunter2@h",
            "{scheme}://user:hunter2\u2100@h",
            "{scheme}://:hunter2@h",
        )
    ],
)
def test_no_message_repeats_a_password(flag: str, address: str) -> None:
    options: dict[str, Any] = {"host": address} if flag == "host" else {flag: address}
    if flag == "target":
        options = {"target": [address]}
    with pytest.raises(UsageError) as caught:
        built(**options)
    (problem,) = caught.value.problems
    assert problem.startswith(f"--{flag.replace('_', '-')}: ")
    assert "must not hold a" in problem
    assert "hunter2" not in problem


def test_a_user_alone_is_nothing_to_hide_from_redis_but_is_from_others() -> None:
    assert built(redis_url="redis://user@h/0").redis_url == "redis://user@h/0"
    assert built(host="unix:///run/a@b.sock").targets[0].socket_path == "/run/a@b.sock"
    with pytest.raises(UsageError) as both:
        built(host="http://user@h", proxy="http://user@h")
    assert ["must not hold a user or password" in problem for problem in both.value.problems] == [True, True]
    with pytest.raises(UsageError) as caught:
        built(redis_url="hunter2@h")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("port", ["abc", "0", "-1", "65536", "8000:1", "9" * 5000])
def test_a_port_that_no_server_can_have(port: str) -> None:
    with pytest.raises(UsageError, match="names no possible port; write HOST:PORT with a port from 1 to 65535"):
        built(host=f"http://h:{port}")


@pytest.mark.parametrize("host", ["http://a..b:8000", "http://.a", f"http://{'a' * 64}.b"])
def test_a_name_that_no_host_can_have(host: str) -> None:
    with pytest.raises(UsageError, match="names no possible host") as caught:
        built(host=host)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("proxy", ["http://h:x", "http://h:99999", "https://h:1", "h:1"])
def test_what_is_no_proxy(proxy: str) -> None:
    with pytest.raises(UsageError, match="is not a proxy"):
        built(proxy=proxy)


def test_defaults() -> None:
    config = built()
    assert config.targets == (Target.parse(HOST),)
    assert (config.api, config.workload, config.transport) == (Api.CHAT, "sharegpt", "kernel")
    assert config.stream
    assert config.window_ns is None


def test_options_become_values() -> None:
    config = built(
        run_time_s=90,
        model="m",
        api="completions",
        max_tokens="128",
        force_length=True,
        no_stream=True,
        extra_body='{"temperature": 0}',
        think_time="1s-3s",
        seed="0",
        max_failures="10%",
        slo=["ttft<=2s"],
        tag=["gpus=2", "note=a=b"],
        timeout_connect="1s",
        timeout_first_token="2s",
        timeout_idle="3s",
        timeout_total="none",
    )
    assert config.window_ns == 90_000_000_000
    assert config.api is Api.COMPLETIONS
    assert config.max_tokens == 128
    assert config.force_length
    assert not config.stream
    assert config.extra_body == {"temperature": 0}
    assert config.think_time_ns == (1_000_000_000, 3_000_000_000)
    assert config.seed == 0
    assert config.max_failures == 0.1
    assert config.slos == ("ttft<=2s",)
    assert config.tags == {"gpus": "2", "note": "a=b"}
    assert config.timeouts == Timeouts(1_000_000_000, 2_000_000_000, 3_000_000_000, None)


def test_replicas_take_the_place_of_the_host() -> None:
    config = built(target=["http://a:1", "http://b:2/v1"])
    assert [target.url for target in config.targets] == ["http://a:1", "http://b:2"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("extra_body", '{"temperature": NaN}'),
        ("extra_body", "[" * 3000),
        ("extra_body", "[]"),
        ("max_tokens", "99999999999999999999"),
        ("max_tokens", "9" * 5000),
        ("warmup_time", "9" * 400),
        ("ttl", "99999999999999h"),
        ("ttl", "0"),
        ("ttl", "999ms"),
        ("timeout_connect", "0"),
        ("timeout_first_token", "0s"),
        ("timeout_idle", "0"),
        ("timeout_total", "0.0"),
        ("proxy", "http://a:99999"),
    ],
)
def test_values_beyond_all_bounds_are_one_problem(option: str, value: str) -> None:
    with pytest.raises(UsageError) as caught:
        RunConfig.from_options({option: value}, host=HOST, run_time_s=None)
    (problem,) = caught.value.problems
    assert problem.startswith(f"--{option.replace('_', '-')}: ")
    assert len(problem) < 250


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        built(host=None, api="x", max_tokens="0", slo=["nonsense"], tag=["x"], cert_file="only", think_time="3s-1s")
    flags = [problem.split(":")[0] for problem in caught.value.problems]
    assert flags == [
        "--host",
        "--api",
        "--max-tokens",
        "--think-time",
        "--tag",
        "--slo",
        "--cert-file and --key-file",
    ]


def problems_of(run_time_s: float | None = None, **options: Any) -> tuple[str, ...]:
    with pytest.raises(UsageError) as caught:
        built(run_time_s=run_time_s, **options)
    return caught.value.problems


def test_a_rate_makes_an_open_loop() -> None:
    config = built(rate="12.5", run_time_s=60)
    assert config.profile is not None
    assert (config.profile.quantity, config.profile.length_ns) == (Quantity.RATE, 60_000_000_000)
    assert (config.arrival, config.burstiness, config.when_full) == (ArrivalProcess.POISSON, 1.0, "queue")
    assert config.open_loop
    endless = built(rate="12.5").profile
    assert endless is not None
    assert endless.length_ns is None


def test_stages_of_users_and_no_profile_are_closed_loops() -> None:
    staged = built(user_stages="8:60s,16:60s")
    assert staged.profile is not None
    assert staged.profile.quantity is Quantity.USERS
    assert not staged.open_loop
    assert built().profile is None
    assert not built(rate="", arrival="", burstiness="").open_loop


def test_a_trace_is_an_open_loop_without_a_profile() -> None:
    config = built(arrival="trace", run_time_s=60)
    assert config.open_loop
    assert config.profile is None


def test_a_shape_file(tmp_path: Path) -> None:
    file = tmp_path / "shape.yaml"
    file.write_text("quantity: rate\nstages:\n- {shape: hold, value: 10, length: 60s}\n", encoding="utf-8")
    assert built(shape=str(file)).profile == built(rate_stages="10:60s").profile
    file.write_text("stages:\n- {shape: hold, value: 10}\n- 5\n", encoding="utf-8")
    missing, no_mapping = problems_of(shape=str(file))
    assert missing.startswith(f"--shape {file}: stages, entry 1: length is missing")
    assert no_mapping.startswith(f"--shape {file}: stages, entry 2: it is not a mapping")
    file.write_text("- 5", encoding="utf-8")
    assert problems_of(shape=str(file)) == (
        f"--shape: shape {file} must be a mapping of keys to values, starting with quantity; correct it",
    )
    assert problems_of(shape=str(tmp_path / "none")) == (
        f"--shape: shape {tmp_path / 'none'} cannot be read (No such file or directory); check the path",
    )


@pytest.mark.parametrize(
    ("options", "arrival", "burstiness"),
    [
        ({"arrival": "constant"}, ArrivalProcess.CONSTANT, 1.0),
        ({"arrival": "gamma"}, ArrivalProcess.GAMMA, 1.0),
        ({"arrival": "gamma", "burstiness": "0.5"}, ArrivalProcess.GAMMA, 0.5),
        ({"burstiness": "4"}, ArrivalProcess.GAMMA, 4.0),
    ],
)
def test_arrivals(options: dict[str, Any], arrival: ArrivalProcess, burstiness: float) -> None:
    config = built(rate="10", **options)
    assert (config.arrival, config.burstiness) == (arrival, burstiness)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"rate": "10", "rate_stages": "1:1"}, "--rate and --rate-stages: each of them sets the load"),
        ({"user_stages": "1:1", "shape": "x"}, "--user-stages and --shape: each of them sets the load"),
        ({"rate_stages": "1:1", "run_time_s": 5}, "-t with --rate-stages: "),
        ({"user_stages": "1:1", "run_time_s": 5}, "-t with --user-stages: "),
        ({"rate": "0"}, "--rate: a rate of 0 sends nothing"),
        ({"rate": "fast", "arrival": "x"}, "--rate: 'fast' is not a number"),
        ({"rate": "10", "run_time_s": 1e8}, "--rate: stage 10/s: its length"),
        ({"rate": "10", "run_time_s": 1e12}, "-t: the window is longer than ten years"),
        ({"run_time_s": 10**400}, "-t: the window is longer than ten years"),
        ({"rate": "0.0000000001"}, "--rate: stage 1e-10/s: the least rate is 0.001/s"),
        ({"rate_stages": "10"}, "--rate-stages: '10' has no length"),
        ({"user_stages": "0.5:1s"}, "--user-stages: 0.5 users cannot be"),
        ({"rate": "10", "arrival": "bursty"}, "--arrival: 'bursty' is not one of constant, poisson, gamma, trace"),
        ({"arrival": "poisson"}, "--arrival poisson: there is no rate"),
        ({"arrival": "constant", "user_stages": "1:1"}, "--arrival constant: there is no rate"),
        ({"arrival": "trace", "rate": "10"}, "--arrival trace with --rate: a trace has times of its own"),
        ({"arrival": "trace", "user_stages": "1:1"}, "--arrival trace with --user-stages: "),
        ({"burstiness": "2"}, "--burstiness: there is no rate"),
        ({"burstiness": "2", "arrival": "poisson", "rate": "10"}, "--burstiness with --arrival poisson: only gamma"),
        ({"burstiness": "2", "arrival": "trace"}, "--burstiness with --arrival trace: only gamma"),
        ({"burstiness": "0", "rate": "10"}, "--burstiness: '0' is not a number from 0.01 to 1,000,000"),
        ({"burstiness": "nan", "rate": "10"}, "--burstiness: 'nan' is not a number"),
        ({"burstiness": "high", "rate": "10"}, "--burstiness: 'high' is not a number"),
        ({"when_full": "wait", "rate": "10"}, "--when-full: 'wait' is not one of queue, drop"),
        ({"when_full": "drop"}, "--when-full drop: only an open loop"),
        ({"think_time": "1s", "rate": "10"}, "--think-time in an open loop: "),
        ({"think_time": "1s", "arrival": "trace"}, "--think-time in an open loop: "),
        ({"patience": "0s"}, "--patience: nobody gives up before they began"),
        ({"patience": "-3"}, "--patience: '-3' is below 0; write a time"),
        ({"patience": "9s-2s"}, "--patience: the first time of the range is the longer one"),
        ({"retries": "-1"}, "--retries: '-1' is not a whole number"),
        ({"retries": "101"}, "--retries: 101 attempts more"),
    ],
)
def test_what_makes_no_load(options: dict[str, Any], problem: str) -> None:
    (told,) = problems_of(**options)
    assert told.startswith(problem)


def test_faults_of_the_load_are_told_with_all_others() -> None:
    told = problems_of(rate="10", burstiness="2", arrival="constant", api="x", retries="many", run_time_s=5)
    assert [problem.split(":")[0] for problem in told] == ["--api", "--retries", "--burstiness with --arrival constant"]


def test_patience_and_retries() -> None:
    assert (built().patience_ns, built().retries) == (None, 0)
    assert built(patience="none", retries="3").patience_ns is None
    config = built(patience="10s-1m", retries="3", rate="10", when_full="drop")
    assert (config.patience_ns, config.retries) == ((10_000_000_000, 60_000_000_000), 3)
    assert built(patience="500ms").patience_ns == (500_000_000, 500_000_000)


def test_json_round_trip_of_a_load() -> None:
    loads: tuple[dict[str, Any], ...] = (
        {"rate_stages": "10:60s,10-50:2m", "burstiness": "0.5", "patience": "1s-2s", "retries": "2"},
        {"user_stages": "8:60s", "think_time": "1s"},
        {"arrival": "trace", "when_full": "drop"},
        {"rate": "0.1"},
    )
    for options in loads:
        config = built(**options)
        assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_json_round_trip() -> None:
    config = built(
        target=["http://a:1", "unix:///x"], extra_body='{"a": [1]}', think_time="1s-2s", tag=["k=v"], slo=["ttft<=1s"]
    )
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
