"""Which proxy lies between us and a server. None unless ``--proxy`` names one: proxy variables are ignored by
default.
"""

from __future__ import annotations

import base64
import os
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import proxy_bypass

from vllm_locust.config import Target


def proxy_for(setting: str | None, target: Target) -> SplitResult | None:
    """``setting`` is an address, or ``env`` for the usual variables, or None."""
    if setting is None or target.socket_path is not None:
        return None
    if setting != "env":
        return urlsplit(setting)
    if proxy_bypass(target.host):
        return None
    name = f"{target.scheme}_proxy"
    address = os.environ.get(name) or (os.environ.get(name.upper()) if target.scheme == "https" else None)
    return urlsplit(address) if address else None


def proxy_authorization(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    words = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(words.encode()).decode()}
