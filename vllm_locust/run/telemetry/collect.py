"""``vllm-locust collect``: GPUs and host of this machine into the telemetry streams, until it is told to end."""

from __future__ import annotations

import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from vllm_locust.clock import WallAxis
from vllm_locust.collect.collector import Collector, CollectorCost
from vllm_locust.collect.dcgm import DcgmSource
from vllm_locust.collect.gpu_source import GpuSource, Remarks
from vllm_locust.collect.nvml import NvmlSource, open_nvml
from vllm_locust.collect.page_request import PageFailed, request_page
from vllm_locust.duration import parse_duration_ns
from vllm_locust.errors import StoreError, UsageError
from vllm_locust.metrics_page import MetricsPage
from vllm_locust.store.redis_url import RedisOptions, redis_options
from vllm_locust.store.telemetry import PublisherConfig, TelemetryPublisher, new_source
from vllm_locust.store.telemetry_store import TelemetryStore

_SHORTEST_NS: Final = 10_000_000
_DCGM_TIMEOUT_S: Final = 5.0
_LONGEST_NS: Final = 60_000_000_000
_NAME_CHARS: Final = 253


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectOrder:
    redis: RedisOptions
    interval_ns: int
    gpus: str | None = None
    dcgm_pages: tuple[MetricsPage, ...] = ()
    host_only: bool = False
    host_name: str = ""
    """In every row; that of this host where it is empty."""

    @classmethod
    def parse(
        cls,
        *,
        redis_url: str,
        redis_password_file: Path | None = None,
        interval: str = "100ms",
        gpus: str | None = None,
        dcgm_urls: Sequence[str] = (),
        host_only: bool = False,
        host_name: str | None = None,
    ) -> Self:
        problems: list[str] = []
        interval_ns = 0
        try:
            interval_ns = parse_duration_ns(interval)
        except ValueError as error:
            problems.append(f"--interval: {error}")
        else:
            if not _SHORTEST_NS <= interval_ns <= _LONGEST_NS:
                problems.append(f"--interval {interval}: give 10ms to 60s")
        if host_name is not None and not (0 < len(host_name) <= _NAME_CHARS and host_name.isprintable()):
            problems.append(f"--host-name: give 1 to {_NAME_CHARS} printable characters")
        given = {"--gpus": gpus is not None, "--dcgm-url": bool(dcgm_urls), "--host-only": host_only}
        both = [flag for flag, is_given in given.items() if is_given]
        if len(both) > 1:
            problems.append(f"{' with '.join(both)}: give only one of them")
        pages = []
        for url in dcgm_urls:
            try:
                pages.append(MetricsPage.parse(url))
            except ValueError as error:
                problems.append(f"--dcgm-url: {error}")
        try:
            options = redis_options(redis_url, redis_password_file)
        except UsageError as error:
            raise UsageError(*problems, *error.problems) from None
        if problems:
            raise UsageError(*problems)
        return cls(
            redis=options,
            interval_ns=interval_ns,
            gpus=gpus,
            dcgm_pages=tuple(pages),
            host_only=host_only,
            host_name=host_name or "",
        )


def collect(
    order: CollectOrder,
    *,
    open_driver: Callable[[], Any] = open_nvml,
    ended: threading.Event | None = None,
    started: Callable[[], None] = lambda: None,
) -> int:
    """Until ``ended`` is set; where it is not given, until SIGINT or SIGTERM. ``started`` is called when all is open.
    Raises ``UsageError`` where there is no GPU to read, or no Redis to write to.
    """
    host, axis = order.host_name or socket.gethostname(), WallAxis()
    remarks = Remarks(_say)
    sources: list[GpuSource] = [_dcgm_source(page, remarks, axis) for page in order.dcgm_pages]
    if not order.host_only and not sources:
        sources.append(NvmlSource(open_driver(), remarks, host=host, axis=axis, gpus=order.gpus))
    store = TelemetryStore(order.redis)
    by_signal = ended is None
    ended = _end_by_signal() if ended is None else ended
    try:
        _check(store)
        publisher = TelemetryPublisher(store, PublisherConfig(source=new_source(host)), unix_ns=axis.unix_ns)
        collector = Collector(
            sources, publisher, remarks, host=host, axis=axis, interval_ns=order.interval_ns, wait=ended.wait
        )
        _announce(order, host, sources, "; Ctrl-C ends it" if by_signal else "")
        started()
        collector.run()
        publisher.close()
        _tell_cost(collector.cost, publisher)
    finally:
        for source in sources:
            source.close()
        store.close()
    return 0


def _dcgm_source(page: MetricsPage, remarks: Remarks, axis: WallAxis) -> DcgmSource:
    tls = ssl.create_default_context()
    try:
        return DcgmSource(page, lambda page: request_page(page, tls=tls, timeout_s=_DCGM_TIMEOUT_S), remarks, axis=axis)
    except PageFailed as failed:
        raise UsageError(f"--dcgm-url {page.url}: {failed}") from None


def _say(line: str) -> None:
    sys.stderr.write(f"vllm-locust: {line}\n")
    sys.stderr.flush()


def _check(store: TelemetryStore) -> None:
    try:
        store.check_server()
    except StoreError as error:
        fix = "" if "--redis-password-file" in str(error) else "; start it, or correct the address"
        raise UsageError(f"--redis-url: {error}{fix}") from None


def _end_by_signal() -> threading.Event:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    return ended


def _announce(order: CollectOrder, host: str, sources: Sequence[GpuSource], end: str) -> None:
    for source in sources:
        for line in source.describe():
            _say(line)
    what = "GPUs and host" if sources else "the host"
    _say(f"sampling {what} of {host} every {order.interval_ns / 1e9:g} s into {order.redis.where}{end}")


def _tell_cost(cost: CollectorCost, publisher: TelemetryPublisher) -> None:
    per_tick_ms = cost.tick_cpu_ns / cost.ticks / 1e6 if cost.ticks else 0.0
    _say(
        f"{cost.ticks} samples, {cost.missed_ticks} missed; {per_tick_ms:.2f} ms CPU each, "
        f"{cost.cpu_fraction:.1%} of a core in all"
    )
    if publisher.lost_batches or publisher.last_error is not None:
        lost = f"{publisher.lost_batches} batches were given up" if publisher.lost_batches else "its last second"
        _say(f"not all of it is in Redis ({lost}): {publisher.last_error or 'it was away too long'}")
