"""What keeps strangers from the web UI's state: Locust itself answers every origin, and is in debug mode.

A page of another site can make a browser send a POST here, with the cookies of a login. Browsers say where a POST
comes from: in ``Sec-Fetch-Site`` where the connection can be trusted, in ``Origin`` always. What says neither is no
browser. A hostile name that was made to point at this machine (DNS rebinding) agrees with its own Origin, and its pages
may read what they get: so over plain HTTP and without a login nothing is answered under a name that anybody could own.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable
from typing import Any, Final
from urllib.parse import urlsplit

from flask import Flask, Response, jsonify, request

from vllm_locust.errors import UsageError

_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_PRIVATE_SUFFIXES: Final = (".localhost", ".local", ".internal", ".svc", ".lan", ".home.arpa", ".test")
"""Nobody can register a name with these for others to find."""

_StartResponse = Callable[..., Any]


def own_names(text: str | None) -> frozenset[str]:
    """The host names of ``--web-names``. Raises UsageError."""
    names = [name.strip().lower().rstrip(".") for name in (text or "").split(",") if name.strip()]
    if wrong := [name for name in names if not all(part.replace("-", "").isalnum() for part in name.split("."))]:
        raise UsageError(
            f"--web-names: {wrong[0][:80]!r} is no host name; write names such as load.example.com, with commas between"
        )
    return frozenset(names)


def guard(app: Flask, *, login: bool, names: frozenset[str] = frozenset()) -> None:
    """To be called before the server starts. ``names``: host names that are this site's own."""
    app.debug = False
    app.wsgi_app = _WithoutCors(app.wsgi_app)  # type: ignore[method-assign]

    @app.before_request
    def refuse_other_sites() -> Response | None:
        fetch_site, origin, host = (request.headers.get(name) for name in ("Sec-Fetch-Site", "Origin", "Host"))
        trusted = login or _is_private(host or "", names)
        if request.method in _SAFE_METHODS:
            fault = None if trusted else unknown_name(fetch_site, host or "")
        else:
            fault = foreign(fetch_site, origin, host or "", trusted=trusted)
        if fault is None:
            return None
        answer = jsonify({"success": False, "message": fault})
        answer.status_code = 403
        return answer

    @app.after_request
    def harden(response: Response) -> Response:
        response.headers.setdefault("X-Content-Type-Options", "nosniff")
        response.headers.setdefault("X-Frame-Options", "DENY")
        response.headers.setdefault("Referrer-Policy", "same-origin")
        return response


def unknown_name(fetch_site: str | None, host: str) -> str | None:
    """Why a request that only reads is not answered under a name that anybody could own; None where it is: browsers
    tell the site only over connections whose server has proved its name.
    """
    if fetch_site is not None:
        return None
    return (
        f"refused: over plain HTTP and without a login the name {host[:200]} may be a hostile one that leads here; "
        "open this page by its IP address, through HTTPS, or start Locust with --web-login or --web-names"
    )


def foreign(fetch_site: str | None, origin: str | None, host: str, *, trusted: bool) -> str | None:
    """Why a request that changes something is not heard; None where it is. ``host`` is its Host header; ``trusted``
    says that there is a login, or that the name is one that no stranger can have.
    """
    if fetch_site is not None:
        if fetch_site in ("same-origin", "none"):
            return None
        return "refused: the request comes from a page of another site"
    if origin is None:
        return None
    if urlsplit(origin).netloc.lower() != host.lower():
        return (
            f"refused: the request comes from a page at {origin[:200]}, and this is {host[:200]}; a proxy in between "
            "must pass the Host header on"
        )
    return None if trusted else unknown_name(None, host)


def _is_private(host: str, names: frozenset[str]) -> bool:
    """Whether a hostile site cannot have this name: an address, this machine's own, or one without a public domain."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        own = {socket.gethostname().lower(), socket.getfqdn().lower()}
        return "." not in name or name in own | names or name.endswith(_PRIVATE_SUFFIXES)
    return True


class _WithoutCors:
    """Takes away the headers by which Locust lets pages of all sites read its answers."""

    def __init__(self, app: Callable[[Any, _StartResponse], Iterable[bytes]]) -> None:
        self._app = app

    def __call__(self, environ: Any, start_response: _StartResponse) -> Iterable[bytes]:
        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            kept = [header for header in headers if not header[0].lower().startswith("access-control-")]
            return start_response(status, kept, *rest)

        return self._app(environ, start)
