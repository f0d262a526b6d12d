from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.faults.network import Network, why_not
from tests.faults.redis_host import RedisHost


@pytest.fixture(scope="session")
def namespaces() -> None:
    """CI may not skip what it is there to show."""
    reason = why_not()
    if reason is not None and os.environ.get("CI") == "true":
        pytest.fail(f"CI has to run the fault suite, but {reason}")
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def network(namespaces: None) -> Iterator[Network]:  # noqa: ARG001 - it skips or fails first
    hosts = Network("master", "client1", "client2", "redis", "server")
    yield hosts
    hosts.close()


@pytest.fixture
def redis(network: Network) -> Iterator[RedisHost]:
    server = RedisHost(network["redis"])
    yield server
    server.close()
