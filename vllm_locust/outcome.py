"""How a request ended: exactly one outcome each."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """The outcome of one request. Everything but ``OK`` is a failure, and slower than every success."""

    OK = "ok"
    HTTP_ERROR = "http_error"
    """The status was not 200."""
    ERROR_EVENT = "error_event"
    """An error inside a 200 stream, or finish reason ``error`` or ``abort``."""
    TRUNCATED = "truncated"
    """The body ended, cleanly or by close, without ``[DONE]`` or a finish reason."""
    DISCONNECTED = "disconnected"
    """The connection was reset, or ended inside a framed body."""
    CONNECT_ERROR = "connect_error"
    TIMEOUT_CONNECT = "timeout_connect"
    TIMEOUT_FIRST_TOKEN = "timeout_first_token"
    TIMEOUT_IDLE = "timeout_idle"
    TIMEOUT_TOTAL = "timeout_total"
    BAD_RESPONSE = "bad_response"
    """A 200 that is neither a stream nor a JSON completion."""
    EMPTY = "empty"
    """Finished without a token."""
    SHORT = "short"
    """Fewer tokens than ``--force-length`` asked for."""
    CLIENT_ERROR = "client_error"
    """Our own limit: file descriptors, ports, memory."""
    ABANDONED = "abandoned"
    """The simulated user lost patience."""
    CENSORED = "censored"
    """Still running when the drain ended."""
