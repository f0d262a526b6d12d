"""The settings of one run as frozen values. ``RunConfig.from_options`` reports every fault at once, each with its fix.

Precedence is the option parser's: flag, then environment variable, then configuration file, then default. Secrets are
not here: an API key or a Redis password is read by the process that uses it, from its own file or environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self

from vllm_locust.arrival import ArrivalProcess
from vllm_locust.capacity_options import CapacityOrder, slo_problems
from vllm_locust.duration import MAX_DURATION_NS
from vllm_locust.errors import UsageError
from vllm_locust.load_options import is_open_loop, read_load_options
from vllm_locust.load_profile import LoadProfile
from vllm_locust.metrics_page import MetricsPage, read_metrics_pages
from vllm_locust.option_values import OPTION_OF, PARSERS, json_object, timeout_ns
from vllm_locust.protocol import Api, extra_body_problems
from vllm_locust.server_url import authority, port_of, split_server_url
from vllm_locust.slo import parse_slo, parse_slos
from vllm_locust.tls import TlsFiles

TransportName = Literal["kernel", "sse", "openai"]
TokenDetail = Literal["auto", "on", "off"]
WhenFull = Literal["queue", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server's base address, without ``/v1``. ``socket_path`` is set for ``unix:///path/to.sock``, ``host``
    otherwise.
    """

    scheme: Literal["http", "https", "unix"]
    host: str
    port: int
    prefix: str = ""
    socket_path: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """``http://HOST:PORT[/prefix][/v1]``, ``https://…`` or ``unix:///path``. Raises ValueError."""
        parts = split_server_url(text, "http://HOST:PORT, https://… or unix:///path")
        if parts.scheme == "unix":
            return cls(scheme="unix", host="localhost", port=0, socket_path=parts.path)
        if parts.query or parts.fragment:
            raise ValueError(f"{text!r} has a query or fragment; give the base address only")
        scheme: Literal["http", "https"] = "https" if parts.scheme == "https" else "http"
        assert parts.hostname is not None
        prefix = re.sub(r"/v1$", "", parts.path.rstrip("/"))
        return cls(scheme=scheme, host=parts.hostname, port=port_of(parts), prefix=prefix)

    @property
    def url(self) -> str:
        if self.socket_path is not None:
            return f"unix://{self.socket_path}"
        return f"{self.scheme}://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        """What goes into the Host header."""
        return self.host if self.socket_path is not None else authority(self.host, self.port, self.scheme)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Each counts in nanoseconds; None switches it off. ``idle`` counts from the last byte, the others from ``sent``
    (``connect`` from the start of the connection)."""

    connect_ns: int | None
    first_token_ns: int | None
    idle_ns: int | None
    total_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that decides what a run does, without secrets. Crosses from master to workers as JSON."""

    targets: tuple[Target, ...]
    model: str | None = None
    api: Api = Api.CHAT
    stream: bool = True
    workload: str = "sharegpt"
    tokenizer: str | None = None
    max_tokens: int | None = None
    force_length: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    token_detail: TokenDetail = "auto"
    transport: TransportName = "kernel"
    tls: TlsFiles = field(default_factory=TlsFiles)
    proxy: str | None = None
    timeouts: Timeouts = Timeouts(10_000_000_000, 600_000_000_000, 120_000_000_000, None)
    seed: int = 0
    profile: LoadProfile | None = None
    """Stages of rate (an open loop) or of users; None for as many users as Locust is told to start."""
    capacity: CapacityOrder | None = None
    """Given: the load is searched for. ``profile`` then is the load of the warm-up."""
    arrival: ArrivalProcess = ArrivalProcess.POISSON
    burstiness: float = 1.0
    when_full: WhenFull = "queue"
    think_time_ns: tuple[int, int] = (0, 0)
    """Uniform between the two; equal for a constant."""
    patience_ns: tuple[int, int] | None = None
    """How long a user waits for the first token before it gives up, uniform between the two; None: without end."""
    retries: int = 0
    warmup_requests: int = 100
    warmup_time_ns: int = 60_000_000_000
    window_ns: int | None = None
    """``-t``: the length of the measurement window; None runs until it is stopped."""
    drain_timeout_ns: int = 60_000_000_000
    max_failures: float = 0.05
    slos: tuple[str, ...] = ()
    metrics_pages: tuple[MetricsPage, ...] | None = None
    """Of the servers' own metrics; None: they are looked for beside each target."""
    collect: Literal["none", "host", "gpus"] = "none"
    """What a collector of the run's own samples on the master's host."""
    redis_url: str | None = None
    ttl_ns: int = 24 * 3_600_000_000_000
    progress: Literal["auto", "off", "json"] = "auto"
    run_dir: str | None = None
    run_name: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_options(cls, options: Mapping[str, Any], *, host: str | None, run_time_s: float | None) -> Self:
        """Build from parsed flags. Raises UsageError with every problem found."""
        problems: list[str] = []

        def take(name: str, parse: Callable[[str], Any], default: Any = None) -> Any:
            text = options.get(name)
            if text is None or text == "":
                return default
            try:
                return parse(str(text))
            except ValueError as error:
                problems.append(f"--{name.replace('_', '-')}: {error}")
                return default

        values: dict[str, Any] = {f.name: f.default for f in fields(cls)}
        values["targets"] = _targets(options.get("target"), host, problems)
        values["timeouts"] = Timeouts(
            take("timeout_connect", timeout_ns),
            take("timeout_first_token", timeout_ns),
            take("timeout_idle", timeout_ns),
            take("timeout_total", timeout_ns),
        )
        for name, parse in PARSERS.items():
            values[name] = take(OPTION_OF.get(name, name), parse, values[name])
        values["extra_body"] = take("extra_body", json_object, {})
        values["tags"] = _tags(options.get("tag") or (), problems)
        problems += _not_utf8("run-name", [values["run_name"] or ""]) + _not_utf8("tag", options.get("tag") or ())
        values["slos"] = _slos(options.get("slo") or (), problems)
        values["metrics_pages"] = read_metrics_pages(options.get("metrics_url") or (), problems)
        values["stream"] = not options.get("no_stream")
        values["force_length"] = bool(options.get("force_length"))
        if run_time_s and run_time_s > MAX_DURATION_NS / 1e9:
            problems.append("-t: the window is longer than ten years; write a shorter time")
            run_time_s = None
        values["window_ns"] = round(run_time_s * 1e9) if run_time_s else None
        load = read_load_options(options, run_time_s)
        problems += load.problems
        values |= {"profile": load.profile, "arrival": load.arrival, "burstiness": load.burstiness}
        values["capacity"] = load.capacity
        values["tls"] = TlsFiles(
            ca_file=options.get("ca_file") or None,
            cert_file=options.get("cert_file") or None,
            key_file=options.get("key_file") or None,
            insecure=bool(options.get("insecure")),
        )
        problems += _combinations(values)
        if problems:
            raise UsageError(*problems)
        return cls(**values)

    @property
    def open_loop(self) -> bool:
        """Requests are sent when a schedule says so, whatever becomes of those before them."""
        return is_open_loop(self.profile, self.arrival)

    def to_json(self) -> dict[str, Any]:
        """Strict JSON values; ``from_json`` gives the same configuration back."""
        return json.loads(json.dumps(asdict(self), allow_nan=False))  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        values = dict(data)
        values["targets"] = tuple(Target(**target) for target in data["targets"])
        values["tls"] = TlsFiles(**data["tls"])
        values["timeouts"] = Timeouts(**data["timeouts"])
        values["api"] = Api(data["api"])
        values["arrival"] = ArrivalProcess(data["arrival"])
        values["profile"] = None if data["profile"] is None else LoadProfile.from_json(data["profile"])
        values["capacity"] = None if data["capacity"] is None else CapacityOrder.from_json(data["capacity"])
        values["think_time_ns"] = tuple(data["think_time_ns"])
        values["patience_ns"] = None if data["patience_ns"] is None else tuple(data["patience_ns"])
        values["slos"] = tuple(data["slos"])
        pages = data["metrics_pages"]
        values["metrics_pages"] = None if pages is None else tuple(MetricsPage(**page) for page in pages)
        return cls(**values)


def _targets(texts: Any, host: str | None, problems: list[str]) -> tuple[Target, ...]:
    targets = []
    for flag, text in [("--target", text) for text in texts or ()] or [("--host", host)]:
        if not text:
            problems.append("--host: no server is given; write --host http://HOST:PORT")
            continue
        try:
            targets.append(Target.parse(text))
        except ValueError as error:
            problems.append(f"{flag}: {error}")
    return tuple(targets)


def _tags(texts: Any, problems: list[str]) -> dict[str, str]:
    tags = {}
    for text in texts:
        key, equals, value = str(text).partition("=")
        if not equals or not key:
            problems.append(f"--tag: {text!r} is not of the form key=value")
        tags[key] = value
    return tags


def _not_utf8(flag: str, texts: Any) -> list[str]:
    """A byte that is no UTF-8 arrives from the command line as a surrogate, which no report can hold."""
    return [
        f"--{flag}: {str(text)!a} is not UTF-8; write it in UTF-8, or in ASCII"
        for text in texts
        if any("\ud800" <= char <= "\udfff" for char in str(text))
    ]


def _slos(texts: Any, problems: list[str]) -> tuple[str, ...]:
    faults = []
    for text in texts:
        try:
            parse_slo(text)
        except ValueError as error:
            faults.append(f"--slo: {error}")
    if not faults:
        try:
            parse_slos(texts)
        except ValueError as error:
            faults.append(f"--slo: {error}")
    problems += faults
    return tuple(texts)


def _combinations(values: Mapping[str, Any]) -> list[str]:
    problems = []
    tls = values["tls"]
    if bool(tls.cert_file) != bool(tls.key_file):
        problems.append("--cert-file and --key-file: one is given without the other; give both or neither")
    if tls.insecure and tls.ca_file:
        problems.append("--insecure with --ca-file: an unchecked server needs no CA; drop one of the two")
    open_loop = is_open_loop(values["profile"], values["arrival"])
    if open_loop and values["think_time_ns"] != (0, 0):
        problems.append("--think-time in an open loop: there the schedule says when to send; drop --think-time")
    if not open_loop and values["when_full"] == "drop":
        problems.append("--when-full drop: only an open loop has arrivals to drop; give --rate, or drop the flag")
    if values["capacity"] is not None:
        problems += slo_problems(values["slos"])
    problems += extra_body_problems(values["extra_body"])
    return problems
