"""Scripted faults: what can go wrong with an answer, by name, reproducibly.

``status:code=429,retry_after=1``   another status, with vLLM's error body
``refuse_stream_options``           400 for a request that has stream options
``html`` · ``json``                 a 200 that is a page · a JSON completion where a stream was asked for
``slow_headers:s=2``                the answer begins late
``stall:after=3,s=5``               nothing is sent for s seconds after three chunks (without ``s``: for ever)
``error_event:after=0``             an error inside the stream, then [DONE]
``truncated:after=3``               the body ends cleanly without finish reason and [DONE]
``disconnect:after=3``              the connection is closed inside the body
``reset:after=3``                   the same by RST
``abort:after=3``                   finish reason "abort", as from a server that is stopped
``empty`` · ``empty_body``          finished without a token · a stream without an event
``role_only``                       the role chunk, then a clean end
``short:tokens=2``                  fewer tokens than asked for, with "stop"
``no_usage`` · ``no_done`` · ``double_done``
``line_end:style=crlf`` (or ``cr``) · ``no_space`` · ``comments`` · ``bom`` · ``multi_data``   other spellings
``merge:events=3`` · ``split:bytes=7``   several events in one write · one event over many
``close_framing``                   neither a length nor chunks: the body ends with the connection

``after`` counts token-bearing chunks; a fault whose answer is over before that never happens. For a request that is not
streamed, those that end a stream end the JSON body half way, ``stall`` comes before it, and ``error_event`` is a 500.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TypeAlias

from vllm_locust.errors import UsageError

Value: TypeAlias = int | float | str

PARAMETERS: dict[str, dict[str, type]] = {
    "status": {"code": int, "retry_after": float},
    "refuse_stream_options": {},
    "html": {},
    "json": {},
    "slow_headers": {"s": float},
    "stall": {"after": int, "s": float},
    "error_event": {"after": int},
    "truncated": {"after": int},
    "disconnect": {"after": int},
    "reset": {"after": int},
    "abort": {"after": int},
    "empty": {},
    "empty_body": {},
    "role_only": {},
    "short": {"tokens": int},
    "no_usage": {},
    "no_done": {},
    "double_done": {},
    "line_end": {"style": str},
    "no_space": {},
    "comments": {},
    "bom": {},
    "multi_data": {},
    "merge": {"events": int},
    "split": {"bytes": int},
    "close_framing": {},
}
_DEFAULTS: dict[str, dict[str, Value]] = {
    "status": {"code": 500},
    "slow_headers": {"s": 1.0},
    "short": {"tokens": 1},
    "line_end": {"style": "crlf"},
    "merge": {"events": 2},
    "split": {"bytes": 7},
}
_ERROR_STATUSES = frozenset(int(status) for status in HTTPStatus if status >= HTTPStatus.BAD_REQUEST)
ALWAYS = frozenset(
    (
        *("no_usage", "no_done", "double_done", "line_end", "no_space", "comments", "bom", "multi_data"),
        *("merge", "split", "close_framing"),
    )
)
"""Faults that happen to every stream that has them."""
AFTER_CHUNKS = frozenset(name for name, parameters in PARAMETERS.items() if "after" in parameters)


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    parameters: Mapping[str, Value] = field(default_factory=dict)

    def integer(self, name: str) -> int:
        return int(self.parameters[name])

    def seconds(self) -> float | None:
        value = self.parameters.get("s")
        return None if value is None else float(value)

    def __str__(self) -> str:
        parameters = ",".join(f"{key}={value}" for key, value in self.parameters.items())
        return f"{self.name}:{parameters}" if parameters else self.name


def parse_fault(text: str) -> Fault:
    """``name`` or ``name:key=value,…``."""
    fault, share = _parse(text)
    if share is not None:
        raise UsageError(f"fault {text!r} has a share; only --fault takes one")
    return fault


def parse_fault_share(text: str) -> tuple[Fault, float]:
    """``name:share=0.05,key=value,…`` for the command line."""
    fault, share = _parse(text)
    if share is None or not 0 < share <= 1:
        raise UsageError(f"fault {text!r} needs a share above 0 and up to 1, for example {fault.name}:share=0.05")
    return fault, share


def _parse(text: str) -> tuple[Fault, float | None]:
    name, _, rest = text.strip().partition(":")
    if name not in PARAMETERS:
        raise UsageError(f"fault {name!r} does not exist; choose one of {', '.join(PARAMETERS)}")
    parameters: dict[str, Value] = {"after": 0} if name in AFTER_CHUNKS else {}
    parameters |= _DEFAULTS.get(name, {})
    share: float | None = None
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        kind = float if key == "share" else PARAMETERS[name].get(key)
        if kind is None:
            raise UsageError(f"fault {name!r} has no parameter {key!r}; it has {', '.join(PARAMETERS[name]) or 'none'}")
        try:
            converted: Value = kind(value)
        except ValueError as error:
            raise UsageError(f"fault {name!r}: {key}={value!r} is not a valid {kind.__name__}") from error
        if key == "share":
            share = float(converted)
        else:
            parameters[key] = converted
    _check(name, parameters)
    return Fault(name, parameters), share


def _check(name: str, parameters: Mapping[str, Value]) -> None:
    if name == "line_end" and parameters["style"] not in ("crlf", "cr"):
        raise UsageError(f"fault 'line_end': style={parameters['style']} must be crlf or cr")
    if name == "status" and parameters["code"] not in _ERROR_STATUSES:
        raise UsageError(f"fault 'status': code={parameters['code']} must be a known status from 400 to 599")
    for key in ("events", "bytes", "tokens"):
        if key in parameters and int(parameters[key]) < 1:
            raise UsageError(f"fault {name!r}: {key}={parameters[key]} must be at least 1")


class FaultPlan:
    """Which request gets which fault: a draw per request, in order of arrival, from one seeded sequence."""

    def __init__(self, faults: Sequence[tuple[Fault, float]], seed: int) -> None:
        total = sum(share for _, share in faults)
        if total > 1:
            raise UsageError(f"the shares of all faults add up to {total:g}; they must not exceed 1")
        self._faults = tuple(faults)
        self._random = random.Random(seed)

    def draw(self) -> Fault | None:
        position = self._random.random()
        for fault, share in self._faults:
            if position < share:
                return fault
            position -= share
        return None


_FIRST_COMMA = re.compile(rb',"(?=object|created)')


def spell(event: bytes, fault: Fault, *, first: bool) -> bytes:
    """The same event as another server might write it."""
    match fault.name:
        case "line_end":
            return event.replace(b"\n", b"\r\n" if fault.parameters["style"] == "crlf" else b"\r")
        case "no_space":
            return event.replace(b"data: ", b"data:", 1) if event.startswith(b"data: ") else event
        case "comments":
            return b": a comment\n\n: another\n" + event
        case "bom":
            return b"\xef\xbb\xbf" + event if first else event
        case "multi_data":
            return _FIRST_COMMA.sub(b',\ndata: "', event, count=1)
        case _:
            return event
