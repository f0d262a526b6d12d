"""Which proxy lies between us and a server. None unless ``--proxy`` names one: proxy variables are ignored by
default.
"""

from __future__ import annotations

import base64
import os
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import proxy_bypass

from vllm_locust.config import Target
from vllm_locust.errors import UsageError


def proxy_for(setting: str | None, target: Target) -> SplitResult | None:
    """``setting`` is an address, or ``env`` for the usual variables, or None. What comes back has a host, and a port
    that is a number or None. Raises UsageError for a variable that names no such proxy.
    """
    if setting is None or target.socket_path is not None:
        return None
    if setting != "env":
        return urlsplit(setting)
    if proxy_bypass(target.host):
        return None
    name = f"{target.scheme}_proxy"
    if not os.environ.get(name) and target.scheme == "https":
        name = name.upper()
    address = os.environ.get(name)
    return _parsed(name, address) if address else None


def _parsed(name: str, address: str) -> SplitResult:
    try:
        proxy = urlsplit(address if "://" in address else f"http://{address}")
        usable = proxy.scheme == "http" and bool(proxy.hostname) and (proxy.port is None or proxy.port > 0)
        proxy_authorization(proxy)
    except ValueError:
        usable = False
    if not usable:
        # The address stays unsaid, since it may hold a password.
        raise UsageError(
            f"--proxy env: the variable {name} does not hold the address of an HTTP proxy; write http://HOST:PORT into "
            "it, with a port from 1 to 65535, or leave --proxy out"
        )
    return proxy


def proxy_authorization(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    words = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(words.encode()).decode()}
