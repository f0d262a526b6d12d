from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simserver.raw_client import Server, running

FAST = ("--first-token-ms", "2", "--token-interval-ms", "1", "--empty-text-share", "0")


@pytest.fixture(scope="package")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A token per millisecond."""
    with running(tmp_path_factory.mktemp("fast"), *FAST) as server:
        yield server
