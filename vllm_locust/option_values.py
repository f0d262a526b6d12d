"""What the text of an option comes to, one parser for each kind. All raise ValueError, with the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import SplitResult, urlsplit

import orjson

from vllm_locust.duration import parse_duration_ns
from vllm_locust.protocol import Api

MAX_RETRIES = 100


def parse_fraction(text: str) -> float:
    """``5%`` or ``0.05``. Raises ValueError outside 0-1."""
    value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    if not 0 <= value <= 1:
        raise ValueError(f"{text!r} is not a share; write 5% or 0.05")
    return value


def timeout_ns(text: str) -> int | None:
    if text == "none":
        return None
    limit_ns = parse_duration_ns(text)
    if not limit_ns:
        raise ValueError("it would end every request before it began; write a time above 0, or none")
    return limit_ns


def _ttl_ns(text: str) -> int:
    ttl_ns = parse_duration_ns(text)
    if ttl_ns < 1_000_000_000:
        raise ValueError("Redis would forget the run before it is merged; write at least 1s, such as 24h")
    return ttl_ns


def _positive(text: str) -> int:
    value = _natural(text)
    if value < 1:
        raise ValueError(f"{text!r} is not a whole number of at least 1")
    return value


def _natural(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise ValueError(f"{text[:40]!r} is not a whole number of at least 0 and below a billion")
    return int(text)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
        orjson.dumps(value)
    except (orjson.JSONDecodeError, TypeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError('not a JSON object; write for example {"temperature": 0}')
    return value


def _duration_range_ns(text: str) -> tuple[int, int]:
    if text.lstrip().startswith("-"):
        raise ValueError(f"{text[:40]!r} is below 0; write a time such as 2s, or a range such as 1s-3s")
    low, dash, high = text.partition("-")
    first = parse_duration_ns(low)
    last = parse_duration_ns(high) if dash else first
    if first > last:
        raise ValueError("the first time of the range is the longer one; swap them")
    return first, last


def _patience(text: str) -> tuple[int, int] | None:
    if text == "none":
        return None
    low, high = _duration_range_ns(text)
    if not low:
        raise ValueError("nobody gives up before they began; write a time above 0, or none")
    return low, high


def _retries(text: str) -> int:
    value = _natural(text)
    if value > MAX_RETRIES:
        raise ValueError(f"{value} attempts more at one request are no test; write at most {MAX_RETRIES}")
    return value


def _proxy(text: str) -> str:
    if text == "env":
        return text
    if "@" in text:
        raise ValueError(
            "a proxy address must not hold a user or password; put it into HTTPS_PROXY and write --proxy env"
        )
    parts = urlsplit(text)
    if parts.scheme != "http" or not parts.hostname or not _has_port_number(parts):
        raise ValueError(f"{text!r} is not a proxy; write http://HOST:PORT, or env to take the proxy variables")
    return text


def _has_port_number(parts: SplitResult) -> bool:
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False


def _redis_url(text: str) -> str:
    scheme, _, rest = text.partition("://")
    if ":" in (rest or scheme).rpartition("@")[0]:
        raise ValueError("the address must not hold a password; use --redis-password-file")
    if scheme not in ("redis", "rediss", "unix") or not rest:
        raise ValueError("write redis://HOST:PORT/DB, rediss://… for TLS or unix:///path")
    return text


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return parse


PARSERS: dict[str, Callable[[str], Any]] = {
    "model": str,
    "api": lambda text: Api(_choice(*Api)(text)),
    "workload": str,
    "tokenizer": str,
    "max_tokens": _positive,
    "token_detail": _choice("auto", "on", "off"),
    "transport": _choice("kernel", "sse", "openai"),
    "proxy": _proxy,
    "seed": _natural,
    "think_time_ns": _duration_range_ns,
    "patience_ns": _patience,
    "retries": _retries,
    "when_full": _choice("queue", "drop"),
    "warmup_requests": _natural,
    "warmup_time_ns": parse_duration_ns,
    "drain_timeout_ns": parse_duration_ns,
    "max_failures": parse_fraction,
    "collect": _choice("none", "host", "gpus"),
    "redis_url": _redis_url,
    "ttl_ns": _ttl_ns,
    "progress": _choice("auto", "off", "json"),
    "run_dir": str,
    "run_name": str,
}
OPTION_OF = {name: name.removesuffix("_ns") for name in PARSERS}
