from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.load.driving import close_drivers


@pytest.fixture(scope="package", autouse=True)
def drivers() -> Iterator[None]:
    """The gevent-patched processes that run the transports; they end with the package's last test."""
    yield
    close_drivers()
