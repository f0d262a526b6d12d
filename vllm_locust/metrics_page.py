"""Where a server tells its metrics: the address of one page, as ``--metrics-url`` names it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from vllm_locust.server_url import authority, port_of, split_server_url

USUAL_PATH: Final = "/metrics"
API_PATH: Final = "/v1"
_VISIBLE: Final = re.compile(r"[!-~]*")
_EXAMPLE: Final = "http://HOST:PORT/metrics, https://… or unix:///path"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsPage:
    """``socket_path`` is set for a server on a unix socket, whose page is at the usual path."""

    scheme: str
    host: str
    port: int
    path: str
    """With its query."""
    socket_path: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """An address without a path is a server's, with its page at ``/metrics``; one that ends in ``/v1`` is that of
        its API. Raises ValueError.
        """
        parts = split_server_url(text, _EXAMPLE)
        if parts.scheme == "unix":
            return cls(scheme="unix", host="localhost", port=0, path=USUAL_PATH, socket_path=parts.path)
        if parts.fragment or _VISIBLE.fullmatch(parts.path + parts.query) is None:
            raise ValueError(f"{text!r} is not the address of a page; write {_EXAMPLE}")
        given = parts.path.rstrip("/")
        is_server = not given or given.endswith(API_PATH)
        path = f"{given.removesuffix(API_PATH)}{USUAL_PATH}" if is_server else parts.path
        assert parts.hostname is not None
        return cls(
            scheme=parts.scheme,
            host=parts.hostname,
            port=port_of(parts),
            path=f"{path}?{parts.query}" if parts.query else path,
        )

    @property
    def authority(self) -> str:
        return self.host if self.socket_path is not None else authority(self.host, self.port, self.scheme)

    @property
    def url(self) -> str:
        return f"{self._server}{self.path}"

    @property
    def target(self) -> str:
        """The server it tells of, as ``requests.parquet`` names it: the address without ``/metrics`` or
        ``/v1/metrics``.
        """
        return self._server + self.path.removesuffix(USUAL_PATH).removesuffix(API_PATH)

    @property
    def _server(self) -> str:
        return f"unix://{self.socket_path}" if self.socket_path is not None else f"{self.scheme}://{self.authority}"


def read_metrics_pages(given: Iterable[str], problems: list[str]) -> tuple[MetricsPage, ...] | None:
    """What ``--metrics-url`` says: None where it is not given, no page for ``none``."""
    texts = [text for text in given if text]
    if not texts or "none" in texts:
        if len(texts) > 1:
            problems.append("--metrics-url none: nothing is read with it; drop it, or the other addresses")
        return () if texts else None
    pages: dict[str, MetricsPage] = {}
    for text in texts:
        try:
            page = MetricsPage.parse(text)
        except ValueError as error:
            problems.append(f"--metrics-url: {error}")
            continue
        other = pages.setdefault(page.target, page)
        if other != page:
            problems.append(f"--metrics-url: {other.url} and {page.url} are both of {page.target}; give one of them")
    return tuple(pages.values())
