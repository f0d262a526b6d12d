"""The flags that the package adds to Locust's command line, each also as ``VLLM_LOCUST_<FLAG>``."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

from vllm_locust.capacity_options import CAPACITY_FLAGS, CAPACITY_SWITCHES

GROUP = "vllm-locust: load on LLM servers"

_PREFIX: Final = "VLLM_LOCUST_"
_FOR_TESTS: Final = f"{_PREFIX}TEST_"

_SHOWN_IN_WEB_UI = frozenset(
    {
        *("--model", "--workload", "--max-tokens", "--api", "--think-time", "--warmup-requests"),
        *("--rate", "--rate-stages", "--user-stages", "--shape", "--arrival", "--burstiness", "--when-full"),
        *("--patience", "--seed", "--slo", "--warmup-time", "--drain-timeout", "--run-name"),
    }
)
"""Only these may be set from the start form. All others keep the command line's value whatever a request to /swarm
says.
"""

_TIME_SPANS: Final = frozenset(("run_time", "stop_timeout"))

WEB_OPTIONS = frozenset(flag[2:].replace("-", "_") for flag in _SHOWN_IN_WEB_UI)

_VALUES: tuple[tuple[str, str | None, str], ...] = (
    ("--model", None, "model to ask for (default: the first of /v1/models)"),
    ("--api", "chat", "chat or completions"),
    ("--workload", "sharegpt", "name of a ready workload, a workload YAML, or a ShareGPT JSON or JSONL file"),
    (
        "--tokenizer",
        None,
        "tokenizer.json, its directory or a hub name: exact prompt lengths; counts answers without usage",
    ),
    ("--max-tokens", None, "output limit of every request (default: the recorded answer's length)"),
    ("--extra-body", None, "JSON object merged into every request's body"),
    ("--token-detail", "auto", "auto, on or off: ask for usage on every chunk; auto does so where a vLLM answers"),
    ("--api-key-file", None, "file that holds the API key (else OPENAI_API_KEY)"),
    ("--ca-file", None, "PEM file with the CA of the server's certificate"),
    ("--cert-file", None, "PEM file with the client's certificate"),
    ("--key-file", None, "PEM file with the client's private key"),
    ("--transport", "kernel", "kernel, sse or openai: who reads the stream and whose clock stamps it"),
    ("--proxy", None, "http://HOST:PORT, or env to honour the proxy variables (default: no proxy)"),
    ("--rate", None, "requests per second, whatever becomes of them: an open loop, with -u as the most in flight"),
    ("--rate-stages", None, "10:60s,10-50:120s: rates to hold or to go through, and for how long (in place of -t)"),
    ("--user-stages", None, "8:60s,16:60s,16-64:5m: the same with numbers of users, in a closed loop"),
    ("--shape", None, "YAML file of stages of rate or users: hold, step, ramp, spike, sinusoid, soak"),
    (
        "--arrival",
        None,
        "constant, poisson or gamma: the gaps between requests at a rate (default: poisson); trace: the workload's "
        "own times",
    ),
    (
        "--burstiness",
        None,
        "shape of gamma gaps, implies --arrival gamma: 1 is Poisson, less comes in bursts, more is steadier",
    ),
    ("--when-full", "queue", "queue or drop: what becomes of a request that is due while all -u slots are busy"),
    ("--seed", "0", "seed of the arrivals, the prompts' order and think times"),
    ("--think-time", "0s", "pause of a user between two requests: 2s, or 1s-3s for uniform; not in an open loop"),
    ("--patience", "none", "a user gives up after so long without a first token: 30s, or 10s-60s for uniform"),
    ("--retries", "0", "further attempts after 429, 502, 503, 504 and connect errors, with back-off"),
    ("--warmup-requests", "100", "requests before the window: the first to arrive in an open loop, else to complete"),
    ("--warmup-time", "60s", "the window opens after this time at the latest"),
    ("--drain-timeout", "60s", "time for running requests to end after the window"),
    ("--timeout-connect", "10s", "limit for a connection, TLS included; none switches it off"),
    ("--timeout-first-token", "10m", "limit from send to first token"),
    ("--timeout-idle", "2m", "limit between two bytes of an answer"),
    ("--timeout-total", "none", "limit from send to the end of the answer"),
    ("--max-failures", "5%", "share of failed requests above which the run has failed (exit 1)"),
    ("--collect", "none", "gpus or host: sample the GPUs and the load, or only the load, of this host during the run"),
    ("--redis-url", None, "redis://, rediss:// or unix:// address of Redis or Valkey (default: an embedded Valkey)"),
    ("--redis-password-file", None, "file that holds the Redis password"),
    ("--ttl", "24h", "time after which the run's keys in Redis expire"),
    ("--web-names", None, "host names, with commas, under which the web UI answers over plain HTTP without a login"),
    ("--progress", "auto", "auto, off or json: lines about the run while it goes on"),
    ("--run-dir", None, "directory for the results (default: runs/<run id>)"),
    ("--run-name", None, "name of the run, shown in its report"),
)
_SWITCHES = (
    ("--force-length", "make every answer exactly as long as its limit (ignore_eos and min_tokens)"),
    ("--no-stream", "ask for whole answers instead of streams"),
    ("--insecure", "do not check the server's certificate"),
)
_REPEATABLE = (
    ("--target", "address of a replica, in place of --host; repeat it for several, used in turn"),
    ("--slo", "'ttft<=2s' per request (goodput), 'p99(e2e)<=10s' or 'good_fraction>=0.99' per stage; repeatable"),
    (
        "--metrics-url",
        "page with the server's metrics, once a second (default: /metrics of each target that has it); repeatable; "
        "none: no such",
    ),
    ("--tag", "key=value kept with the run; repeatable"),
)


_ALL_DEFAULTS: tuple[tuple[str, Any], ...] = (
    *((flag, default) for flag, default, _ in (*_VALUES, *CAPACITY_FLAGS)),
    *((flag, False) for flag, _ in (*_SWITCHES, *CAPACITY_SWITCHES)),
    *((flag, []) for flag, _ in _REPEATABLE),
)
FLAG_DEFAULTS = {flag[2:].replace("-", "_"): default for flag, default in _ALL_DEFAULTS}
"""By their names as options."""
WEB_LISTS = frozenset(flag[2:].replace("-", "_") for flag, _ in _REPEATABLE if flag in _SHOWN_IN_WEB_UI)
"""Of those the ones that may be given several times."""


def web_texts() -> dict[str, str]:
    """Each option of the start form with its help, as text for people."""
    texts = {flag: text for flag, _, text in _VALUES} | dict(_REPEATABLE)
    return {flag[2:].replace("-", "_"): text for flag, text in texts.items() if flag in _SHOWN_IN_WEB_UI}


def add_flags(parser: Any) -> None:
    """Add every flag to Locust's parser, in a group of their own."""
    group = parser.add_argument_group(GROUP)
    for flag, default, text in (*_VALUES, *CAPACITY_FLAGS):
        _add(group, flag, text, default=default)
    for flag, text in (*_SWITCHES, *CAPACITY_SWITCHES):
        _add(group, flag, text, action="store_true")
    for flag, text in _REPEATABLE:
        _add(group, flag, text, action="append", default=[])


def unknown_variables(names: Iterable[str]) -> list[str]:
    """Of the environment's variables those that look like a setting of the package and are none. Kubernetes makes some
    of its own for each service.
    """
    ours = [name for name in names if name.startswith(_PREFIX) and not name.startswith(_FOR_TESTS)]
    known = {_variable(flag) for flag, _ in _ALL_DEFAULTS}
    return sorted(name for name in ours if name not in known and not re.search("_SERVICE_|_PORT(_|$)", name))


def bound_time_spans(parser: Any) -> None:
    """Locust's own times overflow where they are absurdly long; that is a wrong value like any other."""
    for action in parser._actions:
        if action.dest in _TIME_SPANS and action.type is not None:
            action.type = functools.partial(_time_span, action.type)


def _time_span(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except OverflowError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is too long a time; write a shorter one") from None


def _variable(flag: str) -> str:
    return _PREFIX + flag[2:].replace("-", "_").upper()


def _add(group: Any, flag: str, text: str, **settings: Any) -> None:
    action = group.add_argument(flag, env_var=_variable(flag), help=text.replace("%", "%%"), **settings)
    # Locust's own add_argument sets these on the parser's actions; a group's actions need them too.
    action.include_in_web_ui = flag in _SHOWN_IN_WEB_UI
    action.is_secret = action.is_required = action.is_multiple = False
